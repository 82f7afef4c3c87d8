"""What a model may not do if each example's gradient is to be its own.

    g_i depends on example i and the weights alone, and nothing but the noisy sum of
    clipped g_i reaches a variable

Each check raises a `ValueError` that names the layer or argument and its replacement.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from dp2_keras import _keras, operations

_WRITES = ("Assign", "ResourceScatter", "ResourceApply", "LookupTableInsert", "LookupTableImport")

_CROSS_EXAMPLE = {
    "BatchNormalization": "use GroupNormalization or LayerNormalization, or freeze it with "
    "`layer.trainable = False`",
    "SyncBatchNormalization": "use GroupNormalization or LayerNormalization",
    "MixUp": "mix examples of public data before training, or leave it out",
    "CutMix": "mix examples of public data before training, or leave it out",
}


def check_model(model) -> None:
    """Refuses layers that mix examples, float16 and activity regularisers, by looking."""
    for layer in _keras.flatten_layers(model):
        _check_layer(layer)


def _check_layer(layer):
    if operations.is_declared(layer):
        return
    for base in type(layer).__mro__:
        if base.__name__ in _CROSS_EXAMPLE and layer.trainable:
            raise ValueError(
                f"Layer '{layer.name}' ({type(layer).__name__}) mixes the examples of a batch, so that "
                f"no clip bounds what one of them does: {_CROSS_EXAMPLE[base.__name__]}."
            )
    if layer.dtype_policy.compute_dtype == "float16":
        raise ValueError(
            f"Layer '{layer.name}' computes in float16, which needs a loss scale that would change "
            "what is clipped: use the `mixed_bfloat16` policy. Received: "
            f"dtype_policy={layer.dtype_policy.name!r}"
        )
    if getattr(layer, "activity_regularizer", None) is not None:
        raise ValueError(_ADDED_LOSS.format(name=layer.name, what="has an `activity_regularizer`"))


_ADDED_LOSS = (
    "Layer '{name}' {what}, a loss that depends on the batch as a whole: move it into the loss, "
    "or into your model's `compute_loss`, where it belongs to one example."
)


def check_forward(model, x) -> tf.TypeSpec:
    """Refuses state written and losses added by a forward pass, found by tracing it.

    Args:
        model: the model.
        x: its inputs, a structure of tensors.

    Returns:
        The structure of the outputs.
    """
    spec = lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype)  # noqa: E731
    with tf.init_scope():
        forward = tf.function(lambda x: model(x, training=True), autograph=False)
        traced = forward.get_concrete_function(tf.nest.map_structure(spec, x))
    _check_writes(model, traced.graph)
    for layer in _keras.flatten_layers(model):
        if _keras.added_losses(layer):
            raise ValueError(_ADDED_LOSS.format(name=layer.name, what="calls `add_loss`"))
    check_model(model)  # Again: a model may make its layers when it is first called.
    return traced.structured_outputs


def _check_writes(model, graph):
    seeds = _keras.random_state_handles(model)
    handles = {id(inner): outer for outer, inner in graph.captures}
    for op in graph.get_operations():
        if op.type.startswith(_WRITES):
            target = handles.get(id(op.inputs[0]))
            if not any(target is seed for seed in seeds):
                raise ValueError(_STATE.format(name=_owner(model, target), op=op.type))
    for function in graph.as_graph_def().library.function:
        for node in function.node_def:
            if node.op.startswith(_WRITES):
                raise ValueError(_STATE.format(name=node.name, op=node.op))


_STATE = (
    "{name} is written by the forward pass ({op}): state that follows the data leaks it past the "
    "noise. Remove the layer, freeze it, or keep its state constant while training."
)


def _owner(model, handle):
    for layer in reversed(_keras.flatten_layers(model)):
        for variable in layer.variables:
            if _keras.native(variable).handle is handle:
                return f"Variable '{variable.name}' of layer '{layer.name}'"
    return "A variable"


def check_loss(loss) -> None:
    """Refuses reductions that are not the example's own loss at batch size one."""
    for item in tf.nest.flatten(loss):
        if getattr(item, "reduction", None) == "mean_with_sample_weight":
            raise ValueError(
                "`loss` must not divide by the sample weights, which cancel when each example is a "
                "batch of its own: use `reduction='sum_over_batch_size'`. Received: "
                f"loss={item}, reduction='mean_with_sample_weight'"
            )


def check_callbacks(callbacks) -> None:
    """Refuses callbacks that steer training by a metric of the training data."""
    for callback in tf.nest.flatten(callbacks or []):
        steered = getattr(callback, "save_best_only", True)
        monitor = getattr(callback, "monitor", None)
        if steered and isinstance(monitor, str) and not monitor.startswith("val_"):
            raise ValueError(
                f"{type(callback).__name__} must not steer training by a metric of the private "
                "training data, which the noise does not cover: monitor a `val_` metric. "
                f"Received: monitor={monitor!r}"
            )


def check_ranges(model, x, y) -> None:
    """Refuses labels and tokens that are out of range, where they are given as arrays.

    Deep in a step, such an example would stop the run or be read as another one.
    """
    for layer in _keras.flatten_layers(model):
        if isinstance(layer, _keras.keras.layers.Embedding):
            for tokens in _inputs_of(layer, model, x):
                _check_range(f"tokens for layer '{layer.name}'", tokens, layer.input_dim)
    losses, labels = tf.nest.flatten(getattr(model, "loss", None)), tf.nest.flatten(y)
    outputs = getattr(model, "outputs", None) or []
    if len(losses) == len(labels) == len(outputs):
        for loss, label, output in zip(losses, labels, outputs):
            name = getattr(loss, "name", getattr(loss, "__name__", loss))
            if name == "sparse_categorical_crossentropy" and getattr(loss, "ignore_class", None) is None:
                _check_range("labels", label, output.shape[-1])


def _inputs_of(layer, model, x):
    """The arrays of `x` that go straight into a layer."""
    inputs, arrays = getattr(model, "inputs", None) or [], tf.nest.flatten(x)
    if len(inputs) != len(arrays):
        return []
    direct = [t for node in layer._inbound_nodes for t in tf.nest.flatten(node.input_tensors)]
    return [a for a, i in zip(arrays, inputs) if any(i is t for t in direct)]


def _check_range(what, values, stop):
    if not hasattr(values, "shape") or not hasattr(values, "dtype") or stop is None:
        return
    values = np.asarray(values)
    if values.size and (values.min() < 0 or values.max() >= stop):
        raise ValueError(
            f"The {what} must be at least 0 and below {stop}. Received: values from "
            f"{values.min()} to {values.max()}"
        )


def check_tensors(data) -> None:
    """Refuses sparse and ragged inputs, which have no example axis to map over."""
    for tensor in tf.nest.flatten(data):
        if isinstance(tensor, (tf.SparseTensor, tf.RaggedTensor)):
            raise ValueError(
                "Inputs must be dense tensors: convert them with `tf.sparse.to_dense` or "
                f"`.to_tensor()`. Received: {type(tensor).__name__}"
            )


def check_stock_model(model, data) -> None:
    """All checks for a plain model, whose layers see a real batch."""
    x, _, _ = _keras.keras.utils.unpack_x_y_sample_weight(data)
    check_loss(getattr(model, "loss", None))
    check_model(model)
    check_forward(model, x)
    operations.check(model)
