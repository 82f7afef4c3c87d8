"""Counts the steps that run, and lets no step run that may not.

    a step runs          iff  skip == 0  and  steps < limit
    at the limit         nothing happens in Keras's loop, which stops; an error elsewhere
    while the loop runs  a step that is not the loop's is an error
    before it updates    steps <- steps + 1
    if skip > 0          skip  <- skip - 1, and nothing else happens

All of it in the graph, so that neither `steps_per_execution` nor a lost callback can take a step too
many. A step that does not run draws no noise, changes no variable and is not counted.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context

from dp2_keras.entries import MAX_STEPS as UNLIMITED
from dp2_keras.variables import own_variable

_CLOSED = (
    "This step is not one that the model's account counts, so it was not taken: train with `fit` or "
    "`train_on_batch`. (They write it to the ledger file first, and know the optimizer in use; a function "
    "that was traced before `compile` does not. While `fit` runs, it alone takes steps.)"
)
_TOO_MANY = (
    "A pass over batches of your own must have at most `dataset_size` examples, so that none is used twice. "
    "State the right `dataset_size`, or give `steps_per_epoch` where batches go on from epoch to epoch. "
    "Received: a batch that makes it"
)
_TOO_LARGE = (
    "A batch must have at most `expected_batch_size` examples where it is counted as a part of a pass over "
    "the data. Received: a batch of"
)


class Meter:
    """The counter and the gate of a model's train step.

    The variables are held by this plain object, so that no checkpoint rewinds them.

    Example:
    >>> meter = Meter()
    >>> meter.open(limit=1, in_loop=True)
    >>> [bool(meter.gate(in_loop=True)) and int(meter.count()) for _ in range(2)]
    [1, False]
    """

    def __init__(self):
        self._steps, self._limit, self._skip, self._ticket, self._largest_batch = (
            own_variable(value, tf.int64) for value in (0, 0, 0, -1, UNLIMITED)
        )
        self._examples, self._pass_steps, self._pass_examples = (
            own_variable(value, tf.int64) for value in (0, 0, UNLIMITED)
        )
        self._in_loop = own_variable(False, tf.bool)

    def open(
        self,
        limit: int = UNLIMITED,
        *,
        ticket: int = 0,
        largest_batch: int = UNLIMITED,
        one_pass: tuple[int, int] | None = None,
        in_loop: bool = False,
    ) -> None:
        """Starts a run: nothing counted, nothing to skip.

        Args:
            limit: the most steps it may take.
            ticket: the number of the optimizer whose steps they are.
            largest_batch: the most examples that a batch may have.
            one_pass: (k, n) if the first k steps are counted as one pass over n examples, and so may have no
                more of them together.
            in_loop: whether Keras's loop takes the steps, and nothing else.
        """
        pass_steps, pass_examples = one_pass or (0, UNLIMITED)
        for variable, value in (
            (self._steps, 0),
            (self._examples, 0),
            (self._pass_steps, pass_steps),
            (self._pass_examples, pass_examples),
            (self._skip, 0),
            (self._ticket, ticket),
            (self._largest_batch, largest_batch),
            (self._in_loop, in_loop),
            (self._limit, min(limit, UNLIMITED)),
        ):
            variable.assign(value)

    def close(self) -> None:
        """Ends the run: no further step may run."""
        self._limit.assign(0)
        self._in_loop.assign(False)

    def skip(self, steps: int) -> None:
        """Passes over the coming steps, which an interrupted run has taken already."""
        self._skip.assign(steps)

    @property
    def steps(self) -> int:
        """How many steps of the run have started."""
        return _value(self._steps)

    @property
    def skipped(self) -> int:
        """How many steps are still passed over."""
        return _value(self._skip)

    @property
    def is_exhausted(self) -> bool:
        """Whether the gate is closed for good."""
        return _value(self._steps) >= _value(self._limit)

    def gate(self, ticket: int = 0, examples: tf.Tensor | int = 0, in_loop: bool = False) -> tf.Tensor:
        """Whether this step may run; in the graph, once a step.

        Args:
            ticket: the number of the step's own optimizer. A graph that was traced with another one
                than the run's would be counted as what it is not, and is refused.
            examples: the size of the batch.
            in_loop: whether the step is one of Keras's loop.
        """
        skipping, paid = self._skip > 0, self._steps < self._limit
        known = (self._ticket == ticket) & (in_loop | tf.logical_not(self._in_loop))
        examples = tf.cast(examples, tf.int64)
        small, total = examples <= self._largest_batch, self._examples + examples
        few = (total <= self._pass_examples) | (self._steps >= self._pass_steps)
        expected = known & (paid | skipping | self._in_loop)

        def refuse():
            tf.debugging.Assert(expected, [_CLOSED])
            tf.debugging.Assert(small, [_TOO_LARGE, examples])
            tf.debugging.Assert(few, [_TOO_MANY, total])
            return False

        checked = tf.cond(expected & small & few, lambda: True, refuse)
        with tf.control_dependencies([checked]):
            self._skip.assign_sub(tf.cast(skipping, tf.int64))
            may_run = checked & known & paid & tf.logical_not(skipping)
            self._examples.assign_add(tf.where(may_run, examples, tf.zeros_like(examples)))
            return may_run

    def count(self) -> tf.Tensor:
        """Counts a step; in the graph, before its update."""
        return tf.convert_to_tensor(self._steps.assign_add(1))

    def __deepcopy__(self, memo):
        return Meter()

    def __reduce__(self):
        return Meter, ()


def _value(variable):
    """A variable's value, also while a graph is built, as when a model is saved."""
    with context.eager_mode():
        return int(variable)
