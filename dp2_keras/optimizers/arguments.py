"""The constructor's arguments: what is refused, and how they are kept, fixed, saved and read.

    from_config(optimizer.get_config()) == optimizer

but for the key of the noise, which is new, and is in no config.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from dp2_keras import _checks, _keras

_REFUSED = {
    "gradient_accumulation_steps": "would clip sums of examples; use `physical_batch_size` in `compile`",
    "loss_scale_factor": "would scale what is clipped; use the `mixed_bfloat16` policy",
    "clipnorm": "clips after the noise, which protects nobody; use `l2_norm_clip`",
    "clipvalue": "clips after the noise, which protects nobody; use `l2_norm_clip`",
    "global_clipnorm": "clips after the noise, which protects nobody; use `l2_norm_clip`",
}


class Configured:
    """An optimizer whose arguments are attributes of the same names, and its config."""

    def get_config(self):
        """The constructor's arguments, under their names."""
        return {name: _serialized(self._argument(name)) for name in type(self).arguments()}

    def _argument(self, name):
        # The rates' properties give this step's number; the config wants the schedule.
        return getattr(self, f"_{name}" if name.endswith("learning_rate") else name)

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes an optimizer from `get_config()`, with a new key."""
        del custom_objects
        return cls(**{name: _deserialized(value) for name, value in config.items()})

    @classmethod
    def arguments(cls) -> list[str]:
        """The names of the constructor's arguments: of the attributes and the config."""
        names = {}
        for base in cls.__mro__:
            if issubclass(base, Configured) and "__init__" in vars(base):
                names.update(inspect.signature(base.__init__).parameters)
        return [name for name in names if name not in ("self", "kwargs", "refused")]

    def __setattr__(self, name, value):
        fixed = name not in ("learning_rate", "sgd_learning_rate", "name")
        if fixed and name in self.__dict__ and name in type(self).arguments():
            raise AttributeError(
                f"`{name}` is fixed once the optimizer is made, because steps that ran were "
                f"priced with it. Make a new optimizer. Received: {name}={value!r}"
            )
        super().__setattr__(name, value)


def check_microbatches(num_microbatches: int | None, batch_size: int | None) -> None:
    """Refuses microbatches of several examples.

    Raises:
        ValueError: if both are known and differ.
    """
    if None not in (num_microbatches, batch_size) and num_microbatches != batch_size:
        raise ValueError(
            "`num_microbatches` must be None or the batch size: a microbatch of several examples would be "
            "clipped as one, which changes what is protected and needs more noise for the same epsilon. "
            f"Received: num_microbatches={num_microbatches}, batch size {batch_size}"
        )


def check_rate(**argument):
    """A learning rate: a float or a `LearningRateSchedule`."""
    ((name, rate),) = argument.items()
    if isinstance(rate, _keras.keras.optimizers.schedules.LearningRateSchedule):
        return rate
    _checks.non_negative(**{name: rate})
    return float(rate)


def refuse(optimizer: str, arguments: Mapping[str, Any]) -> None:
    """Refuses what Keras's optimizers take and these do not, with the reason.

    Raises:
        ValueError: for an argument that would change what is clipped.
        TypeError: for one that nobody knows.
    """
    for name, value in arguments.items():
        if name not in _REFUSED:
            raise TypeError(f"{optimizer} has no argument `{name}`. Received: {name}={value!r}")
        if value is not None and (name, value) != ("gradient_accumulation_steps", 1):
            raise ValueError(f"`{name}` {_REFUSED[name]}. Received: {name}={value!r}")


def _serialized(value):
    if hasattr(value, "numpy") or _keras.is_variable(value):
        return float(_keras.native(value).numpy())
    if inspect.isfunction(value):  # By its registered name alone; see `_deserialized`.
        return {"class_name": "function", "registered_name": _keras.keras.saving.get_registered_name(value)}
    return _keras.keras.saving.serialize_keras_object(value) if callable(value) else value


def _deserialized(value):
    """The object of a config; of functions registered ones alone, for the optimizer would call any other."""
    if not isinstance(value, dict):
        return value
    saving, name = _keras.keras.saving, value.get("registered_name")
    if value.get("class_name") == "function":
        made = saving.get_registered_object(name)
    else:
        made = saving.deserialize_keras_object(value)
    if made is None or inspect.isroutine(made) and saving.get_registered_object(name) is not made:
        raise ValueError(
            "A function in the config of an optimizer must be registered with "
            "`keras.saving.register_keras_serializable`: a file could name any other. Received: "
            f"{value.get('module')}, {value.get('class_name')}, {name}"
        )
    return made
