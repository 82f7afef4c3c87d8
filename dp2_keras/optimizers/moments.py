"""When a step is adaptive, and what it makes of the moments of earlier and of present private gradients.

    delayed:     G <- G + g~  (SGD phase);   p == s1 - 1 :  v <- rule(v, G / s1),  G <- 0
    every step:  v <- rule(v, g~),   m <- beta m + (1 - beta) g~,   update = scale(v) m / (1 - beta^t)

Algorithm 1 of arXiv:2212.00309, line "Update moment estimates", and what it is compared with. G is zero
whenever an SGD phase starts, because a refresh empties it and an adaptive step leaves it alone.
"""

from __future__ import annotations

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.preconditioners import Preconditioner
from dp2_keras.schedule import ConstantSchedule, DelayedSchedule, Phase


class Moments:
    """The row of an optimizer in the table of methods: when, how to scale, and whether to average.

    A mixin of `PrivateOptimizer`, which has `_state` and `_step`. By itself it is the row of DP-SGD.
    """

    _second_moments = _gradient_sums = _first_moments = None

    @property
    def schedule(self) -> ConstantSchedule | DelayedSchedule:
        """When a step is adaptive; never, by itself."""
        return ConstantSchedule(Phase.SGD)

    @property
    def preconditioner(self) -> Preconditioner | None:
        """The rule for v and its scale; None scales by 1."""
        return None

    @property
    def first_moment_decay(self) -> float:
        """Decay of a debiased mean of the private gradients; 0 for none."""
        return 0.0

    @property
    def is_delayed(self) -> bool:
        """Whether v is made of the mean of earlier private gradients, rather than of each step's own."""
        return isinstance(self.schedule, DelayedSchedule)

    @property
    def scales_before_noise(self) -> bool:
        """The order: scale each example's gradient, then clip and add noise; or scale what is noisy."""
        return self.is_delayed

    def build(self, variables):
        """Creates the state; called by Keras and by the first step."""
        if self.is_built():
            return
        super().build(variables)
        if self.preconditioner is not None:
            self._second_moments = self.add_state(variables, "second_moment")
        if self.is_delayed:
            self._gradient_sums = self.add_state(variables, "gradient_sum")
        if self.first_moment_decay:
            self._first_moments = self.add_state(variables, "first_moment")

    def second_moments(self) -> dict[str, tf.Tensor]:
        """v of each trainable variable, by name; empty without a preconditioner or before a step."""
        return {v.name.split(":")[0]: _keras.native(v) for v in self._second_moments or []}

    def _directions(self, variables, gradients):
        """What the learning rate multiplies, from this step's private gradients."""
        if self.is_delayed:
            self._accumulate(gradients, variables)
            self._refresh_if_due(variables)
            return gradients if self.scales_before_noise else self._scaled_if_adaptive(gradients, variables)
        if self.preconditioner is not None:
            self._refresh_from(gradients, variables)
        if self.first_moment_decay:
            gradients = self._first_moment_of(gradients, variables)
        if self.preconditioner is None:
            return gradients
        return self._scaled(gradients, variables)

    def _scaled(self, gradients, variables):
        return [g * self._scale(v) for g, v in zip(gradients, variables)]

    def _scaled_if_adaptive(self, gradients, variables):
        adaptive = self.schedule.is_adaptive(self._step())
        return tf.cond(adaptive, lambda: self._scaled(gradients, variables), lambda: list(gradients))

    def _refresh_if_due(self, variables):
        def refresh():
            sums = [self._state(self._gradient_sums, v) for v in variables]
            self._refresh_from([g / self._averaged_steps for g in sums], variables)
            for gradient_sum in map(_keras.native, self._gradient_sums):  # Of frozen layers too.
                gradient_sum.assign(tf.zeros_like(gradient_sum))

        tf.cond(self.schedule.refreshes(self._step()), refresh, lambda: None)

    @property
    def _averaged_steps(self):
        """How many private gradients the accumulator holds when v is refreshed."""
        return self.schedule.sgd_steps

    def _refresh_from(self, mean_gradients, variables):
        for mean, variable in zip(mean_gradients, variables):
            second_moment = self._state(self._second_moments, variable)
            squared = self._without_noise_bias(tf.square(mean))
            second_moment.assign(self.preconditioner.refresh(second_moment, squared))

    def _without_noise_bias(self, squared_mean):
        return squared_mean

    def _accumulate(self, gradients, variables):
        def accumulate():
            for gradient, variable in zip(gradients, variables):
                self._state(self._gradient_sums, variable).assign_add(gradient)

        tf.cond(self.schedule.is_adaptive(self._step()), lambda: None, accumulate)

    def _scale(self, variable):
        second_moment = tf.convert_to_tensor(self._state(self._second_moments, variable))
        return self.preconditioner.scale(second_moment, refreshes=self._step() + 1)

    def _first_moment_of(self, gradients, variables):
        beta, moments = self.first_moment_decay, []
        for gradient, variable in zip(gradients, variables):
            moment = self._state(self._first_moments, variable)
            moment.assign(beta * moment + (1.0 - beta) * gradient)
            unbiased = 1.0 - tf.pow(tf.cast(beta, gradient.dtype), tf.cast(self._step() + 1, gradient.dtype))
            moments.append(moment / unbiased)
        return moments
