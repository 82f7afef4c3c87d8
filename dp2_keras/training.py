"""The private train step, for any Keras model to mix in.

One step: state a query, answer it example by example, hand the clipped sum back.

    query   = optimizer.begin_step(variables, gradients of public data, where it needs them)
    clipped = sum over examples of clip(scale * gradient of the example's own loss, C)
    optimizer.finish_step(clipped)

An example's loss is the compiled loss of a batch of one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from dp2_keras import _checks, _keras, methods, per_example, replicas, validation, xla
from dp2_keras.accounted import AccountedTraining
from dp2_keras.diagnostics import Diagnostics
from dp2_keras.example_pass import ExamplePass, as_tensor
from dp2_keras.optimizers import PrivateOptimizer
from dp2_keras.privatizer import ClippedSum, ClippingQuery
from dp2_keras.public_data import NOT_LOADED, PublicData, PublicGradients, held_for
from dp2_keras.sampling import padded_size

keras = _keras.keras


class PrivateTraining(AccountedTraining):
    """What makes a Keras model private: `compile`, `fit` and `train_step`.

    Mixed into `DP2Sequential`, `DP2Model` and the wrapper that `make_private` gives to
    subclassed models.
    """

    physical_batch_size = None
    method = "auto"
    diagnostics = True
    _diagnostics = None
    _public_data = None
    _plan = None
    _step_checked = False
    _traced_constants = None
    _jit_clipped_sum = False
    _in_loop = False

    def _loss_owner(self):
        """The model whose `compute_loss` and metrics count. (Keras saves properties.)"""
        return self

    def compile(
        self,
        optimizer,
        loss=None,
        *args,
        physical_batch_size=None,
        method="auto",
        diagnostics=True,
        public_data=None,
        public_batch_size=None,
        **kwargs,
    ):
        """Configures the model for private training; otherwise as in Keras.

        Args:
            optimizer: one of this package's optimizers.
            loss: as in Keras. Each example's loss is that of a batch of one; a masked
                sequence's loss is the mean over its own steps.
            *args: as in Keras.
            physical_batch_size: how many examples' gradients to hold in memory at a
                time. Changes nothing else (but dropout masks under ghost). Defaults to the
                whole batch.
            method: "auto" is ghost where the model allows it, else vectorized;
                `privacy_plan()` says which, and why. "ghost" runs a real batch and finds the
                norms without the gradients, in the memory of plain training. "vectorized"
                computes all examples of a chunk at once, and unrolls recurrent layers over
                time. "loop" takes them one by one: slow, in the memory of one, for
                sequences too long to unroll. All give the same sum, to rounding.
            diagnostics: log `phase`, `clipped_fraction` and `scaled_norm`, which
                epsilon does not cover. Defaults to True.
            public_data: (x, y), arrays that hold nothing of the protected examples, for optimizers that
                need public data, such as `AdaDPSRMSprop`. It is not saved with the model.
            public_batch_size: how many of its rows each step draws. Defaults to 64, or all if they are
                fewer.
            **kwargs: as in Keras.

        Raises:
            ValueError: if the optimizer is not private, or the model cannot be trained
                privately; the message names the layer or argument and the replacement. Also for
                public data that the optimizer needs and does not get, or gets and does not need.
        """
        _check_optimizer(optimizer)
        check_overrides(type(self), PrivateTraining)
        validation.check_model(self)
        validation.check_loss(loss)
        if physical_batch_size is not None:
            _checks.positive_integer(physical_batch_size=physical_batch_size)
        _checks.one_of(methods.METHODS, method=method)
        _checks.boolean(diagnostics=diagnostics)
        sparse = _keras.has_sparse_inputs(self)
        held = held_for(optimizer, public_data, public_batch_size, keeps_sparse=sparse)
        optimizer.settle_clip(*validation.losses_and_shapes(self, loss))
        self._public_data = None  # Should what follows raise, there is none.
        super().compile(optimizer, loss, *args, **kwargs)
        if held is not None:
            validation.check_ranges(self, *(*public_data, None)[:2])
            self._public_data = held
        self.physical_batch_size = physical_batch_size
        self.method = method
        self.diagnostics = diagnostics
        self._diagnostics = Diagnostics() if diagnostics else None
        self._step_checked, self._plan = False, None
        if self.built:
            with self.distribute_strategy.scope():
                optimizer.build(self.trainable_variables)  # Else within the first step, traced twice.
        self._idle()

    @property
    def public_data(self) -> PublicData | None:
        """What `compile` was given as public data, if the optimizer needs it."""
        return self._public_data

    def get_compile_config(self):
        """Keras's compile config, and ours."""
        config = super().get_compile_config()
        if config:
            # Beside the optimizer's config, where Keras passes over them: `clone_model` makes a
            # plain model of a Sequential one, and compiles it with this.
            config["optimizer"]["compile_options"] = {
                "physical_batch_size": self.physical_batch_size,
                "method": self.method,
                "diagnostics": self.diagnostics,
            }
        return config

    def compile_from_config(self, config):
        """Compiles a loaded model."""
        options = dict(config["optimizer"].get("compile_options", {}))
        config = keras.saving.deserialize_keras_object(config)
        if config["optimizer"].public_gradients is not None:
            options["public_data"] = NOT_LOADED
        self.compile(**config, **options)

    def load_weights(self, *args, **kwargs):
        """Loads weights as in Keras, and the optimizer's state if the file has it."""
        if self.built and getattr(self, "optimizer", None) is not None:
            self.optimizer.build(self.trainable_variables)
        return super().load_weights(*args, **kwargs)

    def make_train_function(self, force=False):
        """Makes the function that Keras's loops call; XLA compiles the clipped sum in it, not all of it.

        Normals take twice as long inside XLA, and metrics see batches of any size.
        """
        self._jit_clipped_sum = _keras.wants_jit(self)
        return _keras.make_train_function(self, super().make_train_function, force)

    def train_step(self, data):
        """One private step; Keras calls it.

        Args:
            data: (x, y, sample_weight) of a batch, of any size from 0.

        Returns:
            The log, as Keras's own step returns it, and the diagnostics.
        """
        try:
            data = tf.nest.map_structure(as_tensor, keras.utils.unpack_x_y_sample_weight(data))
            return replicas.meet(self._gated_step, data)
        except Exception:
            self.train_function = None  # TensorFlow may call a half-traced function empty.
            raise

    def _constants(self):
        """What a traced step holds as constants."""
        optimizer = self.optimizer
        return optimizer.ticket, optimizer.batch_size, optimizer.sigma, optimizer.l2_norm_clip

    def _gated_step(self, shares):
        """One step of all replicas, if it may run."""
        if not self._in_loop:
            replicas.check_one(tf.distribute.get_strategy(), "A step outside of `fit`")
        shares[0].run(self._check_step, shares[0].data)
        self._traced_constants = self._constants()
        meter, counts = self.account().meter, [_row_count(share.data) for share in shares]
        (examples,) = replicas.sum_over_workers([functools.reduce(operator.add, counts)])
        with tf.control_dependencies(_parts([share.data for share in shares])):  # No batch, no step.
            may_run = meter.gate(self.optimizer.ticket, examples, self._in_loop)
        return self._logs_if(replicas.all_agree(may_run), lambda: self._private_step(shares))

    def _private_step(self, shares):
        variables, first = self.trainable_variables, shares[0]
        with tf.control_dependencies([self.account().meter.count()]):
            public = first.run(self._public_gradients, variables, first.data)
            query = self.optimizer.begin_step(variables, public)
            result, *others = [share.run(self._share_of_step, query, share) for share in shares]
            result = result.plus(others)
            if self._diagnostics is not None:
                self._diagnostics.update(self.optimizer.phase(), result.norms, query.l2_norm_clip)
            regularization = first.run(self._regularization_gradients, query)
            self.optimizer.finish_step(result.clipped_sum, regularization)
            logs = self._loss_owner().get_metrics_result() if others else {}
        return {**result.logs, **logs, **self._diagnostics_result()}

    def _share_of_step(self, query, share):
        """A replica's part: its clipped sum and norms, and the log with its examples in it."""
        (x, y, sample_weight), owner = share.data, self._loss_owner()
        random_bits = functools.partial(self.optimizer.random_bits, variable=share.number)
        result, y_pred = self._answer(query, share.data, random_bits)
        _keras.update_loss(owner, x, y, y_pred, sample_weight, _row_count(share.data))
        logs = dict(owner.compute_metrics(x, y, y_pred, sample_weight))
        return _Part(result.clipped_sum, result.norms, logs)

    def _logs_if(self, may_run, step):
        """The logs of a step, or, where it may not run, the metrics as they are."""
        logs = {}

        def run():
            logs.update({name: tf.convert_to_tensor(value) for name, value in step().items()})
            return dict(logs)

        def stay():
            held = {**self._loss_owner().get_metrics_result(), **self._diagnostics_result()}
            return {name: held.get(name, tf.zeros_like(value)) for name, value in logs.items()} or held

        return tf.cond(may_run, run, stay)

    def _diagnostics_result(self):
        return {} if self._diagnostics is None else self._diagnostics.result()

    def _public_gradients(self, variables, data):
        """Gradients on a batch of public rows, if the model has them; of `data` only the shapes count."""
        if self._public_data is None:
            return None
        self._planned(ExamplePass(self, variables, data), variables, data)
        batch = keras.utils.unpack_x_y_sample_weight(self._public_data.batch(self.optimizer.public_bits))
        bits = functools.partial(self.optimizer.public_bits, variable=1)
        if self.optimizer.public_gradients == "each":
            return PublicGradients.of_each(self._each_gradient(variables, batch, bits))
        everything = ClippingQuery(variables, None, float("inf"))
        result, _ = self._answer(everything, batch, bits)
        return PublicGradients.mean_of(result.clipped_sum.values, self._public_data.batch_size)

    def _each_gradient(self, variables, public_batch, random_bits):
        example_pass, examples = self._passed(variables, public_batch, random_bits)
        return methods.EACH_GRADIENT[self._plan.method](example_pass, variables, examples)

    def _answer(self, query, data, random_bits=None):
        """The clipped sum over a batch, and the predictions it was computed with."""
        random_bits = random_bits or self.optimizer.random_bits
        example_pass, examples = self._passed(query.variables, data, random_bits)
        method = self._plan.method
        size = 1 if method == "loop" else self.physical_batch_size
        strategy, how = methods.STRATEGIES[method], self._compilation()
        result = per_example.clipped_sum(strategy, example_pass, query, examples, size, **how)
        return result, example_pass.predictions(result.outputs)

    def _passed(self, variables, data, random_bits):
        """What computes an example's gradient by the plan, and the examples of a batch for it."""
        example_pass = ExamplePass(self, variables, data)
        validation.check_equal_length(example_pass.tensors)
        leaves = example_pass.leaves
        shape = [per_example.batch_size(leaves), _keras.random_source_count(self), 2]
        examples = (leaves, random_bits(shape))
        plan = self._planned(example_pass, variables, data)
        if len(leaves) < len(example_pass.tensors):
            validation.check_sparse(plan, self.physical_batch_size)
        example_pass.unroll = plan.method == "vectorized"
        return example_pass, examples

    def _planned(self, example_pass, variables, data):
        """The plan, which the first batch of a trace confirms by its shapes."""
        if self._plan is None:
            leaves = example_pass.leaves
            seeds = tf.TensorSpec([leaves[0].shape[0], _keras.random_source_count(self), 2], tf.uint32)
            self._plan = methods.confirmed(methods.plan(self), self, variables, data, (leaves, seeds))
        return self._plan

    def privacy_plan(self) -> methods.PrivacyPlan:
        """How the clipped sum is computed, and why: a `PrivacyPlan` to print.

        Before the first step it is what the model's layers allow; the first step also
        finds weights that are used outside their layers, and may change it.

        Raises:
            ValueError: if the model was compiled with `method="ghost"` and may mix examples.
        """
        return self._plan or methods.plan(self)

    def _compilation(self):
        """How the clipped sum is compiled: not at all, or by XLA for a few sizes of batch."""
        if not self._jit_clipped_sum or tf.executing_eagerly():
            return {}
        size = -(-self.optimizer.batch_size // tf.distribute.get_strategy().num_replicas_in_sync)
        return {
            "padded_size": lambda count: padded_size(count, size),
            "compiled": xla.compiled,
        }

    def _regularization_gradients(self, query):
        if not _keras.regularizer_count(self):
            return None
        with tf.GradientTape() as tape:
            loss = _keras.regularization_loss(self)
        sources = [_keras.native(v) for v in query.variables]
        return tape.gradient(loss, sources, unconnected_gradients="zero")

    def _check_step(self, data):
        """Every time a graph is traced; eagerly, once a fit."""
        if tf.executing_eagerly() and self._step_checked:
            return
        validation.check_tensors(data)
        validation.check_step(self, self._loss_owner(), data)
        self._step_checked, self._plan = True, None

    def collect_norms(self) -> None:
        """Keeps the norms of each epoch from now on, for `norm_quantiles`."""
        if self._diagnostics is None or not self._diagnostics.keeps_norms:
            self._diagnostics = Diagnostics(keep_norms=True)
            self.train_function = None

    def norm_quantiles(self, fractions: Sequence[float]) -> list[float]:
        """Quantiles of the norms of the epoch's scaled gradients; epsilon does not cover them."""
        return [] if self._diagnostics is None else self._diagnostics.quantiles(fractions)

    def reset_metrics(self):
        """Starts the means of an epoch."""
        super().reset_metrics()
        if self._diagnostics is not None:
            self._diagnostics.reset()


class _Part(NamedTuple):
    """What a replica's share of the examples comes to."""

    clipped_sum: ClippedSum
    norms: tf.Tensor
    logs: dict

    def plus(self, others):
        """That of all examples; the log is the last one's, which was made after all others."""
        if not others:
            return self
        sums, norms, logs = zip(*others)
        return _Part(self.clipped_sum.plus(sums), tf.concat([self.norms, *norms], axis=0), logs[-1])


def _parts(data):
    """The tensors that data is made of, those of sparse tensors too."""
    return [t for t in tf.nest.flatten(data, expand_composites=True) if t is not None]


def _row_count(data):
    """The number of examples in (x, y, sample_weight), of which x may be sparse."""
    return per_example.batch_size([t for t in tf.nest.flatten(data) if isinstance(t, tf.Tensor)])


def _check_optimizer(optimizer):
    if isinstance(optimizer, _keras.LossScaleOptimizer):
        raise ValueError(
            "`optimizer` must not be a LossScaleOptimizer, which scales what is clipped and skips steps "
            "by what the data did: use the `mixed_bfloat16` policy. Received: optimizer="
            f"{type(optimizer).__name__}"
        )
    if not isinstance(optimizer, PrivateOptimizer):
        raise ValueError(
            "`optimizer` must be one of dp2_keras's optimizers, such as DP2RMSprop; another would "
            f"train without privacy. Received: optimizer={optimizer!r}"
        )


def check_overrides(model_class, expected):
    """Refuses a class whose `train_step` is not the expected one."""
    if model_class.train_step is not expected.train_step:
        raise ValueError(
            f"{model_class.__name__} must not have a `train_step` of its own, which would not be "
            "private. Put the loss into `compute_loss`, and the metrics into `compute_metrics`."
        )
