"""What the arguments of `fit` mean: which batches, how many steps, and what the ledger is told.

    arrays                          Poisson batches of rate B / n, n // B of them in an epoch
    arrays, sampling="shuffle"      Keras's own batches, priced by what is proved for them
    batches of `poisson_batches`    as they say themselves
    the user's batches              n must be said; shuffled, unless declared Poisson

n is counted after `validation_split`; it is public, and nothing else here depends on the data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dp2_keras import _checks, replicas
from dp2_keras.account import Budget
from dp2_keras.entries import Entry, Mechanism, PoissonSampling, ShuffledSampling
from dp2_keras.ledger import Ledger
from dp2_keras.rows import Rows, is_arrays
from dp2_keras.sampling import PoissonSampler, dataset_of, known_sampling

KERAS_BATCH_SIZE = 32


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of `fit` that are not Keras's; see `AccountedTraining.fit`."""

    sampling: str | None = None
    dataset_size: int | None = None
    max_batch_size: int | None = None
    assume_poisson: bool = False

    def __post_init__(self):
        if self.sampling is not None:
            _checks.one_of(("poisson", "shuffle"), sampling=self.sampling)
        for name in ("dataset_size", "max_batch_size"):
            if getattr(self, name) is not None:
                _checks.positive_integer(**{name: getattr(self, name)})
        _checks.boolean(assume_poisson=self.assume_poisson)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a fit will do.

    Attributes:
        arguments: for Keras's own `fit`.
        sampling: what the ledger is told of each epoch.
        steps_per_epoch: how many steps an epoch has at most; None if only the data can tell.
    """

    arguments: dict[str, Any]
    sampling: PoissonSampling | ShuffledSampling
    steps_per_epoch: int | None

    @property
    def steps(self) -> int | None:
        """How many steps there are from the first epoch to the last, those of an earlier fit included."""
        return self.steps_per_epoch and max(1, self.arguments["epochs"]) * self.steps_per_epoch

    @property
    def passed(self) -> int:
        """How many of them an earlier fit took."""
        return self.arguments["initial_epoch"] * (self.steps_per_epoch or 0)

    def paid_steps(self, budget: Budget, ledger: Ledger, mechanism: Mechanism, passed: int) -> int | None:
        """How many of the steps there will be, if the budget ends them or not.

        Args:
            budget: what may be spent.
            ledger: what was spent, on the steps that have passed too.
            mechanism: of the steps to come.
            passed: how many of the steps were taken, by an earlier fit or by one that is resumed.
        """
        if self.steps is None:
            return None
        paid = budget.allowed_steps(ledger, mechanism, self.sampling, max(self.steps - passed, 1))
        return passed + max(paid, 1)  # Without a step to pay, the fit is refused.

    def entry(self, mechanism) -> Entry:
        """All steps of the fit, for calibration.

        Raises:
            ValueError: if the number of steps is not known.
        """
        if self.steps_per_epoch is None:
            raise ValueError(
                '`steps_per_epoch` must be given for `noise_multiplier="auto"`, which is calibrated to the '
                "number of steps. Received: steps_per_epoch=None"
            )
        epochs = max(1, self.arguments["epochs"] - self.arguments["initial_epoch"])
        passes = self.sampling.passes(self.steps_per_epoch)
        return Entry(mechanism, self.sampling, epochs * self.steps_per_epoch, passes and epochs * passes)


def plan(
    arguments: dict[str, Any],
    request: Request,
    optimizer,
    first_step: Callable[[], int],
    keeps_sparse: bool = False,
    strategy: tf.distribute.Strategy | None = None,
) -> Plan:
    """Decides how a fit is sampled.

    Args:
        arguments: of Keras's `fit`, by name, all of them.
        request: those that are not Keras's.
        optimizer: for `expected_batch_size` and the seed.
        first_step: says from which step the sampler goes on, whenever an iteration starts.
        keeps_sparse: whether the model takes sparse rows as they are.
        strategy: the model's, which may have several replicas. Defaults to TensorFlow's for one.

    Returns:
        The `Plan`.

    Raises:
        ValueError: for arguments that contradict each other, or that say too little.
    """
    strategy = strategy or tf.distribute.get_strategy()
    known = known_sampling(arguments["x"])
    if known is not None:
        replicas.check_one(strategy, "Batches of `poisson_batches`")
        return _known_batches(arguments, request, known)
    are_arrays = is_arrays((arguments["x"], arguments["y"], arguments["sample_weight"]))
    if not are_arrays or request.sampling == "shuffle":
        replicas.check_one_worker(strategy, "Batches that are not drawn by this package from arrays")
    if not are_arrays:
        return _own_batches(arguments, request, optimizer, strategy)
    if request.dataset_size is not None:
        rule = "left to the arrays, whose length it is"
        _checks.fail(rule, dataset_size=request.dataset_size)
    if request.sampling == "shuffle":
        return _keras_batches(arguments, request, optimizer)
    return _poisson_batches(arguments, request, optimizer, first_step, keeps_sparse, strategy)


def _poisson_batches(arguments, request, optimizer, first_step, keeps_sparse, strategy):
    if arguments["shuffle"] is False:
        rule = 'left out with Poisson sampling, or come with `sampling="shuffle"` to keep Keras\'s batches'
        _checks.fail(rule, shuffle=False)
    _refuse_assumption(request)
    rows, validation = _split(arguments, keeps_sparse)
    size, n = _batch_size(arguments, optimizer, len(rows)), len(rows)
    sampler = PoissonSampler(n, size, max_batch_size=request.max_batch_size, seed=optimizer.noise_seed)
    steps = arguments["steps_per_epoch"] or n // size
    batches = _shared_out(strategy, rows, sampler, first_step)
    arguments = {**arguments, **validation, "x": batches, "y": None, "sample_weight": None}
    arguments.update(batch_size=None, steps_per_epoch=steps, shuffle=False)
    seeded = optimizer.noise_seed is not None
    return Plan(arguments, PoissonSampling(n, size, request.max_batch_size, seeded), steps)


def _shared_out(strategy, rows, sampler, first_step):
    """The batches of a sampler, in each step one for every replica."""
    count = strategy.num_replicas_in_sync
    if count == 1:
        return dataset_of(rows, sampler, first_step)
    local = replicas.local_numbers(strategy)
    if sampler.max_batch_size is not None:
        replicas.check_one_worker(strategy, "`max_batch_size`, which each would keep to by itself,")
    return strategy.distribute_datasets_from_function(
        lambda _: dataset_of(rows, sampler, first_step, replicas=local, of=count)
    )


def _keras_batches(arguments, request, optimizer):
    _refuse_truncation(request)
    n = _training_rows(len(Rows.of((arguments["x"],))), arguments)
    size = _batch_size(arguments, optimizer, n)
    ordered = arguments["shuffle"] is False
    sampling = ShuffledSampling(n, size, assume_poisson=request.assume_poisson, ordered=ordered)
    if request.assume_poisson and ordered:
        _checks.fail("True for `assume_poisson`: batches in a fixed order are not random", shuffle=False)
    arguments = {**arguments, "batch_size": size}
    return Plan(arguments, sampling, arguments["steps_per_epoch"] or sampling.steps_per_pass)


def _known_batches(arguments, request, known):
    drawn = Request("poisson", known.dataset_size, known.max_batch_size)
    for name, value in dataclasses.asdict(drawn).items():
        said = getattr(request, name)
        if said not in (None, value):
            _checks.fail(f"left out, or {value!r}, as the batches were drawn", **{name: said})
    return Plan(arguments, known, arguments["steps_per_epoch"] or _cardinality(arguments["x"]))


def _own_batches(arguments, request, optimizer, strategy):
    if request.dataset_size is None:
        raise ValueError(
            "`dataset_size` must be given where the batches are your own: epsilon depends on the number "
            "of training examples, which a data set or generator does not tell. Received: dataset_size=None"
        )
    steps = arguments["steps_per_epoch"] or _cardinality(arguments["x"])
    size = optimizer.expected_batch_size or _stated_batch_size(arguments)
    if size is None:
        raise ValueError(
            "`expected_batch_size` must be given to the optimizer where the batches are your own and of "
            "unknown size: the noisy sum is divided by a public number, not by how many examples came. "
            "Received: expected_batch_size=None"
        )
    stated = _stated_batch_size(arguments)
    if request.sampling == "poisson":
        _refuse_assumption(request)
        if stated is not None:
            rule = "left out for Poisson batches, whose sizes vary about `expected_batch_size`"
            _checks.fail(rule, batch_size=stated)
        n, truncation = request.dataset_size, request.max_batch_size
        return Plan(arguments, PoissonSampling(n, size, truncation, own_data=True), steps)
    _refuse_truncation(request)
    if size > request.dataset_size:
        _checks.fail("at most `dataset_size`", batch_size=size, dataset_size=request.dataset_size)
    if stated is not None and stated > size:
        _checks.fail("at least the size of the batches", expected_batch_size=size, batch_size=stated)
    sampling = ShuffledSampling(request.dataset_size, size, True, request.assume_poisson)
    if arguments["steps_per_epoch"] is not None or (steps or 0) > sampling.steps_per_pass:
        replicas.check_one(strategy, "Batches that go on from one epoch to the next")
        sampling = dataclasses.replace(sampling, streamed=True)
    return Plan(arguments, sampling, steps)


def _split(arguments, keeps_sparse):
    """The rows to train on, and the arguments for validation that take the others' place."""
    data = (arguments["x"], arguments["y"], arguments["sample_weight"])
    rows = Rows.of(data, keeps_sparse=keeps_sparse)
    held_out = arguments["validation_data"]
    change = {"validation_split": 0.0}
    if arguments["validation_split"] and held_out is None:
        rows, held_out = rows.split(_training_rows(len(rows), arguments))
        change["validation_data"] = held_out
    if held_out is not None and not isinstance(held_out, tf.data.Dataset):
        # Keras would take the batch size of training, which a data set of batches has none of.
        change["validation_batch_size"] = arguments["validation_batch_size"] or arguments["batch_size"]
    return rows, change


def _training_rows(count, arguments):
    """How many rows Keras leaves for training."""
    split = 0.0 if arguments["validation_data"] is not None else arguments["validation_split"]
    if not _checks.is_number(split) or not 0 <= split < 1 or math.floor(count * (1.0 - split)) < 1:
        _checks.fail("at least 0 and below 1, and leave an example to train on", validation_split=split)
    return math.floor(count * (1.0 - split))


def _batch_size(arguments, optimizer, n):
    size = arguments["batch_size"] or optimizer.expected_batch_size or KERAS_BATCH_SIZE
    _checks.positive_integer(batch_size=size)
    return min(int(size), n)  # As in Keras, more than there are is all there are.


def _stated_batch_size(arguments):
    if arguments["batch_size"] is not None:
        return arguments["batch_size"]
    if isinstance(arguments["x"], tf.data.Dataset):
        sizes = {spec.shape[0] for spec in tf.nest.flatten(arguments["x"].element_spec) if spec.shape.rank}
        return sizes.pop() if len(sizes) == 1 else None
    return None


def _cardinality(batches):
    """How many batches there are, where that is known."""
    if isinstance(batches, tf.data.Dataset):
        count = int(batches.cardinality())
        return count if count > 0 else None
    return len(batches) if hasattr(batches, "__len__") else None


def _refuse_truncation(request):
    if request.max_batch_size is not None:
        _checks.fail("left out unless the sampling is Poisson", max_batch_size=request.max_batch_size)


def _refuse_assumption(request):
    if request.assume_poisson:
        _checks.fail("left out where the batches *are* Poisson samples", assume_poisson=True)
