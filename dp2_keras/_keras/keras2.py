"""Keras 2 (TensorFlow 2.14). What each name means is said in `keras3.py`."""

import contextlib

import tensorflow as tf
from keras.src.engine.functional import Functional  # noqa: F401
from keras.src.utils import losses_utils

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

LossScaleOptimizer = keras.mixed_precision.LossScaleOptimizer

FITS_ON_WORKERS = True


class Backups:
    """Keras 2 backs up epoch, step and weights as one, and needs nothing."""

    are_restored, without_epoch = False, ()

    def __init__(self, callbacks):
        pass

    def prepare(self, model):
        pass

    def end(self):
        pass


def native(variable):
    return variable


def is_variable(value):
    return isinstance(value, tf.Variable)


def _regularizers(model):
    return [f for layer in flatten_layers(model) for f in layer._callable_losses]


def regularizer_count(model):
    return len(_regularizers(model))


def regularization_loss(model):
    return tf.add_n([tf.cast(f(), tf.float32) for f in _regularizers(model)])


@contextlib.contextmanager
def constant_regularizers(model):
    layers = [layer for layer in flatten_layers(model) if layer._callable_losses]
    held = [list(layer._callable_losses) for layer in layers]
    for layer, regularizers in zip(layers, held):
        layer._callable_losses[:] = [_constant(f) for f in regularizers]
    try:
        yield
    finally:
        for layer, regularizers in zip(layers, held):
            layer._callable_losses[:] = regularizers


def _constant(regularizer):
    return lambda: tf.stop_gradient(regularizer())


def random_source_count(model):
    return len(_random_generators(model))


def _random_generators(model):
    layers = flatten_layers(model)
    return [layer._random_generator for layer in layers if hasattr(layer, "_random_generator")]


def random_state_handles(model):
    del model  # Keras 2's generators are not written by an assignment.
    return []


@contextlib.contextmanager
def example_scope(model, seeds):
    changes = [(metric, "update_state", _no_update) for metric in model.metrics]
    for k, generator in enumerate(_random_generators(model)):
        changes += [
            (generator, "_rng_type", generator.RNG_STATELESS),
            (generator, "_built", True),
            (generator, "make_seed_for_stateless_op", _seed_sequence(seeds[k])),
        ]
    with attributes(changes):
        yield


def _no_update(*args, **kwargs):
    del args, kwargs


def _seed_sequence(seed):
    """A new seed at each call of a generator, for layers that are used twice."""
    calls = iter(range(1 << 20))

    def next_seed():
        # A Sequential model that meets a new shape first calls its layers to infer theirs.
        graph = tf.compat.v1.get_default_graph()
        inferring = getattr(graph, "name", "").endswith("_scratch_graph")  # An eager one has no name.
        return tf.bitcast(seed, tf.int32) + tf.constant([0, 0 if inferring else next(calls)])

    return next_seed


@contextlib.contextmanager
def substituted(layer, values):
    tensors = {id(variable): tensor for variable, tensor in values}
    holders = [vars(part) for part in flatten_layers(layer)]
    found = [(h, name, v) for h in holders for name, v in h.items() if id(v) in tensors]
    for holder, name, variable in found:
        holder[name] = tensors[id(variable)]
    try:
        yield
    finally:
        for holder, name, variable in found:
            holder[name] = variable


def own_trainable_variables(layer):
    return layer._trainable_weights if layer.trainable else []


def call_function(layer):
    return layer.call if tf.executing_eagerly() else layer._autographed_call()


def unrolled(model):
    recurrent = recurrent_layers(model)
    fused = [layer for layer in recurrent if hasattr(layer, "_could_use_gpu_kernel")]
    return unrolling(
        [(layer, "unroll", True) for layer in recurrent]
        + [(layer, "_could_use_gpu_kernel", False) for layer in fused]
    )


def added_losses(layer):
    return [*layer._losses, *layer._eager_losses]


def operations(model):
    return model.layers


def operation_name(operation):
    return getattr(operation, "symbol", type(operation).__name__).split(".")[-1].lower()


def operation_calls(operation):
    return [((n.call_args, n.call_kwargs), n.outputs) for n in operation._inbound_nodes]


def is_symbolic(value):
    return isinstance(value, keras.__internal__.KerasTensor)


def has_sparse_inputs(model):
    """Whether an input was declared with `keras.Input(..., sparse=True)`."""
    specs = [getattr(tensor, "type_spec", None) for tensor in getattr(model, "inputs", None) or []]
    return any(isinstance(spec, tf.SparseTensorSpec) for spec in specs)


def sequential_layers(model):
    return list(model._self_tracked_trackables)


def forward(model, x, training=True):
    return model(x, training=training)


def functional_structure(model):
    return model._nested_inputs, model._nested_outputs


def build_losses(model, y_pred):
    # A model with a `compute_loss` of its own and no compiled loss logs none.
    if model.loss and not model.compiled_loss.built:
        model.compiled_loss.build(y_pred)


def compute_loss(model, x, y, y_pred, sample_weight):
    loss = model.compute_loss(x, y, y_pred, sample_weight)
    model._validate_target_and_loss(y, loss)
    return loss


def update_loss(model, x, y, y_pred, sample_weight, batch_size):
    # Keras 2 logs the loss while it computes it.
    with unless_empty(batch_size, [v for metric in model.metrics for v in metric.variables]):
        compute_loss(model, x, y, y_pred, sample_weight)


def compile_without_optimizer(model, *args, **kwargs):
    model.compile("sgd", *args, **kwargs)
    model.optimizer = None
    del model._compile_config


def whole_losses():
    return attributes([(losses_utils, "scale_loss_for_distribution", lambda value: value)])


class BuiltByShape:
    """Keras 2 builds a model as it goes."""


def h5_file(store):
    return getattr(store, "file", None)


class Optimizer(OwnState, keras.optimizers.Optimizer):
    """A Keras optimizer whose public ways to update weights are closed."""

    def __init__(self, learning_rate, name, **kwargs):
        super().__init__(name=name, jit_compile=False, **kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)

    def build(self, var_list):
        super().build(var_list)
        self._built = True

    def is_built(self):
        return getattr(self, "_built", False)

    def ensure_built(self, variables):
        if not self.is_built():
            with tf.init_scope():
                self.build(variables)
        for variable in variables:
            if self._var_key(variable) not in self._index_dict:
                raise ValueError(
                    f"Unknown variable: {variable.name}. An optimizer trains the variables it was "
                    "built with; make a new optimizer for a new set of them."
                )

    def variable_index(self, variable):
        return self._index_dict[self._var_key(variable)]

    def add_state(self, variables, name):
        return [self._add_zeros(v, f"{name}/{v.name.split(':')[0]}") for v in variables]

    def _add_zeros(self, variable, name):
        dtype = tf.as_dtype(variable.dtype)
        return self.add_variable(variable.shape, dtype=dtype if dtype.size >= 4 else tf.float32, name=name)

    def add_scalar(self, value, name):
        return self.add_variable(
            [], dtype=tf.float32, initializer=keras.initializers.Constant(value), name=name
        )

    def apply_updates(self, updates, variables):
        super().apply_gradients(list(zip(updates, variables)), skip_gradients_aggregation=True)

    def _internal_apply_gradients(self, grads_and_vars):
        if not tf.distribute.in_cross_replica_context():
            return super()._internal_apply_gradients(grads_and_vars)
        return self._distributed_apply_gradients_fn(tf.distribute.get_strategy(), grads_and_vars)

    def _apply_weight_decay(self, variables):
        """`finish_step` decays, at the rate of the step's phase."""

    def minimize(self, loss, var_list, tape=None):
        """Trains a stock model privately, or raises."""
        self.train_stock_model(loss, var_list, tape)

    def compute_gradients(self, loss, var_list, tape=None):
        """Raises: a raw gradient is not for this optimizer's user."""
        del loss, var_list, tape
        raise NonPrivateUpdateError(self.how_to_train)

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        """Raises: gradients of unknown origin are never applied."""
        del grads_and_vars, args, kwargs
        raise NonPrivateUpdateError(self.how_to_train)
