"""How a second moment v is refreshed from a mean gradient m, and how it scales.

    RMSprop : v <- rho v + (1 - rho) m^2
    AdaGrad : v <- v + m^2
    Yogi    : v <- v - (1 - rho) sign(v - m^2) m^2      (Zaheer et al. 2018)
    scale   : 1 / (sqrt(v) + eps)

The paper (arXiv:2212.00309, Algorithm 1, line "Update moment estimates") states
RMSprop's rule; its appendix prints Yogi's sign term in a form that can make v
negative, so Yogi's own authors are followed here. `eps` is outside the root, as in
the paper, and unlike Keras's RMSprop.

A preconditioner is a pure function of tensors: it holds no state, and to add one is
to add one class with `refresh`.
"""

import abc
import dataclasses

import tensorflow as tf

from dp2_keras import _checks

_LEAST_EPS = 1e-18


@dataclasses.dataclass(frozen=True)
class Preconditioner(abc.ABC):
    """Base class: the scale, given a second moment.

    Args:
        eps: the stabiliser added to the root of the second moment.
    """

    eps: float

    def __post_init__(self):
        _checks.positive(eps=self.eps)
        if self.eps < _LEAST_EPS:
            _checks.fail(f"at least {_LEAST_EPS}: the square of its inverse is a float32", eps=self.eps)

    @abc.abstractmethod
    def refresh(self, second_moment: tf.Tensor, squared_mean: tf.Tensor) -> tf.Tensor:
        """The next second moment, from the square of a mean gradient."""

    def scale(self, second_moment: tf.Tensor, refreshes: tf.Tensor) -> tf.Tensor:
        """What multiplies a gradient, after `refreshes` refreshes."""
        del refreshes  # Only a debiased moment depends on their number.
        return 1.0 / (tf.sqrt(second_moment) + self.eps)


@dataclasses.dataclass(frozen=True)
class RMSprop(Preconditioner):
    """v <- rho v + (1 - rho) m^2.

    Args:
        eps: the stabiliser.
        rho: the decay of the moving average, in [0, 1).
        debias: divide v by 1 - rho^k after k refreshes, as Adam does.
    """

    rho: float = 0.9
    debias: bool = False

    def __post_init__(self):
        super().__post_init__()
        _checks.fraction(rho=self.rho)

    def refresh(self, second_moment, squared_mean):
        return self.rho * second_moment + (1.0 - self.rho) * squared_mean

    def scale(self, second_moment, refreshes):
        if self.debias:
            count = tf.cast(refreshes, second_moment.dtype)
            second_moment /= 1.0 - tf.pow(tf.cast(self.rho, second_moment.dtype), count)
        return super().scale(second_moment, refreshes)


@dataclasses.dataclass(frozen=True)
class Adagrad(Preconditioner):
    """v <- v + m^2."""

    def refresh(self, second_moment, squared_mean):
        return second_moment + squared_mean


@dataclasses.dataclass(frozen=True)
class Yogi(Preconditioner):
    """v <- v - (1 - rho) sign(v - m^2) m^2; never negative.

    Args:
        eps: the stabiliser.
        rho: 1 - rho is how far one refresh moves v, in [0, 1).
    """

    rho: float = 0.9

    def __post_init__(self):
        super().__post_init__()
        _checks.fraction(rho=self.rho)

    def refresh(self, second_moment, squared_mean):
        towards = tf.sign(second_moment - squared_mean)
        return second_moment - (1.0 - self.rho) * towards * squared_mean
