"""The forward pass and the loss of a model, on one example or on a batch of them.

    loss_i = the compiled loss of a batch of one, example i

Predictions travel as a flat list of tensors, because a map over examples takes nothing else. Behind them
travels what Keras has noted in them: masks, and the logits that an activation made them of, by which its
cross-entropies are exact where probabilities round to 0 or 1.
"""

from __future__ import annotations

import contextlib

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.per_example.mapping import map_examples


class ExamplePass:
    """A model, and the structure of its data.

    An example is (leaves, seeds): the tensors of its row of data, flat, and the random
    words of its random layers. A batch of examples has one more axis, in front. Sparse
    inputs have no such axis to map over; they stay whole, and the loss sees None for them.

    Args:
        model: the private model.
        variables: what gradients are taken of.
        data: (x, y, sample_weight), for their structure.
        unroll: make recurrent layers unroll over time, as a vectorized map needs.
    """

    def __init__(self, model, variables, data, unroll=False):
        self.model, self.unroll = model, unroll
        self._sources = [_keras.native(v) for v in variables]
        self._data = tf.nest.map_structure(as_tensor, data)
        self.tensors = [t for t in tf.nest.flatten(self._data) if t is not None]
        self.leaves = [t for t in self.tensors if not _is_sparse(t)]

    def __call__(self, example):
        """The gradients of one example's loss, and its predictions."""
        leaves, seeds = example
        x, y, sample_weight = self._pack([t[None] for t in leaves])
        with self._scope(seeds), tf.GradientTape() as tape:
            y_pred = _keras.forward(self.model, x)
            loss = self._loss(x, y, y_pred, sample_weight)
        gradients = tape.gradient(loss, self._sources, unconnected_gradients="zero")
        return [tf.convert_to_tensor(g) for g in gradients], [t[0] for t in self._flatten(y_pred, 1)]

    def outputs(self, examples):
        """The predictions for a real batch; the first example's words seed the random layers."""
        leaves, seeds = examples
        x, _, _ = self._pack(leaves, sparse_rows=tf.shape(leaves[0], tf.int64)[0])
        with self._scope(seeds[0]):
            return self._flatten(_keras.forward(self.model, x), leaves[0].shape[0])

    def output_gradients(self, examples, outputs):
        """The gradient of each example's own loss at its predictions, like `outputs`.

        Taken inside the map: XLA would compile the gradient of a map anew in every step.

        Raises:
            ValueError: if the loss depends on a weight other than through the predictions.
        """

        def gradients(row):
            (leaves, seeds), outputs = row
            x, y, sample_weight = self._pack([t[None] for t in leaves])
            with self._scope(seeds), tf.GradientTape() as tape:
                tape.watch([t for t in outputs if t.dtype.is_floating])
                y_pred = self.predictions([t[None] for t in outputs])
                loss = self._loss(x, y, y_pred, sample_weight)
            found = tape.gradient(loss, [*outputs, *self._sources])
            if any(g is not None for g in found[len(outputs) :]):
                raise ValueError(
                    "The loss reads a weight of the model, which only the methods that give each example "
                    'a batch of its own can follow: compile the model with `method="vectorized"`.'
                )
            return [tf.zeros_like(t) if g is None else g for t, g in zip(outputs, found)]

        return map_examples(gradients, (examples, outputs))

    def predictions(self, outputs):
        """What the model put out, as it nests it."""
        count = len(tf.nest.flatten(self._structure))
        tensors, notes = list(outputs[:count]), iter(outputs[count:])
        for name, is_noted in self._noted.items():
            for tensor in (t for t, noted in zip(tensors, is_noted) if noted):
                setattr(tensor, name, next(notes))
        return tf.nest.pack_sequence_as(self._structure, tensors)

    def _pack(self, leaves, sparse_rows=None):
        """The data's structure around these tensors; sparse ones only if their rows are given."""
        leaves = iter(leaves)

        def fill(t):
            if t is None or (_is_sparse(t) and sparse_rows is None):
                return None
            if _is_sparse(t):  # An empty batch comes padded with one row.
                return tf.SparseTensor(t.indices, t.values, [sparse_rows, t.dense_shape[1]])
            return next(leaves)

        return tf.nest.map_structure(fill, self._data)

    def _flatten(self, y_pred, examples):
        flat = tf.nest.flatten(y_pred)
        for tensor in flat:
            if tensor.shape.rank is not None and not tensor.shape[:1].is_compatible_with([examples]):
                raise ValueError(
                    "Each output of the model must have the batch as its first axis. Received: an "
                    f"output of shape {tensor.shape} for a batch of {examples}"
                )
        notes = {name: [getattr(tensor, name, None) for tensor in flat] for name in _keras.NOTES}
        self._noted = {name: [note is not None for note in found] for name, found in notes.items()}
        self._structure = y_pred
        return flat + [note for found in notes.values() for note in found if note is not None]

    def _loss(self, x, y, y_pred, sample_weight):
        owner = self.model._loss_owner()
        return tf.reduce_sum(_keras.compute_loss(owner, x, y, y_pred, sample_weight))

    @contextlib.contextmanager
    def _scope(self, seeds):
        unrolled = _keras.unrolled(self.model) if self.unroll else contextlib.nullcontext()
        with _keras.constant_regularizers(self.model), unrolled, _keras.example_scope(self.model, seeds):
            yield


def as_tensor(value):
    """A part of the data as a tensor; a sparse one, and none, as it is."""
    return value if value is None or _is_sparse(value) else tf.convert_to_tensor(value)


def _is_sparse(tensor):
    return isinstance(tensor, tf.SparseTensor)
