"""Keras models that train privately or not at all: built, subclassed, or made of a plain one."""

from __future__ import annotations

import re

from dp2_keras import _keras
from dp2_keras.account import plain_account
from dp2_keras.optimizers import PrivateOptimizer
from dp2_keras.training import PrivateTraining, check_overrides

keras = _keras.keras


@_keras.register
class DP2Sequential(PrivateTraining, keras.Sequential):
    """A `keras.Sequential` that trains privately.

    Args:
        layers: as in `keras.Sequential`.
        name: as in `keras.Sequential`.

    Example:
    >>> model = DP2Sequential([keras.layers.Dense(1)])
    """


@_keras.register
class DP2Functional(PrivateTraining, _keras.Functional):
    """What `DP2Model(inputs, outputs)` makes."""


@_keras.register
class DP2Model(PrivateTraining, keras.Model):
    """A `keras.Model` that trains privately: call it, or subclass it.

    Args:
        inputs: as in `keras.Model`.
        outputs: as in `keras.Model`.
        name: as in `keras.Model`.

    Example:
    >>> inputs = keras.Input((3,))
    >>> model = DP2Model(inputs, keras.layers.Dense(1)(inputs))
    """

    def __new__(cls, *args, **kwargs):
        # Keras turns a class that is given inputs and outputs into a functional one for
        # good; a class apart keeps `DP2Model` fit for subclassing.
        if cls is DP2Model and _keras.functional_arguments(args, kwargs):
            return DP2Functional(*args, **kwargs)
        return super().__new__(cls, *args, **kwargs)


@_keras.register
class DP2Wrapper(PrivateTraining, keras.Model):
    """A subclassed model with a private `train_step`; what `make_private` gives for one.

    Everything but training is the model's own: `call`, `compute_loss`,
    `compute_metrics`, `metrics`, `test_step`, `predict_step`.

    Args:
        model: a subclassed `keras.Model`.
    """

    def __init__(self, model, **kwargs):
        super().__init__(**kwargs)
        self.model = model

    def _loss_owner(self):
        return self.model

    def call(self, inputs, training=None):
        """Calls the model."""
        return _keras.forward(self.model, inputs, training)

    def compile(self, optimizer, loss=None, *args, **kwargs):
        super().compile(optimizer, loss, *args, **kwargs)
        ours = ("physical_batch_size", "method", "diagnostics", "public_data", "public_batch_size")
        keras_arguments = {name: value for name, value in kwargs.items() if name not in ours}
        _keras.compile_without_optimizer(self.model, loss, *args, **keras_arguments)

    @property
    def metrics(self):
        """The model's own metrics."""
        return self.model.metrics

    def test_step(self, data):
        """The model's own."""
        return self.model.test_step(data)

    def predict_step(self, data):
        """The model's own."""
        return self.model.predict_step(data)

    def compute_loss(self, *args, **kwargs):
        """The model's own."""
        return self.model.compute_loss(*args, **kwargs)

    def get_config(self):
        """The wrapped model; how it was compiled is this model's to say."""
        model = keras.saving.serialize_keras_object(self.model)
        model.pop("compile_config", None)
        return {"name": self.name, "model": model}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Loads the wrapped model and wraps it."""
        model = keras.saving.deserialize_keras_object(config["model"], custom_objects)
        return cls(model, name=config["name"])


def make_private(model: keras.Model) -> keras.Model:
    """Makes a Keras model trainable with differential privacy.

    The result shares the layers of `model`, and so the weights and their ledger. Compile it with one of
    this package's optimizers and call `fit`; everything else is Keras. Weights that were trained privately
    before bring their ledger along if they are loaded into the result; loaded into `model`, or copied by
    `set_weights`, they come without it.

    Args:
        model: a Sequential, functional or subclassed Keras model. It need not be compiled
            or built.

    Returns:
        A `DP2Sequential` or `DP2Model`; for a subclassed model, a wrapper around it.

    Raises:
        ValueError: if the model has a `train_step` of its own, which would not be private.

    Example:
    >>> model = make_private(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    """
    if isinstance(model, PrivateTraining):
        return model
    check_overrides(type(model), keras.Model)
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, PrivateOptimizer):  # Its steps are part of the weights' history.
        plain_account(_keras.flatten_layers(model), optimizer)
    return _wrapped(model)


def _wrapped(model):
    if type(model) is keras.Sequential:
        return DP2Sequential(_keras.sequential_layers(model), name=model.name)
    if type(model) is _keras.Functional:
        return DP2Functional(*_keras.functional_structure(model), name=model.name)
    return DP2Wrapper(model, name=model.name)


def unwrap(model: keras.Model) -> keras.Model:
    """The plain Keras model inside a private one, for serving.

    It shares the weights, and the name unless Keras made it up. Saved, it has no trace of
    this package.

    Args:
        model: a private model.

    Returns:
        A plain Keras model, to be compiled for training or evaluation.

    Raises:
        ValueError: for a model that is private by inheritance, or has a private model among
            its layers, and so cannot be unwrapped.

    Example:
    >>> type(unwrap(DP2Sequential([keras.layers.Dense(1)]))).__name__
    'Sequential'
    """
    # Keras makes a name of the class's where the user gives none.
    name = None if re.fullmatch(r"dp2_(sequential|functional)(_\d+)?", model.name) else model.name
    if isinstance(model, DP2Sequential):
        plain = keras.Sequential(_keras.sequential_layers(model), name=name)
    elif isinstance(model, DP2Functional):
        plain = keras.Model(*_keras.functional_structure(model), name=name)
    else:
        plain = model.model if isinstance(model, DP2Wrapper) else model
        plain.reset_metrics()  # Keras 2 saves them, and they are exact figures of the data.
    for layer in _keras.flatten_layers(plain):
        if isinstance(layer, PrivateTraining):
            raise ValueError(
                "`model` must come from `make_private`, `DP2Sequential` or `DP2Model(inputs, outputs)`, "
                f"with plain layers, to be unwrapped; '{layer.name}' ({type(layer).__name__}) is private "
                "by itself. Export it for serving with `model.export(path)`."
            )
    return plain
