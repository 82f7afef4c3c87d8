"""An optimizer whose first steps look for a scale, by the equations of `pilot.py`.

They ask for squares of gradients in place of gradients, move no weight, and cost what any step costs.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from dp2_keras import _checks, _keras, pilot
from dp2_keras.optimizers.auto_rate import AutoRate


class Piloted(AutoRate):
    """A pilot in the first `fit`; a subclass has `_mean_squares`, which are 0 at first, and `_observe`.

    Args:
        learning_rate, l2_norm_clip, noise_multiplier: as in `AutoRate`.
        pilot_share: how many of the steps of the first fit it may have.
        **kwargs: see `AutoRate`.
    """

    def __init__(self, learning_rate, l2_norm_clip, noise_multiplier, *, pilot_share, **kwargs):
        _checks.fraction(pilot_share=pilot_share)
        super().__init__(learning_rate, l2_norm_clip, noise_multiplier, **kwargs)
        if pilot_share and pilot.is_too_small(l2_norm_clip):
            _checks.fail("at least 1e-5, or `pilot_share=0`: squares would vanish", l2_norm_clip=l2_norm_clip)
        self.pilot_share = pilot_share
        self._pilot_steps = self.add_scalar(0.0, "pilot_steps")
        self._log_scales = None

    def build(self, variables):
        if self.is_built():
            return
        super().build(variables)
        if self.pilot_share:
            self._log_scales = self.add_state(variables, "log_scale")

    def _idle_steps(self, first_step):
        if not int(self.iterations.numpy()) and self._fit_steps is not None:
            self._pilot_steps.assign(float(pilot.pilot_steps(self._fit_steps + first_step, self.pilot_share)))
        return max(self.pilot_steps - max(first_step, 0), 0)

    def _rate(self, phase):
        rate = super()._rate(phase)
        return tf.where(self._is_pilot(), 0.0, rate) if self.pilot_share else rate

    def _pilot_scale(self, variable):
        """S."""
        return tf.exp(self._state(self._log_scales, variable)) if self.pilot_share else 1.0

    def _pilot_stretch(self, variable):
        """R."""
        if not self.pilot_share:
            return 1.0
        return pilot.stretch(tf.convert_to_tensor(self._state(self._log_scales, variable)))

    def _directions(self, variables, gradients):
        """The gradients; in the pilot they are squares, and the rate is 0."""
        if not self.pilot_share:
            self._observe(variables, gradients)
            return gradients
        look, observe = (lambda of=of: of(variables, gradients) for of in (self._look, self._observe))
        tf.cond(self._is_pilot(), look, observe)
        return gradients

    @property
    def pilot_steps(self) -> int:
        """How many of the first steps look for the scale, and move nothing."""
        return int(self._pilot_steps.numpy())

    def _moving_step(self):
        """How many steps have moved the weights; below 0 in the pilot."""
        step = self._step()
        return step - tf.cast(_keras.native(self._pilot_steps), step.dtype)

    def _is_pilot(self):
        return self._moving_step() < 0

    def _clips(self):
        squares = [pilot.squares_clip(self.l2_norm_clip)] if self.pilot_share else []
        return [*super()._clips(), *squares]

    def _query(self, variables):
        query = super()._query(variables)
        if not self.pilot_share:
            return query
        clip = tf.where(self._is_pilot(), pilot.squares_clip(self.l2_norm_clip), self.l2_norm_clip)
        return dataclasses.replace(query, l2_norm_clip=clip, is_squared=self._is_pilot())

    def _look(self, variables, squares):
        """A step of the pilot; the last of a round changes the scale."""
        of_round = tf.cast(_keras.native(self._pilot_steps), tf.float32) / pilot.ROUNDS
        means = [self._state(self._mean_squares, v) for v in variables]
        for mean, square in zip(means, squares):
            mean.assign_add(square / tf.cast(of_round, square.dtype))
        ends = tf.cast(self._step() + 1, tf.float32) % of_round == 0.0
        tf.cond(ends, lambda: self._rescale(variables, means, of_round), lambda: None)

    def _rescale(self, variables, means, of_round):
        noise = self.sigma * pilot.squares_clip(self.l2_norm_clip) / (self._batch_size * tf.sqrt(of_round))
        changes = pilot.log_changes([tf.convert_to_tensor(mean) for mean in means], noise)
        for variable, change in zip(variables, changes):
            self._state(self._log_scales, variable).assign_add(change)
        for mean in map(_keras.native, self._mean_squares):  # Of frozen layers too.
            mean.assign(tf.zeros_like(mean))
