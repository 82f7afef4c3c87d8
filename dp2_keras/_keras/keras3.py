"""Keras 3 on TensorFlow."""

import contextlib
import json

import tensorflow as tf
from keras.src.losses import loss
from keras.src.models.functional import Functional
from keras.src.random.seed_generator import global_seed_generator

from dp2_keras._keras.common import *  # noqa: F403
from dp2_keras._keras.common import (
    OwnState,
    attributes,
    flatten_layers,
    keras,
    recurrent_layers,
    unless_empty,
    unrolling,
)
from dp2_keras.errors import NonPrivateUpdateError

LossScaleOptimizer = keras.optimizers.LossScaleOptimizer

FITS_ON_WORKERS = False  # Keras's own `fit` fails under a MultiWorkerMirroredStrategy.


class Backups:
    """What the `BackupAndRestore` callbacks of a fit find on disk, and what they leave there.

    Keras writes the weights, then the epoch to go on with in a file apart, and starts that epoch anew. A kill
    leaves an epoch that is torn, missing, or the one before; the weights then tell what comes next.

    Args:
        callbacks: all callbacks of the fit.
    """

    def __init__(self, callbacks):
        self._callbacks = [c for c in callbacks if isinstance(c, keras.callbacks.BackupAndRestore)]
        self.are_restored, self.without_epoch = False, []

    def prepare(self, model):
        """Notes what there is to restore, and takes torn epochs away before Keras reads them.

        Raises:
            ValueError: for an epoch without weights.
        """
        model._initial_epoch = None  # Keras would keep that of the fit before.
        for callback in self._callbacks:
            if tf.io.gfile.exists(callback._weights_path):
                self.are_restored = True
                if not _has_epoch(callback):
                    _forget_epoch(callback)
                    self.without_epoch.append(callback.backup_dir)
            elif tf.io.gfile.exists(callback._training_metadata_path):
                raise ValueError(
                    "A backup must have the weights to go on from: restore them, or remove the directory to "
                    f"start anew. Received: {callback._training_metadata_path!r} without them"
                )

    def go_on(self, model, epoch):
        """Sends a fit that was restored to an epoch, unless Keras knows of a later one."""
        model._initial_epoch = max(model._initial_epoch or 0, epoch)

    def end(self):
        """Takes the epochs away before Keras deletes the weights: they mean nothing without them."""
        for callback in self._callbacks:
            if callback.delete_checkpoint:
                _forget_epoch(callback)


def _has_epoch(callback):
    """Whether the file with the epoch to go on with is there, and whole."""
    try:
        with tf.io.gfile.GFile(callback._training_metadata_path) as file:
            epoch = json.loads(file.read())["epoch"]
    except (tf.errors.NotFoundError, ValueError, KeyError, TypeError):
        return False
    return type(epoch) is int and epoch >= 0


def _forget_epoch(callback):
    if tf.io.gfile.exists(callback._training_metadata_path):
        tf.io.gfile.remove(callback._training_metadata_path)


def native(variable):
    """The `tf.Variable` of a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def is_variable(value):
    """Whether this is a variable, Keras's or TensorFlow's."""
    return isinstance(value, (keras.Variable, tf.Variable))


def regularizer_count(model):
    """How many weights carry a regulariser."""
    return sum(v.regularizer is not None for v in model.trainable_variables)


def regularization_loss(model):
    """The sum of the weight regularisers; free of data."""
    weights = [v for v in model.trainable_variables if v.regularizer is not None]
    return tf.add_n([tf.cast(v.regularizer(v), tf.float32) for v in weights])


@contextlib.contextmanager
def constant_regularizers(model):
    """Inside, weight regularisers keep their value and have no gradient."""
    weights = [v for v in model.trainable_variables if v.regularizer is not None]
    frozen = [_ConstantRegularizer(v) for v in weights]
    with attributes([(v, "regularizer", r) for v, r in zip(weights, frozen)]):
        yield


class _ConstantRegularizer(keras.regularizers.Regularizer):
    def __init__(self, variable):
        self.variable, self.regularizer = variable, variable.regularizer

    def __call__(self, _):
        return self.regularizer(tf.stop_gradient(tf.convert_to_tensor(self.variable)))


def random_source_count(model):
    """How many generators of random numbers the layers own."""
    return len(_seed_generators(model))


def _seed_generators(model):
    owned = [g for layer in flatten_layers(model) for g in layer._seed_generators]
    return [*owned, global_seed_generator()]


def random_state_handles(model):
    """The resource handles that drawing random numbers may write."""
    return [g.state.value.handle for g in _seed_generators(model)]


@contextlib.contextmanager
def example_scope(model, seeds):
    """Inside, one example: random layers follow `seeds`, and nothing is written.

    Args:
        model: the model.
        seeds: uint32 [random_source_count(model), 2].
    """
    states = [g.state for g in _seed_generators(model)]
    mapping = [(state, tf.cast(seed, state.dtype)) for state, seed in zip(states, tf.unstack(seeds))]
    with keras.StatelessScope(state_mapping=mapping):
        yield


def substituted(layer, values):
    """Inside, a layer reads these values for its variables.

    Args:
        layer: the layer.
        values: list of (variable, tensor).
    """
    del layer  # Whoever asks for the variable gets the value.
    return keras.StatelessScope(state_mapping=values)


def own_trainable_variables(layer):
    """The trainable variables of a layer that belong to none of its sublayers."""
    return layer._trainable_variables if layer.trainable else []


def call_function(layer):
    """What `layer(...)` calls once inputs are cast."""
    return layer.call


def unrolled(model):
    """Inside, recurrent layers unroll over time, which `vectorized_map` can take."""
    recurrent = recurrent_layers(model)
    return unrolling(
        [(layer, "unroll", True) for layer in recurrent]
        + [(layer, "use_cudnn", False) for layer in recurrent if hasattr(layer, "use_cudnn")]
    )


def added_losses(layer):
    """What the layer's own last call gave to `add_loss`."""
    return list(layer._losses)


def operations(model):
    """Layers and operations that one call of the model runs, nested models left whole."""
    return model.operations if isinstance(model, Functional) else model.layers


def operation_name(operation):
    """What an operation of a functional model does, in lower case; of a layer, its class."""
    return type(operation).__name__.lower()


def operation_calls(operation):
    """Pairs of the arguments and the output of each symbolic call of an operation."""
    nodes = operation._inbound_nodes
    return [((n.arguments.args, n.arguments.kwargs), n.outputs[0]) for n in nodes]


def is_symbolic(value):
    """Whether this stands for a tensor of a functional model."""
    return isinstance(value, keras.KerasTensor)


def has_sparse_inputs(model):
    """Whether an input was declared with `keras.Input(..., sparse=True)`."""
    return any(tensor.sparse for tensor in getattr(model, "inputs", None) or [])


def sequential_layers(model):
    """The layers of a Sequential model, its input layer too."""
    return list(model._layers)


def forward(model, x, training=True):
    """Calls the model, as Keras's own `train_step` does by default."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def functional_structure(model):
    """Inputs and outputs of a functional model, as its author nested them."""
    return model._inputs_struct, model._outputs_struct


def build_losses(model, y_pred):
    """Makes the loss trackers, which must exist before the first example."""
    del model, y_pred  # Keras 3 has done so by now.


def compute_loss(model, x, y, y_pred, sample_weight):
    """The compiled loss, through the model's own `compute_loss`."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)


def update_loss(model, x, y, y_pred, sample_weight, batch_size):
    """Logs the loss of a batch as Keras's own `train_step` does."""
    with unless_empty(batch_size, [native(v) for metric in model.metrics for v in metric.variables]):
        loss = compute_loss(model, x, y, y_pred, sample_weight)
        model._loss_tracker.update_state(loss, sample_weight=batch_size)


def compile_without_optimizer(model, *args, **kwargs):
    """Gives a model a loss and metrics, and no way to be trained. Its file has neither."""
    model.compile(None, *args, **kwargs)
    del model._compile_config


def whole_losses():
    """Inside, a replica's losses are not divided by the number of replicas: an example's is its own."""
    whole = lambda value: value  # noqa: E731
    return attributes([(loss, f"{prefix}scale_loss_for_distribution", whole) for prefix in ("", "un")])


class BuiltByShape:
    """A model that Keras builds from the shapes of one replica's batch.

    Keras would take the mean over all replicas' batches, which differ in size.
    """

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        strategy = self.distribute_strategy
        if iterator is not None and strategy.num_replicas_in_sync > 1:
            _, _, batches = next(iter(iterator))
            first = lambda part: strategy.experimental_local_results(part)[0]  # noqa: E731
            iterator, data_batch = None, tf.nest.map_structure(first, next(batches))
        super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)


def h5_file(store):
    """The HDF5 file of the store that a model saves into or loads from, or None."""
    return getattr(store, "h5_file", None)


class Optimizer(OwnState, keras.optimizers.Optimizer):
    """A Keras optimizer whose public ways to update weights are closed."""

    _stock_loss = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        global_seed_generator()  # Made on first use, which must not be inside a graph.

    def is_built(self):
        """Whether the state exists."""
        return self.built

    def ensure_built(self, variables):
        """Creates the state, or checks that it fits these variables."""
        if not self.built:
            with tf.init_scope():
                self.build(variables)
        self._check_variables_are_known(variables)

    def variable_index(self, variable):
        """The position of a variable among those the optimizer was built with."""
        return self._get_variable_index(variable)

    def add_state(self, variables, name):
        """A zero per variable, in at least float32."""
        return [self._add_zeros(v, f"{v.path.replace('/', '_')}_{name}") for v in variables]

    def _add_zeros(self, variable, name):
        dtype = tf.as_dtype(variable.dtype)
        return self.add_variable(
            variable.shape, dtype=dtype.name if dtype.size >= 4 else "float32", name=name
        )

    def add_scalar(self, value, name):
        """A scalar that is saved with the state."""
        return self.add_variable(
            (), dtype="float32", initializer=keras.initializers.Constant(value), name=name
        )

    def apply_updates(self, updates, variables):
        """Keras's own update: weights, moving average, constraints, step counter."""
        super().apply(updates, variables)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        """Updates the weights of all replicas, which have met already if there are several."""
        if not tf.distribute.in_cross_replica_context():
            return super()._backend_update_step(grads, trainable_variables, learning_rate)
        pairs = list(zip(grads, map(native, trainable_variables)))
        return self._distributed_tf_update_step(tf.distribute.get_strategy(), pairs, learning_rate)

    def _apply_weight_decay(self, variables):
        """`finish_step` decays, at the rate of the step's phase."""

    def scale_loss(self, loss):
        """Keras calls it with the loss of a stock model, right before the gradient."""
        self._stock_loss = loss
        return loss

    def apply_gradients(self, grads_and_vars):
        """Trains a stock model privately, or raises; the gradients are not looked at."""
        loss, self._stock_loss = self._stock_loss, None
        self.train_stock_model(loss, [v for _, v in grads_and_vars])

    def apply(self, grads, trainable_variables=None):
        """Raises: gradients of unknown origin are never applied."""
        del grads, trainable_variables
        raise NonPrivateUpdateError(self.how_to_train)
