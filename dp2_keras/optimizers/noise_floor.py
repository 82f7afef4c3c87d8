"""DP² whose scale, rate and weights are measured against the noise, which is known.

    S, R                                                 what the first steps find; see `pilot.py`
    nu  = sigma C / B                                    the deviation of the noise in g~, which is public
    d   = (1 + u / nu^2)^(-p/2)                          in (0, 1]; 1 before the first refresh
    g~  = ( sum_i clip(S d g_i, C) + N(0, (sigma C)^2 I) ) / B
    m  <- m + ((g~^2 - nu^2) / d^2 - m) / (t + 1)        the mean square of S g, free of the noise's
    t mod s == 0 : u <- max(m, 0)                        (refresh)
    z  <- z - lr g~,   V <- V + (lr nu)^2                the path, and the variance of the noise in it
    w   = w_0 + R h(z),  h(z) = z^3 / (z^2 + k V)        the path, less what is most likely nothing but noise
    lr                                                   "auto": V is r^2 after all steps; see `auto_rate.py`

with t from 0 at the first step that moves the weights.

As in Algorithm 1 of arXiv:2212.00309 the scale is made of earlier private gradients, is stale, and stands
before the clip and the noise; it costs nothing. Five things differ. Every release is used for it, those of
adaptive steps too, because what was scaled by a known d can be scaled back. The noise's own square is taken
off, so that u is not a floor of noise. The scale is relative to the noise: where u << nu^2 it is 1, which
is DP-SGD, and not 1 / sqrt(v), which magnifies what is nothing but noise. So one clip norm and one rate serve
all steps, and there is no eps. The power p lies between DP-SGD (0) and a scale that brings all that is above
the noise down to it (1), which few steps make too slow.

And the weights are not the path itself. Most weights of a large model hardly move but by noise, and all of it
reaches the output. How much noise there is in the path is public, so that what does not stand out of it is
left where it was; a weight that keeps being pushed one way comes out of it by and by. See `shrinkage.py`.

Last, a few of the first steps do not move the weights. They release the squares of gradients, which say where
the length of every example goes that the clip cuts. S takes it off before the clip, and R takes the noise off
the weights that it would be long in.
"""

from __future__ import annotations

import tensorflow as tf

from dp2_keras import _checks, _keras
from dp2_keras.optimizers.auto_clip import AutoClip
from dp2_keras.optimizers.piloted import Piloted
from dp2_keras.optimizers.rules import EveryStep
from dp2_keras.shrinkage import shrunk


@_keras.register
class DP2NoiseFloor(AutoClip, Piloted, EveryStep):
    """DP² with a scale and weights relative to the noise, nu = sigma C / B in a step.

    It needs no setting, for classification or for mean squared errors of y with a deviation of about 1.

    Weights do not grow far beyond their noise, so that short inputs leave the outputs small: rows should have
    a norm of about 10. Multiply shorter ones, such as frequencies, by a constant (`docs/recipes.md`).

    Args:
        learning_rate: float or `LearningRateSchedule`, that of DP-SGD. Defaults to "auto": each `fit` takes
            rates that fall to 0, with which the noise of all its steps adds up to `weight_noise` in the path
            of each weight. A rate that is set later stays as it is.
        l2_norm_clip: C, the largest norm an example's scaled gradient may have. Defaults to
            "auto": 0.3, but 4 / sqrt(k) where a private model is compiled with the mean squared error of
            k outputs, for y of a deviation of about 1; see `auto_clip.py`. Divide y by a public number, or
            give a number here.
        noise_multiplier: sigma, above 0: without noise there is nothing to measure against. Defaults to
            "auto": `fit` calibrates it to its `PrivacyBudget`.
        delay: s, how many steps a scale is used for. Defaults to 10.
        power: p, from 0, which is DP-SGD's scale, to 1. Defaults to 0.75.
        weight_noise: r, the deviation of that noise; in the weights it is R r, with R of the pilot at most 1.
            Defaults to 0.5.
        shrinkage: k, 0 or more: a weight whose path is sqrt(k) deviations of its noise long moves half as
            far. 0 takes the path as it is. Defaults to 4.
        pilot_share: at most this share of the steps of the first `fit` looks for the scale, and moves
            nothing; see `pilot.py`. 0 for none; nor has a fit any that has too few steps for it (480 at the
            default), or whose steps are not known. A pilot that is cut off goes on in the steps that come
            next; a layer that was frozen in it has a scale of 1. Defaults to 0.025.
        **kwargs: see `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> import dp2_keras as dp2, numpy as np
    >>> model = dp2.DP2Sequential([_keras.keras.Input((2,)), _keras.keras.layers.Dense(1)])
    >>> model.compile(DP2NoiseFloor(), loss="mse")
    >>> budget = dp2.PrivacyBudget(epsilon=2.0, delta=1e-3)
    >>> _ = model.fit(np.ones((100, 2)), np.ones((100, 1)), batch_size=10, callbacks=[budget], verbose=0)
    >>> bool(np.isclose(model.optimizer.path_variance, 0.5**2))
    True
    """

    def __init__(
        self,
        learning_rate="auto",
        l2_norm_clip="auto",
        noise_multiplier="auto",
        *,
        delay=10,
        power=0.75,
        weight_noise=0.5,
        shrinkage=4.0,
        pilot_share=0.025,
        **kwargs,
    ):
        _checks.positive_integer(delay=delay)
        _checks.closed_unit(power=power)
        _checks.non_negative(shrinkage=shrinkage)
        if noise_multiplier == 0:
            rule = "above 0: the scale is relative to the noise. Without noise, use DP2RMSprop"
            _checks.fail(rule, noise_multiplier=noise_multiplier)
        shares = dict(weight_noise=weight_noise, pilot_share=pilot_share)
        super().__init__(learning_rate, l2_norm_clip, noise_multiplier, **shares, **kwargs)
        self.delay = delay
        self.power = power
        self.shrinkage = shrinkage
        self._mean_squares = self._paths = self._path_variances = None

    @property
    def scales_before_noise(self):
        return True

    @property
    def path_variance(self) -> float:
        """V, the largest variance that the noise of the steps so far has given to the path of a weight."""
        return max((float(v.numpy()) for v in self._path_variances or []), default=0.0)

    def build(self, variables):
        if self.is_built():
            return
        super().build(variables)
        self._second_moments = self.add_state(variables, "second_moment")
        self._mean_squares = self.add_state(variables, "mean_square")
        self._path_variances = [self.add_scalar(0.0, f"path_variance_{k}") for k in range(len(variables))]
        if self.shrinkage:
            self._paths = self.add_state(variables, "path")

    def _scale(self, variable):
        return self._damping(variable) * self._pilot_scale(variable)

    def _damping(self, variable):
        """d."""
        above_noise = self._state(self._second_moments, variable) / self._floor
        return tf.pow(1.0 + above_noise, -self.power / 2.0)

    def _observe(self, variables, gradients):
        for gradient, variable in zip(gradients, variables):
            self._add_square(gradient, variable)
        due = self._moving_step() % self.delay == 0
        tf.cond(due, lambda: self._refresh(variables), lambda: None)

    def _add_square(self, gradient, variable):
        mean, damping = self._state(self._mean_squares, variable), self._damping(variable)
        square = (tf.square(gradient) - self._floor) / tf.square(damping)
        mean.assign_add((square - mean) / tf.cast(self._moving_step() + 1, mean.dtype))

    def _refresh(self, variables):
        for variable in variables:
            mean = self._state(self._mean_squares, variable)
            self._state(self._second_moments, variable).assign(tf.maximum(mean, 0.0))

    def _moves(self, variables, steps, rate):
        with tf.control_dependencies(steps):  # A step that fails leaves no noise.
            return [self._moved(v, step, rate) for v, step in zip(variables, steps)]

    def _moved(self, variable, step, rate):
        variance = self._state(self._path_variances, variable)
        before = tf.convert_to_tensor(variance)
        after = before + tf.square(tf.cast(rate, before.dtype)) * self._floor
        variance.assign(after)
        stretch = self._pilot_stretch(variable)
        if not self.shrinkage:
            return stretch * step
        path = self._state(self._paths, variable)
        old = shrunk(tf.convert_to_tensor(path), before, self.shrinkage)
        path.assign_sub(tf.cast(step, path.dtype))
        return stretch * (old - shrunk(tf.convert_to_tensor(path), after, self.shrinkage))
