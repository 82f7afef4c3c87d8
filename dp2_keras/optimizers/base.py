"""One private step, of which every optimizer here is a row.

    scale    = 1 if p < s1 else 1 / (sqrt(v) + eps)
    C, lr    = (C_sgd, lr_sgd) if p < s1 else (C_adaptive, lr_adaptive)
    g~       = ( sum_i clip(scale * g_i, C) + N(0, (sigma C)^2 I) ) / B
    G        <- G + g~                                       (SGD phase only)
    p == s1 - 1 : v <- rule(v, G / s1);  G <- 0              (refresh)
    w        <- w - lr * (g~ + gradient of weight regularisers + weight_decay * w)

Algorithm 1 of arXiv:2212.00309. Methods that are not delayed refresh v from g~ itself, in
every step, and scale after the noise; `moments.py` has both.

An optimizer never sees a gradient of the data. It states a `ClippingQuery`, and takes
back the `ClippedSum` that answers it; everything else is refused.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Sequence

import tensorflow as tf

from dp2_keras import _checks, _keras, replicas
from dp2_keras.errors import NonPrivateUpdateError
from dp2_keras.noise import NoiseSource
from dp2_keras.optimizers import arguments, readiness, stock
from dp2_keras.optimizers.arguments import Configured
from dp2_keras.optimizers.moments import Moments
from dp2_keras.optimizers.price import Priced
from dp2_keras.privatizer import (
    ClippedSum,
    ClippingQuery,
    GaussianPrivatizer,
    add_noise,
    check_mechanism,
)
from dp2_keras.public_data import PublicGradients
from dp2_keras.schedule import Phase
from dp2_keras.secure_noise import SecureNoiseSource

NOISE_SOURCES = {"fast": NoiseSource, "secure": SecureNoiseSource}
NOISE_STREAMS = (0, 2)  # One for each release that a step may make.
RANDOM_LAYER_STREAM = 1
PUBLIC_STREAM = 3


class PrivateOptimizer(Configured, Priced, Moments, _keras.Optimizer):
    """Base class of all optimizers here; by itself the step of DP-SGD.

    Args:
        learning_rate: float or `LearningRateSchedule`.
        l2_norm_clip: C, the largest norm an example's (scaled) gradient may have.
            Infinity means no clipping, and needs `noise_multiplier=0`.
        noise_multiplier: sigma; the sum of clipped gradients gets noise of deviation
            sigma C. 0 means no noise and no privacy. "auto" lets `fit` choose the least noise with
            which all its epochs fit into its `PrivacyBudget`.
        expected_batch_size: B, the public number that divides the noisy sum. Defaults
            to the batch size of `fit`.
        noise: "fast", Philox in TensorFlow's own kernels; or "secure", a cipher's keystream, and sums on a
            grid that hides the last bits: see `secure_noise.py`. Defaults to "fast".
        noise_seed: integer, for tests and experiments: the same noise in every run,
            hence no privacy. Defaults to a secret key from the operating system.
        weight_decay: decoupled weight decay, at the rate of the step's phase.
        use_ema: keep a moving average of the weights, as in Keras.
        ema_momentum: its momentum. Defaults to 0.99.
        ema_overwrite_frequency: how often the average overwrites the weights.
        num_microbatches: for code written for TF Privacy; each example is clipped by itself, so it
            must be None or the batch size.
        name: the optimizer's name.

    Raises:
        ValueError: for a value out of range, and for an argument of Keras's optimizers
            that would change what is clipped.
    """

    def __init__(
        self,
        learning_rate,
        l2_norm_clip,
        noise_multiplier,
        *,
        expected_batch_size=None,
        noise="fast",
        noise_seed=None,
        weight_decay=None,
        use_ema=False,
        ema_momentum=0.99,
        ema_overwrite_frequency=None,
        num_microbatches=None,
        name=None,
        **refused,
    ):
        arguments.refuse(type(self).__name__, refused)
        check_mechanism(noise_multiplier, l2_norm_clip=l2_norm_clip)
        if expected_batch_size is not None:
            _checks.positive_integer(expected_batch_size=expected_batch_size)
        if num_microbatches is not None:
            _checks.positive_integer(num_microbatches=num_microbatches)
            arguments.check_microbatches(num_microbatches, expected_batch_size)
        _checks.one_of(tuple(NOISE_SOURCES), noise=noise)
        if noise_seed is not None and not isinstance(noise_seed, numbers.Integral):
            _checks.fail("an integer or None", noise_seed=noise_seed)
        if weight_decay is not None:
            _checks.non_negative(weight_decay=weight_decay)
        if name is not None and not isinstance(name, str):
            _checks.fail("a string or None", name=name)
        super().__init__(
            learning_rate=arguments.check_rate(learning_rate=learning_rate),
            weight_decay=weight_decay,
            use_ema=use_ema,
            ema_momentum=ema_momentum,
            ema_overwrite_frequency=ema_overwrite_frequency,
            name=name or type(self).__name__.lower(),
        )
        self.l2_norm_clip = l2_norm_clip
        self.noise_multiplier = noise_multiplier
        self.expected_batch_size = expected_batch_size
        self.noise_seed = noise_seed if noise_seed is None else int(noise_seed)
        self.noise = noise
        self._noise_source = NOISE_SOURCES[noise](noise_seed)
        self.num_microbatches = num_microbatches
        self._sigma = None if noise_multiplier == "auto" else float(noise_multiplier)
        self._batch_size = expected_batch_size
        self._open_query = None
        self._public = None
        self._updating = False

    how_to_train = stock.HOW_TO_TRAIN

    @property
    def public_gradients(self) -> str | None:
        """What a step needs of public data: "mean" or "each" gradient of a batch of it; None for nothing."""
        return None

    @property
    def uses_public_data(self) -> bool:
        """Whether anything that was declared public has a part in the steps."""
        return self.public_gradients is not None

    # What a step may ask, and what it does with the answer.

    def begin_step(self, variables: Sequence, public: PublicGradients | None = None) -> ClippingQuery:
        """States this step's query; changes nothing.

        Args:
            variables: the trainable variables of this step.
            public: what `public_gradients` asks for, at the weights as they are; it stays until
                `finish_step`. Defaults to None, for nothing.

        Returns:
            The `ClippingQuery` that `finish_step` wants answered.

        Raises:
            ValueError: if there is nothing to train, no batch size to divide by, or no public data
                though it is needed.
        """
        variables = list(variables)
        self._check_can_step(variables)
        self._check_public(public)
        self.ensure_built(variables)
        self._public = public
        self._open_query = self._query(variables)
        return self._open_query

    def _query(self, variables):
        clip = self._by_phase(self._clip(Phase.SGD), self._clip(Phase.ADAPTIVE))
        scales = (lambda: [self._scale(v) for v in variables]) if self.scales_before_noise else None
        return ClippingQuery(variables, scales, clip, self.schedule.is_adaptive(self._step()))

    def finish_step(self, clipped: ClippedSum, regularization: Sequence | None = None) -> None:
        """Adds the noise to a clipped sum and updates the weights with it.

        Args:
            clipped: the answer to the query that `begin_step` gave, once.
            regularization: gradients of the weight regularisers, which are free of
                data and so stay outside the clip and the noise.

        Raises:
            NonPrivateUpdateError: for anything but the answer to the open query.
        """
        if not isinstance(clipped, ClippedSum) or clipped.query is not self._open_query:
            raise NonPrivateUpdateError(
                "`finish_step` takes the ClippedSum that answers the query of this step's "
                f"`begin_step`, once. Received: {type(clipped).__name__}"
            )
        self._open_query = None
        variables, draw = clipped.query.variables, self._next_draw()
        releases = [self._private_mean(*part, draw) for part in zip(clipped.parts(), NOISE_STREAMS)]
        updates = self._directions(variables, *releases)
        self._public = None
        moves = self._weight_moves(variables, updates, regularization)
        # Without the dependency, a step that fails (or finds no batch) would still count, and the
        # count is the phase.
        with self._weights_unlocked(), tf.control_dependencies(moves):
            self.apply_updates(moves, variables)

    def _weight_moves(self, variables, updates, regularization):
        """lr (update + what is free of data), at the rate of the step's phase."""
        rate = self._by_phase(self._rate(Phase.SGD), self._rate(Phase.ADAPTIVE))
        moves = list(self._moves(variables, [tf.cast(rate, u.dtype) * u for u in updates], rate))
        gradients = [None] * len(variables) if regularization is None else regularization
        for number, (variable, gradient) in enumerate(zip(variables, gradients)):
            for free in self._data_free(variable, gradient, moves[number].dtype):
                moves[number] += tf.cast(rate, free.dtype) * free
        return moves

    def _data_free(self, variable, regularization, dtype):
        """What moves a weight besides the data: the gradient of its regularisers, and its decay."""
        if regularization is not None:
            yield tf.cast(regularization, dtype)
        if self.weight_decay is not None and self._use_weight_decay(variable):
            yield self.weight_decay * tf.cast(variable, dtype)

    def _moves(self, variables, steps, rate):
        """What is taken off the weights for the data: the steps, unless a subclass makes less of them."""
        del variables, rate
        return steps

    def random_bits(self, shape, variable: int = 0) -> tf.Tensor:
        """uint32 words for random layers, a new set in every step; replicas have variables of their own."""
        return self._noise_source.bits(
            shape, self._next_draw(), stream=RANDOM_LAYER_STREAM, variable=variable
        )

    def public_bits(self, shape, variable: int = 0) -> tf.Tensor:
        """uint32 words for the draw of public rows (variable 0) and their random layers (1)."""
        return self._noise_source.bits(shape, self._next_draw(), stream=PUBLIC_STREAM, variable=variable)

    def _private_mean(self, clipped, stream, draw):
        values = clipped.values
        if self.sigma > 0 and replicas.is_chief(tf.distribute.get_strategy()):
            indices = [self.variable_index(v) for v in clipped.query.variables]
            values = add_noise(clipped, self.sigma, self._noise_source, draw, stream, indices)
        return [value / self._batch_size for value in replicas.added_up(values)]

    # Phase by phase.

    def _clip(self, phase):
        del phase  # One clip norm for both, unless a subclass has two.
        return self.l2_norm_clip

    def _clips(self):
        """All that a step may clip to."""
        return [self._clip(phase) for phase in Phase]

    def _privatizer(self, phase):
        return GaussianPrivatizer(self._clip(phase), self.sigma)

    def _rate(self, phase):
        del phase
        return self._now(self._learning_rate)

    def _now(self, rate):
        """This step's value of a rate; Keras 2 has its own up to date only when weights are updated."""
        return rate if _keras.is_variable(rate) else rate(self._step())

    def _by_phase(self, sgd, adaptive):
        """The value of this step's phase."""
        adaptive_now = self.schedule.is_adaptive(self._step())
        if isinstance(adaptive_now, bool):
            return adaptive if adaptive_now else sgd
        return tf.where(adaptive_now, *(tf.cast(x, tf.float32) for x in (adaptive, sgd)))

    def phase(self) -> tf.Tensor:
        """The phase of the coming step: a scalar, see `Phase`."""
        return self._by_phase(float(Phase.SGD), float(Phase.ADAPTIVE))

    # State.

    def _state(self, states, variable):
        return _keras.native(states[self.variable_index(variable)])

    def _step(self):
        return tf.convert_to_tensor(_keras.native(self._iterations))

    def _next_draw(self):
        return self._noise_source.next_draw(self._step())

    @property
    def ticket(self) -> int:
        """The number by which a step finds out whether it is its own steps that are counted."""
        return self._noise_source.ticket

    @property
    def batch_size(self) -> int | None:
        """B, the public divisor: `expected_batch_size`, or what `fit` stated last."""
        return self._batch_size

    def resolve_batch_size(self, batch_size: int | None) -> None:
        """Takes the batch size of `fit` as B, unless `expected_batch_size` was given."""
        arguments.check_microbatches(self.num_microbatches, batch_size)
        self._batch_size = self.expected_batch_size or batch_size

    # What depends on the loss, and on how long there is to go.

    def settle_clip(self, losses: Sequence, shapes: Sequence[tuple] | None) -> None:
        """Settles a clip norm that depends on the loss; `compile` of a private model calls it.

        Args:
            losses: what `compile` was given, for each output, or one for all.
            shapes: of the outputs, with the batch's axis; None if they are not known yet.

        Raises:
            ValueError: if steps were taken with another one, or it depends on shapes that are not known.
        """

    def settle_rate(self, steps: int | None) -> None:
        """Settles a rate that depends on how many steps there will be, after batch size and noise.

        Args:
            steps: of the fit that begins, from its first epoch; None if only the data can tell.

        Raises:
            ValueError: if the rate depends on it and it is not known.
        """

    def start_rate(self, first_step: int) -> None:
        """Says which step is the first of those that a rate was settled for."""

    def check_single_step(self) -> None:
        """Refuses a step outside of `fit`, if there is no rate for it.

        Raises:
            ValueError: if the rate depends on a number of steps that nobody has said.
        """

    def _check_can_step(self, variables):
        self._check_calibrated()
        readiness.check_variables(variables)
        readiness.check_batch_size(self._batch_size)
        readiness.check_replicas()

    def _check_public(self, public):
        readiness.check_public(type(self).__name__, self.public_gradients, public)

    # Weight updates: the one private way, and all the others.

    def update_step(self, gradient, variable, learning_rate=None):
        """w <- w - move; Keras calls it from `finish_step`, with a move for a gradient."""
        del learning_rate  # It is in the move: Keras knows one rate, and a phase has its own.
        if not self._updating:
            raise NonPrivateUpdateError(self.how_to_train)
        variable.assign_sub(tf.cast(gradient, variable.dtype))

    @contextlib.contextmanager
    def _weights_unlocked(self):
        self._updating = True
        try:
            yield
        finally:
            self._updating = False

    def train_stock_model(self, loss, variables, tape=None) -> None:
        """The step of a plain Keras model compiled with this optimizer; see `stock.py`."""
        stock.private_step(self, loss, list(variables), tape)
