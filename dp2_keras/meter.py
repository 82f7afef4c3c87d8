"""Counts the steps that run, and lets no step run that may not.

    a step runs          iff  skip == 0  and  steps < limit
    at the limit         nothing happens in `fit`, which stops; an error elsewhere
    before it updates    steps <- steps + 1
    if skip > 0          skip  <- skip - 1, and nothing else happens

All of it in the graph, so that neither `steps_per_execution` nor a lost callback can take a step too
many. A step that does not run draws no noise, changes no variable and is not counted.
"""

from __future__ import annotations

import tensorflow as tf

UNLIMITED = 2**62

_CLOSED = (
    "This step must be counted before it runs, and is not: train with `fit` or `train_on_batch`, which "
    "write it to the ledger file first."
)


class Meter:
    """The counter and the gate of a model's train step.

    The variables are held by this plain object, so that no checkpoint rewinds them.

    Example:
    >>> meter = Meter()
    >>> meter.open(limit=1, stops_quietly=True)
    >>> [bool(meter.gate()) and int(meter.count()) for _ in range(2)]
    [1, False]
    """

    def __init__(self):
        with tf.init_scope():
            self._steps, self._limit, self._skip = (
                tf.Variable(value, trainable=False, dtype=tf.int64) for value in (0, 0, 0)
            )
            self._stops_quietly = tf.Variable(False, trainable=False)

    def open(self, limit: int = UNLIMITED, stops_quietly: bool = False) -> None:
        """Starts a run of at most `limit` steps: nothing counted, nothing to skip."""
        self._steps.assign(0)
        self._skip.assign(0)
        self._limit.assign(min(limit, UNLIMITED))
        self._stops_quietly.assign(stops_quietly)

    def close(self) -> None:
        """Ends the run: no further step may run."""
        self._limit.assign(0)
        self._stops_quietly.assign(False)

    def skip(self, steps: int) -> None:
        """Passes over the coming steps, which an interrupted run has taken already."""
        self._skip.assign(steps)

    @property
    def steps(self) -> int:
        """How many steps of the run have started."""
        with tf.init_scope():  # Keras may ask while it traces a model that is saved.
            return int(self._steps)

    @property
    def skipped(self) -> int:
        """How many steps are still passed over."""
        return int(self._skip)

    @property
    def is_exhausted(self) -> bool:
        """Whether the gate is closed for good."""
        return int(self._steps) >= int(self._limit)

    def gate(self) -> tf.Tensor:
        """Whether this step may run; in the graph, once a step."""
        skipping, paid = self._skip > 0, self._steps < self._limit
        counted = tf.debugging.Assert(paid | skipping | self._stops_quietly, [_CLOSED])
        with tf.control_dependencies([] if counted is None else [counted]):
            self._skip.assign_sub(tf.cast(skipping, tf.int64))
            return paid & tf.logical_not(skipping)

    def count(self) -> tf.Tensor:
        """Counts a step; in the graph, before its update."""
        return tf.convert_to_tensor(self._steps.assign_add(1))

    def __deepcopy__(self, memo):
        return Meter()

    def __reduce__(self):
        return Meter, ()
