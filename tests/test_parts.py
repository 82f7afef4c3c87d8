"""The parts of the decomposition: schedule and preconditioners, each against its equation."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import oracle
import pytest
import tensorflow as tf

from dp2_keras import preconditioners
from dp2_keras.schedule import ConstantSchedule, DelayedSchedule, Phase

settings = hypothesis.settings(deadline=None, max_examples=50)


@settings
@hypothesis.given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 10_000))
def test_a_delayed_schedule_alternates(s1, s2, step):
    schedule, position = DelayedSchedule(s1, s2), step % (s1 + s2)
    assert schedule.is_adaptive(step) == (position >= s1)
    # Refreshed at the end of the last SGD step: right before the first adaptive one.
    assert schedule.refreshes(step) == (not schedule.is_adaptive(step) and schedule.is_adaptive(step + 1))


def test_a_schedule_answers_for_tensors_too():
    schedule, steps = DelayedSchedule(2, 3), tf.range(10, dtype=tf.int64)
    expected = [schedule.is_adaptive(t) for t in range(10)]
    np.testing.assert_array_equal(schedule.is_adaptive(steps), expected)


@pytest.mark.parametrize("phase", Phase)
def test_a_constant_schedule_is_constant(phase):
    assert {ConstantSchedule(phase).is_adaptive(t) for t in range(5)} == {phase is Phase.ADAPTIVE}


@pytest.mark.parametrize("steps", [(0, 1), (1, 0), (1.5, 1), (-1, 2), (True, 1)])
def test_a_schedule_needs_positive_integers(steps):
    with pytest.raises(ValueError, match="_steps` must be a positive integer. Received: "):
        DelayedSchedule(*steps)


# One row per preconditioner: every one of them faces the same contract.
ROWS = {
    "rmsprop": preconditioners.RMSprop(eps=1e-3, rho=0.8),
    "adagrad": preconditioners.Adagrad(eps=1e-3),
    "yogi": preconditioners.Yogi(eps=1e-3, rho=0.8),
}
moments = hnp.arrays(np.float32, 4, elements=st.floats(0, 100, width=32))


@pytest.mark.parametrize("name", ROWS)
@settings
@hypothesis.given(second_moment=moments, mean=moments)
def test_a_preconditioner_follows_its_rule(name, second_moment, mean):
    refreshed = ROWS[name].refresh(tf.constant(second_moment), tf.constant(mean**2))
    expected = oracle.RULES[name](second_moment.astype(np.float64), mean.astype(np.float64) ** 2, 0.8)
    np.testing.assert_allclose(refreshed, expected, rtol=1e-4, atol=1e-3)
    assert np.all(refreshed.numpy() >= 0)


@pytest.mark.parametrize("name", ROWS)
def test_the_scale_has_eps_outside_the_root(name):
    scale = ROWS[name].scale(tf.constant([0.0, 4.0]), refreshes=3)
    np.testing.assert_allclose(scale, [1 / 1e-3, 1 / (2 + 1e-3)], rtol=1e-6)


def test_a_debiased_moment_is_divided_as_adam_does():
    debiased = preconditioners.RMSprop(eps=1e-3, rho=0.9, debias=True)
    scale = debiased.scale(tf.constant([0.19]), refreshes=tf.constant(2, tf.int64))
    np.testing.assert_allclose(scale, [1 / (1 + 1e-3)], rtol=1e-5)
