"""Argument checks. The keyword is the argument's name, so each check is one line.

_checks.positive_integer(delay=delay)
ValueError: `delay` must be a positive integer. Received: delay=0
"""

import math
import numbers


def fail(rule, **arguments):
    """Raises a `ValueError` that states the rule, then what was received."""
    names = " and ".join(f"`{name}`" for name in arguments)
    received = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    raise ValueError(f"{names} must be {rule}. Received: {received}")


def is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def positive_integer(**arguments):
    for name, value in arguments.items():
        integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not integral or value < 1:
            fail("a positive integer", **{name: value})


def positive(**arguments):
    """Finite and greater than zero."""
    for name, value in arguments.items():
        if not is_number(value) or not math.isfinite(value) or value <= 0:
            fail("a finite number greater than 0", **{name: value})


def non_negative(**arguments):
    """Finite and at least zero."""
    for name, value in arguments.items():
        if not is_number(value) or not math.isfinite(value) or value < 0:
            fail("a finite number of at least 0", **{name: value})


def clip_norm(**arguments):
    """At least 1e-12, below which squares of float32 vanish; infinity is allowed, NaN is not."""
    for name, value in arguments.items():
        if not is_number(value) or math.isnan(value) or value < 1e-12:
            fail("a number of at least 1e-12", **{name: value})


def fraction(**arguments):
    """In [0, 1)."""
    for name, value in arguments.items():
        if not is_number(value) or not 0 <= value < 1:
            fail("at least 0 and below 1", **{name: value})


def closed_unit(**arguments):
    """In [0, 1]."""
    for name, value in arguments.items():
        if not is_number(value) or not 0 <= value <= 1:
            fail("at least 0 and at most 1", **{name: value})


def boolean(**arguments):
    for name, value in arguments.items():
        if not isinstance(value, bool):
            fail("True or False", **{name: value})


def non_negative_integer(**arguments):
    for name, value in arguments.items():
        integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not integral or value < 0:
            fail("an integer of at least 0", **{name: value})


def open_unit(**arguments):
    """In (0, 1)."""
    for name, value in arguments.items():
        if not is_number(value) or not 0 < value < 1:
            fail("greater than 0 and less than 1", **{name: value})


def text(**arguments):
    for name, value in arguments.items():
        if not isinstance(value, str) or not value:
            fail("a text that is not empty", **{name: value})


def one_of(choices, **arguments):
    for name, value in arguments.items():
        if value not in choices:
            fail("one of " + ", ".join(repr(choice) for choice in choices), **{name: value})


def each(check, **arguments):
    """Applies a check to every member of sequences that hold at least one."""
    for name, values in arguments.items():
        if not isinstance(values, (tuple, list)) or not values:
            fail("a sequence of at least one number", **{name: values})
        for value in values:
            check(**{name: value})
