"""The arguments of a preconditioner's rule, and the rule made of them.

An optimizer is a rule and a schedule, mixed: `class DP2RMSprop(MovingAverage, Delayed)`.
"""

from dp2_keras.optimizers.base import PrivateOptimizer
from dp2_keras.schedule import ConstantSchedule, Phase


class MovingAverage(PrivateOptimizer):
    """A rule with a decay; a subclass says which, in `rule`.

    Args:
        rho: decay of the second moment. Defaults to 0.9.
        eps: the stabiliser, outside the root. Defaults to 1e-7.
    """

    rule = None

    def __init__(self, learning_rate, l2_norm_clip, noise_multiplier, *, rho=0.9, eps=1e-7, **kwargs):
        self.rule(eps, rho)  # Checks both.
        super().__init__(learning_rate, l2_norm_clip, noise_multiplier, **kwargs)
        self.rho = rho
        self.eps = eps

    @property
    def preconditioner(self):
        return self.rule(self.eps, self.rho)


class Accumulating(PrivateOptimizer):
    """A rule without a decay; a subclass says which, in `rule`.

    Args:
        eps: the stabiliser, outside the root. Defaults to 1e-7.
    """

    rule = None

    def __init__(self, learning_rate, l2_norm_clip, noise_multiplier, *, eps=1e-7, **kwargs):
        self.rule(eps)  # Checks it.
        super().__init__(learning_rate, l2_norm_clip, noise_multiplier, **kwargs)
        self.eps = eps

    @property
    def preconditioner(self):
        return self.rule(self.eps)


class EveryStep(PrivateOptimizer):
    """No delay: every step is adaptive, refreshed from its own private gradient."""

    @property
    def schedule(self):
        return ConstantSchedule(Phase.ADAPTIVE)
