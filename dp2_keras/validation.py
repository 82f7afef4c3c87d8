"""What a model may not do if each example's gradient is to be its own.

    g_i depends on example i and the weights alone, and nothing but the noisy sum of
    clipped g_i reaches a variable

Each check raises a `ValueError` that names the layer or argument and its replacement.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from dp2_keras import _keras, operations

# Stateful operations that change nothing: they read, draw random numbers, check, print or branch.
_HARMLESS = (
    "ReadVariableOp", "ResourceGather", "VarHandleOp", "VarIsInitializedOp", "VariableShape",
    "LookupTableFind", "LookupTableSize", "HashTable",
    "Random", "Stateful", "Rng", "Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal", "CudnnRNN",
    "Assert", "Print", "PartitionedCall", "If", "While", "Case",
)  # fmt: skip

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
    for base in type(layer).__mro__:
        frozen = base.__name__.endswith("BatchNormalization") and not layer.trainable
        if base.__name__ in _CROSS_EXAMPLE and not frozen and not operations.is_declared(layer):
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


def check_step(model, loss_owner, data) -> None:
    """Refuses state written by a forward pass or its loss, and added losses, by tracing them.

    Args:
        model: the model.
        loss_owner: the model whose `compute_loss` counts.
        data: (x, y, sample_weight), structures of tensors.

    Raises:
        ValueError: naming the variable or layer, and if TensorFlow is told to take assertions out.
    """
    _check_assertions()

    def step(data):
        x, y, sample_weight = data
        y_pred = _keras.forward(model, x)
        _keras.build_losses(loss_owner, y_pred)
        _keras.compute_loss(loss_owner, x, y, y_pred, sample_weight)

    check_model(model)
    with tf.init_scope():
        traced = tf.function(step, autograph=False)
        graph = traced.get_concrete_function(specs_of(data)).graph
    _check_state(model, loss_owner, graph)
    for layer in _keras.flatten_layers(model):
        if _keras.added_losses(layer):
            raise ValueError(_ADDED_LOSS.format(name=layer.name, what="calls `add_loss`"))
    check_model(model)  # Again: a model may make its layers when it is first called.


def specs_of(structure):
    """Shapes and dtypes of a structure of tensors, to trace a function with."""

    def spec(tensor):
        if tensor is None:
            return None
        kind = tf.SparseTensorSpec if isinstance(tensor, tf.SparseTensor) else tf.TensorSpec
        return kind(tensor.shape, tensor.dtype)

    return tf.nest.map_structure(spec, structure)


def _check_state(model, loss_owner, graph):
    """Every stateful operation must read, draw, check or branch; or write a metric or a seed."""
    metrics = [_keras.native(v).handle for metric in loss_owner.metrics for v in metric.variables]
    writable = [*metrics, *_keras.random_state_handles(model)]
    outer = {id(inner): handle for handle, inner in graph.captures}
    for op in graph.get_operations():
        if _may_write(op.type):
            target = outer.get(id(op.inputs[0])) if op.inputs else None
            if not any(target is handle for handle in writable):
                raise ValueError(_STATE.format(name=_owner(model, target), op=op.type))
    for function in graph.as_graph_def().library.function:
        for node in function.node_def:
            if _may_write(node.op):
                raise ValueError(_STATE.format(name=f"Something in '{node.name}'", op=node.op))


def _may_write(op_type):
    if "PyFunc" in op_type:
        return True
    definition = op_def_registry.get(op_type)
    return definition is not None and definition.is_stateful and not op_type.startswith(_HARMLESS)


_STATE = (
    "{name} is written by the forward pass or its loss ({op}): state that follows the data leaks it "
    "past the noise. Remove the layer, freeze it, or keep its state constant while training."
)


def _owner(model, handle):
    for layer in reversed(_keras.flatten_layers(model)):
        for variable in layer.variables:
            if _keras.native(variable).handle is handle:
                return f"Variable '{variable.name}' of layer '{layer.name}'"
    return "A variable or resource"


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
    callbacks = getattr(callbacks, "callbacks", callbacks)  # Of a CallbackList.
    for callback in tf.nest.flatten(callbacks or []):
        steered = getattr(callback, "save_best_only", True)
        monitor = getattr(callback, "monitor", None)
        if isinstance(callback, _keras.keras.callbacks.TerminateOnNaN):
            monitor = "loss"
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
    names, outputs = getattr(model, "output_names", None) or [], getattr(model, "outputs", None) or []
    losses = _by_name(getattr(model, "loss", None), names)
    for loss, label, output in zip(losses, _by_name(y, names), outputs):
        name = getattr(loss, "name", getattr(loss, "__name__", loss))
        if name == "sparse_categorical_crossentropy" and getattr(loss, "ignore_class", None) is None:
            _check_range("labels", label, output.shape[-1])


def losses_and_shapes(model, loss) -> tuple[list, list[tuple] | None]:
    """The loss of each output, or one for all, and the outputs' shapes if they are known."""
    outputs = getattr(model, "outputs", None) if model.built else None
    losses = _by_name(loss, getattr(model, "output_names", None) or loss)
    return list(losses), outputs and [tuple(output.shape) for output in outputs]


def _inputs_of(layer, model, x):
    """The arrays of `x` that go straight into a layer."""
    inputs = getattr(model, "inputs", None) or []
    arrays = _by_name(x, [i.name.split(":")[0] for i in inputs])
    direct = [t for node in layer._inbound_nodes for t in tf.nest.flatten(node.input_tensors)]
    return [a for a, i in zip(arrays, inputs) if any(i is t for t in direct)]


def _by_name(values, names):
    """A dict's entries in the order of names; a list as it is; one thing alone."""
    if isinstance(values, dict):
        return [values.get(name) for name in names]
    return values if isinstance(values, (list, tuple)) else [values]


def _check_range(what, values, stop):
    if not hasattr(values, "shape") or not hasattr(values, "dtype") or stop is None:
        return
    values = np.asarray(values)
    if values.size and not (values.min() >= 0 and values.max() < stop):
        raise ValueError(
            f"The {what} must be at least 0 and below {stop}. Received: values from "
            f"{values.min()} to {values.max()}"
        )


def check_tensors(data) -> None:
    """Refuses ragged inputs, and sparse labels and weights, which have no example axis to map over."""
    x, y, sample_weight = data
    sparse = [t for t in tf.nest.flatten((y, sample_weight)) if isinstance(t, tf.SparseTensor)]
    for tensor in [*sparse, *(t for t in tf.nest.flatten(data) if isinstance(t, tf.RaggedTensor))]:
        raise ValueError(
            "Inputs must be dense tensors: convert them with `tf.sparse.to_dense` or "
            f"`.to_tensor()`. Received: {type(tensor).__name__}"
        )


def check_sparse(plan, physical_batch_size) -> None:
    """Refuses sparse inputs where the step would have to take them apart."""
    if plan.method != "ghost" or physical_batch_size is not None:
        raise ValueError(
            'Sparse inputs need `method="ghost"` or "auto", and no `physical_batch_size`: convert them with '
            f"`tf.sparse.to_dense`. Received: physical_batch_size={physical_batch_size}, plan={plan}"
        )


def check_equal_length(tensors) -> None:
    """Refuses inputs, labels and weights of different numbers of examples."""
    for tensor in tensors:
        if tensor.shape.rank == 0 or not tensor.shape[:1].is_compatible_with(tensors[0].shape[:1]):
            raise ValueError(
                "Inputs, labels and sample weights must have one row per example. Received: shapes "
                f"{[tuple(t.shape) for t in tensors]}"
            )


def _check_assertions():
    if tf.config.optimizer.get_experimental_options().get("debug_stripper"):
        raise ValueError(
            "`debug_stripper` must be off, which takes out the assertions by which a step is refused: "
            'tf.config.optimizer.set_experimental_options({"debug_stripper": False}). Received: '
            "debug_stripper=True"
        )


def check_stock_model(model, data) -> None:
    """All checks for a plain model, whose layers see a real batch."""
    operations.check_losses(model.loss)
    check_step(model, model, _keras.keras.utils.unpack_x_y_sample_weight(data))
    operations.check(model)
