"""Which layers and operations treat the examples of a real batch apart.

    op(x)[i] depends on x[i] alone

A plain Keras model (and any path that runs a real batch) may contain only what is on
this list or was declared by `declare_per_example`. The list is short on purpose: what it does
not name is refused, not guessed.
"""

import inspect

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.per_example.layers.einsum_dense import letters

_LAYERS = frozenset(
    """
    InputLayer Dense EinsumDense Embedding Activation Masking Identity Rescaling
    ReLU LeakyReLU PReLU ELU Softmax Dropout SpatialDropout1D SpatialDropout2D SpatialDropout3D
    GaussianDropout GaussianNoise AlphaDropout
    Conv1D Conv2D Conv3D Conv1DTranspose Conv2DTranspose Conv3DTranspose DepthwiseConv1D
    DepthwiseConv2D SeparableConv1D SeparableConv2D
    MaxPooling1D MaxPooling2D MaxPooling3D AveragePooling1D AveragePooling2D AveragePooling3D
    GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D
    GlobalMaxPooling2D GlobalMaxPooling3D
    Flatten Reshape Permute RepeatVector Cropping1D Cropping2D Cropping3D UpSampling1D
    UpSampling2D UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D
    LayerNormalization GroupNormalization RMSNormalization UnitNormalization BatchNormalization
    Add Subtract Multiply Average Maximum Minimum Concatenate Dot
    MultiHeadAttention Attention AdditiveAttention
    """.split()
)
_OF_SEQUENCES = ("Attention", "AdditiveAttention")
_RECURRENT = frozenset("LSTM GRU SimpleRNN".split())
_ELEMENTWISE = frozenset(
    "add subtract multiply divide truedivide truediv notequal relu gelu silu tanh sigmoid".split()
)
_LOSSES = frozenset(
    """
    BinaryCrossentropy BinaryFocalCrossentropy CategoricalCrossentropy CategoricalFocalCrossentropy
    SparseCategoricalCrossentropy KLDivergence Poisson MeanSquaredError MeanAbsoluteError
    MeanAbsolutePercentageError MeanSquaredLogarithmicError CosineSimilarity Huber LogCosh
    Hinge SquaredHinge CategoricalHinge
    """.split()
)


def declare_per_example(layer_class):
    """Declares that a layer class treats the examples of a batch apart.

    It is your word: a layer that mixes examples, once declared, breaks the guarantee.
    Needed for custom layers of plain Keras models, and for subclasses of layers that are
    refused by name. A model from `make_private` gives each example a batch of its own, and
    takes other custom layers as they are.

    Args:
        layer_class: a `keras.layers.Layer` subclass, or a layer.

    Returns:
        The same class, so that this also works as a decorator.

    Example:
    >>> @declare_per_example
    ... class Doubled(tf.keras.layers.Layer):
    ...     def call(self, inputs):
    ...         return 2.0 * inputs
    """
    layer_class._dp2_per_example = True
    return layer_class


def is_declared(layer) -> bool:
    """Whether `declare_per_example` was called on this layer or its own class."""
    return "_dp2_per_example" in vars(layer) or "_dp2_per_example" in vars(type(layer))


def check(model, recurrent: bool = False) -> None:
    """Refuses what is not known to treat examples apart.

    Args:
        model: a Sequential or functional Keras model.
        recurrent: whether layers that loop over time may stay.

    Raises:
        ValueError: naming the first operation that is not on the list, and the fix.
    """
    if is_declared(model):
        return
    if not _is_container(model):
        _refuse(model, "is a subclassed model, whose `call` may mix the examples of a batch")
    for operation in _keras.operations(model):
        if _is_container(operation):
            check(operation, recurrent)
        elif recurrent and type(operation).__name__ in _RECURRENT and _is_of_keras(operation):
            continue
        elif not (is_declared(operation) or _is_known(operation) or _is_elementwise(operation)):
            _refuse(operation, "is not known to treat the examples of a batch apart")
    for tensor in model.inputs or []:
        if len(tensor.shape) < 2:
            _refuse(model, "has an input of one axis, which layers take for their features")


def check_losses(losses) -> None:
    """Refuses losses that are reduced, or not known to give each example its own entry.

    Args:
        losses: what `compile` was given as `loss`.

    Raises:
        ValueError: naming the first such loss, and the fix.
    """
    for loss in tf.nest.flatten(losses):
        known = type(loss).__name__ in _LOSSES and type(loss).__module__.startswith("keras.")
        axis = getattr(loss, "axis", getattr(loss, "_fn_kwargs", {}).get("axis", -1))
        unreduced = getattr(loss, "reduction", "") in (None, "none")
        if not unreduced or not (is_declared(loss) or (known and axis == -1)):
            _refuse(loss, "is not a Keras loss with `reduction='none'` that treats the examples apart")


ADVICE = (
    " Wrap the model with `dp2_keras.make_private(model)`, which gives each example a batch of its own, or "
    "declare the class with `dp2_keras.declare_per_example` if you know better."
)


def _refuse(thing, why):
    name = getattr(thing, "name", thing)
    raise ValueError(f"'{name}' ({type(thing).__name__}) {why}.{ADVICE}")


def _is_container(model):
    """A Sequential or functional model that runs its operations and nothing else."""
    for base in (_keras.keras.Sequential, _keras.Functional):
        if isinstance(model, base):
            return type(model).call is base.call and type(model).__call__ is base.__call__
    return False


def _is_known(operation):
    if type(operation).__name__ not in _LAYERS or not _is_of_keras(operation):
        return False
    return isinstance(operation, _keras.keras.layers.Layer) and not _reaches_batch_axis(operation)


def _is_of_keras(operation):
    return type(operation).__module__.startswith("keras.")


def _is_elementwise(operation):
    """Arithmetic in a functional model, none of whose arguments is broadcast along the batch."""
    if _keras.operation_name(operation) not in _ELEMENTWISE or not _is_of_keras(operation):
        return False
    calls = _keras.operation_calls(operation)
    return all(_is_aligned(t, output) for arguments, output in calls for t in tf.nest.flatten(arguments))


def _is_aligned(argument, output):
    """Whether an argument has the output's batch axis, or is a constant without one."""
    shape, rank = getattr(argument, "shape", ()), len(output.shape)
    if _keras.is_symbolic(argument):
        return len(shape) == rank and shape[0] == output.shape[0]
    return len(shape) < rank or (len(shape) == rank and shape[0] == 1)


def _reaches_batch_axis(layer):
    """Whether an argument may make a layer of the list mix examples."""
    axes = tf.nest.flatten([getattr(layer, name, None) for name in ("axis", "axes", "_attention_axes")])
    if type(layer).__name__ == "EinsumDense" and not _keeps_batch(layer):
        return True
    if type(layer).__name__ in _OF_SEQUENCES and min(_input_ranks(layer), default=0) < 3:
        return True  # Of [n, width] they make one sequence of n.
    odd_axis = any(axis is not None and axis != -1 and axis < 1 for axis in axes)
    activation = getattr(layer, "activation", None)
    odd_activation = activation is not None and not (
        inspect.isfunction(activation) and activation.__module__.startswith("keras.src.activations")
    )
    return odd_axis or odd_activation or getattr(layer, "target_shape", True) == ()


def _keeps_batch(layer):
    """Whether an einsum's first letter is the batch's, with another one on both sides, and in no other place.

    Another, because layers and activations take the last axis for the features.
    """
    named = len(layer.equation.split(",")[0].replace("...", "").strip())
    ranks = (_input_ranks(layer) or {named, named + 1}) if "..." in layer.equation else {named}
    for inputs, kernel, outputs in (letters(layer.equation, rank) for rank in ranks):
        batch = inputs[:1]
        once = batch and inputs.count(batch) == outputs.count(batch) == 1 and batch not in kernel
        if not once or outputs[0] != batch or len(outputs) < 2:
            return False
    return True


def _input_ranks(layer):
    """The ranks of what a layer was given where the model was put together; none if it was not yet."""
    arguments = [t for given, _ in _keras.operation_calls(layer) for t in tf.nest.flatten(given)]
    return {len(t.shape) for t in arguments if _keras.is_symbolic(t)}
