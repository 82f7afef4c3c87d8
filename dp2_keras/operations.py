"""Which layers and operations treat the examples of a real batch apart.

    op(x)[i] depends on x[i] alone

A plain Keras model (and any path that runs a real batch) may contain only what is on
this list or was declared by `declare_per_example`. The list is short on purpose: what it does
not name is refused, not guessed.
"""

import tensorflow as tf

from dp2_keras import _keras

_LAYERS = frozenset(
    """
    InputLayer Dense EinsumDense Embedding Activation Masking Identity
    ReLU LeakyReLU PReLU ELU Softmax Dropout SpatialDropout1D SpatialDropout2D SpatialDropout3D
    GaussianDropout GaussianNoise AlphaDropout
    Conv1D Conv2D Conv3D Conv1DTranspose Conv2DTranspose Conv3DTranspose DepthwiseConv1D
    DepthwiseConv2D SeparableConv1D SeparableConv2D
    MaxPooling1D MaxPooling2D MaxPooling3D AveragePooling1D AveragePooling2D AveragePooling3D
    GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D
    GlobalMaxPooling2D GlobalMaxPooling3D
    Flatten Reshape Permute RepeatVector Cropping1D Cropping2D Cropping3D UpSampling1D
    UpSampling2D UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D Rescaling
    LayerNormalization GroupNormalization RMSNormalization UnitNormalization BatchNormalization
    Add Subtract Multiply Average Maximum Minimum Concatenate
    MultiHeadAttention GroupQueryAttention Attention AdditiveAttention
    """.split()
)
_KERAS_OPERATIONS = frozenset(
    """
    Add Subtract Multiply Divide TrueDivide Negative Absolute Square Sqrt Exp Log Maximum Minimum
    Relu Relu6 Sigmoid Tanh Silu Gelu Elu Selu Softplus Softsign LeakyRelu HardSigmoid
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


def check(model) -> None:
    """Refuses what is not known to treat examples apart.

    Args:
        model: a Sequential or functional Keras model.

    Raises:
        ValueError: naming the first operation that is not on the list, and the fix.
    """
    for operation in _keras.operations(model):
        if is_declared(operation):
            continue
        if type(operation) in (_keras.keras.Sequential, _keras.Functional):
            check(operation)
        elif not _is_known(operation):
            raise ValueError(
                f"'{operation.name}' ({type(operation).__name__}) is not known to treat the examples "
                "of a batch apart. Wrap the model with `dp2_keras.make_private(model)`, which gives "
                "each example a batch of its own, or declare the class with "
                "`dp2_keras.declare_per_example` if you know that it does."
            )
    if type(model) not in (_keras.keras.Sequential, _keras.Functional) and not is_declared(model):
        raise ValueError(
            f"{type(model).__name__} is a subclassed model, whose `call` may mix the examples of a "
            "batch. Wrap it with `dp2_keras.make_private(model)`, or declare the class with "
            "`dp2_keras.declare_per_example` if you know that it does not."
        )


def _is_known(operation):
    name, module = type(operation).__name__, type(operation).__module__
    if not module.startswith("keras."):
        return False
    if isinstance(operation, _keras.keras.layers.Layer):
        return name in _LAYERS and not _touches_batch_axis(operation)
    return name in _KERAS_OPERATIONS


def _touches_batch_axis(layer):
    axes = tf.nest.flatten([getattr(layer, name, None) for name in ("axis", "_attention_axes")])
    activation = getattr(layer, "activation", None)
    foreign = activation is not None and not getattr(activation, "__module__", "").startswith("keras.")
    return 0 in axes or foreign
