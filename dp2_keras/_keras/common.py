"""What both Keras generations have under one name."""

import contextlib
import functools
import sys
import warnings

import keras
import tensorflow as tf

# What Keras notes in a tensor that a model puts out, for its losses and metrics.
NOTES = ("_keras_mask", "_keras_logits")

register = keras.saving.register_keras_serializable(package="dp2_keras")


class OwnState:
    """An optimizer whose saved state no other class of optimizer takes for its own.

    Keras saves state as "0", "1", ... and loads it by number, so that Adam's moments in a
    file of weights would come back as a preconditioner.
    """

    def save_own_variables(self, store):
        """Saves the state, if there is any yet, under the name of the class."""
        if self.is_built():
            for name, variable in self._saved_names().items():
                store[name] = variable.numpy()

    def load_own_variables(self, store):
        """Loads the state, or warns that there is none for this optimizer."""
        saved = self._saved_names()
        if not store.keys() and not int(self.iterations.numpy()):
            return  # Neither has taken a step.
        if set(store.keys()) != set(saved):
            warnings.warn(
                f"{type(self).__name__} keeps the state it has: there is none for it in the file, which was "
                "saved with another optimizer, with none, or for other variables. Received: "
                f"{len(store.keys())} saved, {len(saved)} built",
                stacklevel=2,
            )
            return
        for name, variable in saved.items():
            variable.assign(store[name])

    def _saved_names(self):
        return {f"{type(self).__name__}.{i}": v for i, v in enumerate(self.variables)}


def flatten_layers(model):
    """All layers of a model at any depth, itself first."""
    return list(model._flatten_layers())


def sublayers(layer):
    """The layers that a layer holds, one level down."""
    return list(layer._flatten_layers(recursive=False, include_self=False))


def recurrent_layers(model):
    """The layers that loop over time."""
    return [layer for layer in flatten_layers(model) if isinstance(layer, keras.layers.RNN)]


def wants_jit(model):
    """Whether the model was compiled for XLA."""
    return bool(model.jit_compile)


def may_draw(layer):
    """Whether a layer may draw random numbers; recurrent ones hold a generator they may not use."""
    quiet = lambda part: getattr(part, "dropout", 1) == getattr(part, "recurrent_dropout", 1) == 0  # noqa: E731
    return any(holds_generator(part) and not quiet(part) for part in flatten_layers(layer))


def holds_generator(layer):
    """Whether a layer has a generator of random numbers of its own."""
    return bool(getattr(layer, "_seed_generators", None)) or hasattr(layer, "_random_generator")


def functional_arguments(args, kwargs):
    """Whether a model's constructor was given inputs and outputs."""
    return len(args) >= 2 or "outputs" in kwargs


def stock_train_step():
    """The plain Keras `train_step` that is running: (model, data), or None.

    Keras hands its optimizer neither the model nor the data, and the privacy rules
    need both. Only Keras's own code is recognised, so that anything else is refused.
    """
    code = keras.Model.train_step.__code__
    frame = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame and (frame.f_locals["self"], frame.f_locals["data"])


def make_train_function(model, make, force):
    """Makes a train function of which Keras compiles nothing by XLA, whatever `jit_compile` is.

    While it runs, the model is `_in_loop`.
    """
    if model.train_function is not None and not force:
        return model.train_function
    # Keras 3 asks when it makes the function, Keras 2 when it traces it.
    off = [(model, "_jit_compile", False)] if model.jit_compile else []
    with attributes(off):
        make(force)
    if off:
        model.train_function = _with_attributes(off, model.train_function)
    model.train_function = _in_loop(model, model.train_function)
    return model.train_function


def _in_loop(model, function):
    note = functools.partial(object.__setattr__, model, "_in_loop")  # Keras would look at it for 10 us.

    def noted(*args):
        note(True)
        try:
            return function(*args)
        finally:
            note(False)

    return noted


def _with_attributes(changes, function):
    def changed(*args):
        with attributes(changes):
            return function(*args)

    return changed


@contextlib.contextmanager
def unless_empty(count, variables):
    """Inside, an empty batch changes none of these: its mean loss is not a number.

    Args:
        count: the number of examples, an integer or a tensor.
        variables: `tf.Variable`s, those of the metrics.
    """
    if isinstance(count, int) and count > 0:
        yield
        return
    before = [tf.identity(v) for v in variables]
    yield
    for variable, value in zip(variables, before):
        variable.assign(tf.where(count > 0, variable, value))


@contextlib.contextmanager
def unrolling(changes):
    """Sets attributes that make recurrent layers unroll, and says what to do if one cannot."""
    try:
        with attributes(changes):
            yield
    except ValueError as error:
        if "unroll" not in str(error).lower():
            raise
        raise ValueError(
            'Sequences must have a known length for `method="vectorized"`, which unrolls recurrent '
            'layers: pad all batches to one length, or compile the model with `method="loop"`. '
            "Received: a time axis of length None"
        ) from error


@contextlib.contextmanager
def attributes(changes):
    """Sets attributes for a while: `changes` is a list of (object, name, value)."""
    with contextlib.ExitStack() as stack:
        for thing, name, value in changes:
            had = name in vars(thing) or isinstance(getattr(type(thing), name, None), property)
            stack.callback(_restore, thing, name, had, getattr(thing, name, None))
            setattr(thing, name, value)
        yield


def _restore(thing, name, had, value):
    if had:
        setattr(thing, name, value)
    else:
        delattr(thing, name)
