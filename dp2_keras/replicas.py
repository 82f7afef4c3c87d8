"""One step on many devices: the replicas of a `tf.distribute` strategy.

    sum_i clip(S g_i, C) = sum over replicas k of  sum_{i in share k} clip(S g_i, C)

Keras calls the train step once for each replica. Here all of them meet, and the step runs a single time: a
replica is a device on which a share of the batch is clipped and summed. Whatever a step does once on one
device, it so does once on many: it asks the gate, is counted, draws noise, moves the weights.

Several workers are processes that each run this for the replicas of their own. Their sums are added up after
the first one, the chief, has put the noise into its own:

    g~ = ( sum_w (sum of worker w + N(0, (sigma C)^2 I) [w = chief]) ) / B
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dp2_keras import _keras


@dataclasses.dataclass(frozen=True)
class Share:
    """What one replica has of a step.

    Attributes:
        data: its examples, (x, y, sample_weight).
        number: of the replica, among those of all workers.
        strategy: the strategy that the replica is one of; None if there is only one replica.
        device: where its part of the work is done.
    """

    data: Any
    number: int = 0
    strategy: tf.distribute.Strategy | None = None
    device: str | None = None

    def run(self, function: Callable, *args):
        """Calls the function as the replica: on its device, with its copies of the variables."""
        with self._place():
            return function(*args)

    @contextlib.contextmanager
    def _place(self):
        if self.strategy is None:
            yield
            return
        replica = tf.distribute.ReplicaContext(self.strategy, self.number)
        with replica, tf.device(self.device), _keras.whole_losses():
            yield


def meet(step: Callable[[Sequence[Share]], Any], data: Any):
    """Runs a step once for all replicas of this process; Keras has called each of them with its own data.

    Args:
        step: of the shares; it runs where all replicas' variables can be written at once.
        data: (x, y, sample_weight) of this replica.

    Returns:
        What the step returns.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return step([Share(data)])
    together = lambda strategy, data: step(_shares(strategy, data))  # noqa: E731
    return tf.distribute.get_replica_context().merge_call(together, args=(data,))


def _shares(strategy, data):
    numbers, devices = local_numbers(strategy), strategy.extended.worker_devices
    return [
        Share(_local(strategy, data, k), n, strategy, d) for k, (n, d) in enumerate(zip(numbers, devices))
    ]


def _local(strategy, data, index):
    """The data of one of this worker's replicas, from that of all of them."""
    one = lambda part: None if part is None else strategy.experimental_local_results(part)[index]  # noqa: E731
    return tf.nest.map_structure(one, data)


def local_numbers(strategy: tf.distribute.Strategy) -> range:
    """The numbers of this worker's replicas, among those of all workers."""
    if strategy.num_replicas_in_sync == 1:
        return range(1)
    first = strategy.extended._get_replica_id_in_sync_group(0)
    return range(first, first + len(strategy.extended.worker_devices))


def worker_count(strategy: tf.distribute.Strategy) -> int:
    """How many processes share the steps."""
    return strategy.num_replicas_in_sync // len(local_numbers(strategy))


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this is the worker that adds the noise, and writes the ledger file."""
    return local_numbers(strategy)[0] == 0


def sum_over_workers(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums of each tensor over all workers, of which every one must call this; one worker's are its own."""
    strategy = tf.distribute.get_strategy()
    if worker_count(strategy) == 1:
        return list(tensors)
    return [strategy.reduce("SUM", _of_worker(strategy, t), axis=None) for t in tensors]


def added_up(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums over all workers, one of which has put noise into its values.

    In float32, which the noise is made in: of a longer sum, the last bits would stay as the others had them.
    """
    if worker_count(tf.distribute.get_strategy()) == 1:
        return list(values)
    sums = sum_over_workers([tf.cast(value, tf.float32) for value in values])
    return [tf.cast(total, value.dtype) for total, value in zip(sums, values)]


def _of_worker(strategy, tensor):
    """A worker's tensor, as a value of its replicas: the first has it, and the others nothing."""
    first = local_numbers(strategy)[0]
    tensor = tf.convert_to_tensor(tensor)
    return strategy.experimental_distribute_values_from_function(
        lambda replica: tensor if replica.replica_id_in_sync_group == first else tf.zeros_like(tensor)
    )


def all_agree(decision: tf.Tensor) -> tf.Tensor:
    """Whether all workers decide so; a step that only some of them took would wait for ever for the rest."""
    workers = worker_count(tf.distribute.get_strategy())
    if workers == 1:
        return decision
    (votes,) = sum_over_workers([tf.cast(decision, tf.int32)])
    return tf.equal(votes, workers)


def check_one(strategy: tf.distribute.Strategy, what: str) -> None:
    """Refuses several replicas, where nothing says how they share a batch out.

    Args:
        strategy: the model's.
        what: what must be used with one.

    Raises:
        ValueError: if there are several.
    """
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            f"{what} must be used with one replica: train several with `fit` on arrays, whose batches it "
            f"shares out. Received: {strategy.num_replicas_in_sync} replicas"
        )


def check_one_worker(strategy: tf.distribute.Strategy, what: str) -> None:
    """Refuses several workers, where what one does depends on what the others do.

    Args:
        strategy: the model's.
        what: what must be used with one.

    Raises:
        ValueError: if there are several.
    """
    if worker_count(strategy) > 1:
        raise ValueError(f"{what} must be used with one worker. Received: {worker_count(strategy)} workers")


_KINDS = (
    "_DefaultDistributionStrategy",
    "OneDeviceStrategy",
    "MirroredStrategy",
    "CollectiveAllReduceStrategy",
)


def check_strategy(strategy: tf.distribute.Strategy, optimizer) -> None:
    """Refuses what would not train, or not as stated.

    Raises:
        ValueError: names what to do instead.
    """
    if not any(kind.__name__ in _KINDS for kind in type(strategy).__mro__):
        raise ValueError(
            "The strategy must be a MirroredStrategy or a MultiWorkerMirroredStrategy, under which all "
            f"replicas take the same steps. Received: {type(strategy).__name__}"
        )
    if worker_count(strategy) == 1:
        return
    if not _keras.FITS_ON_WORKERS:
        raise ValueError(
            "Keras 3 cannot `fit` under a MultiWorkerMirroredStrategy: train with one process and a "
            "MirroredStrategy, or with TensorFlow 2.14 and Keras 2. Received: "
            f"{worker_count(strategy)} workers"
        )
    if optimizer.public_gradients is not None:
        check_one_worker(
            strategy, f"{type(optimizer).__name__}, whose public rows each would draw by itself,"
        )
    if optimizer.noise == "secure":
        check_one_worker(strategy, '`noise="secure"`, on whose grid the sum of several would not be,')


def check_same(strategy: tf.distribute.Strategy, facts: Callable[[], Any]) -> None:
    """Refuses workers that are not about to do the same; every one of them must call this.

    Args:
        strategy: the model's.
        facts: gives what must be the same everywhere; its `repr` counts.

    Raises:
        ValueError: if one of the others has other facts.
    """
    if worker_count(strategy) == 1:
        return
    facts = repr(facts())
    digest = int.from_bytes(hashlib.sha256(facts.encode()).digest()[:5], "big")
    with strategy.scope():
        (total,) = sum_over_workers([tf.constant(digest, tf.int64)])
    if int(total) != digest * worker_count(strategy):
        raise ValueError(
            "All workers must have the same arrays, optimizer, arguments of `fit` and history (with a ledger "
            f"file, that of the chief). Received, here: {facts[:1000]}"
        )
