"""Runs, side by side in worker processes.

A worker has its share of the threads, keeps the data of its tasks in memory, and runs one run after
another. The parent alone writes rows. Every run leaves 20 to 60 MB behind that nothing frees, so workers are
replaced after a while. They end with the parent, however it ends. A few runs with one job need no worker:
they are the parent's own.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import logging
import multiprocessing
import os
import random
import threading
from collections.abc import Iterable

from dp2_keras import _checks
from dp2_keras.experiments import tasks
from dp2_keras.experiments.progress import Progress
from dp2_keras.experiments.runs import Run
from dp2_keras.experiments.store import Store

_RUNS_PER_WORKER = 40


def execute(
    runs: Iterable[Run],
    store: Store,
    directory: str | None = None,
    *,
    jobs: int | None = None,
    retry_failed: bool = False,
    stream=None,
) -> int:
    """Runs what has no row yet, and adds its row.

    Args:
        runs: what is wanted; twins run once.
        store: where the rows are, open.
        directory: where the data is.
        jobs: how many processes. Defaults to the number of cores.
        retry_failed: run again what failed.
        stream: where progress is shown. Defaults to stderr.

    Returns:
        How many runs ran.

    Raises:
        ValueError: for a value out of range.
        RuntimeError: if a worker was killed. Rows that were added stay.
    """
    jobs = os.cpu_count() if jobs is None else jobs
    _checks.positive_integer(jobs=jobs)
    wanted = {run.key: run for run in runs}
    missing = [run for key, run in wanted.items() if not store.has(key, retry_failed)]
    random.Random(0).shuffle(missing)  # So that the time left is known early.
    with Progress(len(missing), sum(map(_work, missing)), stream) as progress:
        for run, row in _rows(missing, directory, min(jobs, len(missing))):
            store.add(row)
            progress.add(_work(run), failed=row["status"] == "failed")
    return len(missing)


def _rows(runs, directory, jobs):
    """Pairs of a run and its row, as they come."""
    if jobs <= 1 and len(runs) <= _RUNS_PER_WORKER:
        yield from ((run, _train(run, directory)) for run in runs)
        return
    wave = jobs * _RUNS_PER_WORKER
    for first in range(0, len(runs), wave):
        yield from _in_workers(runs[first : first + wave], directory, jobs)


def _in_workers(runs, directory, jobs):
    context = multiprocessing.get_context("spawn")  # TensorFlow does not survive a fork.
    share = (max(1, (os.cpu_count() or 1) // jobs),)
    with concurrent.futures.ProcessPoolExecutor(jobs, context, _begin, share) as pool:
        futures = {pool.submit(_train, run, directory): run for run in runs}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except concurrent.futures.process.BrokenProcessPool as error:
            raise RuntimeError(
                "A worker process was killed, perhaps for want of memory. The rows so far are kept: call "
                "again, with fewer `jobs` if it happens again."
            ) from error
        finally:  # Also when the parent is interrupted: what has not begun does not begin.
            pool.shutdown(wait=False, cancel_futures=True)


def _begin(threads):
    """A worker's first act, before TensorFlow is loaded."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def _end_with_parent():
    """A parent that is killed cannot tell its workers, and they would run what they have been given."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _train(run, directory):
    from dp2_keras.experiments import training

    # The accountant says in every run which orders it leaves out; epsilon is a bound without them, too.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return training.train(run, directory)


def _work(run):
    """Epochs cost more in small batches."""
    size = max(tasks.get(run.task).batch_size, run.batch_size)
    return run.epochs * (1.0 + 500.0 / size)
