"""What is trained: sizes and made-up data, in NumPy alone, so that every environment trains the same.

| name | model | batch sizes |
|---|---|---|
| W1 | logistic regression 10,000 -> 1, 130 non-zeros a row | 64, 1024 |
| W2 | softmax regression 10,000 -> 500, 20 non-zeros a row | 64, 256 |
| W3 | matrix factorisation, 944 x 100 and 1,683 x 100 | 64, 1024 |
| W4 | the CNN of TF Privacy's tutorial on 28 x 28 images | 250 |
| W5 | embedding 20,000 x 64, 128 tokens, one transformer block | 64 |

Growth doubles one size four times: the width and the batch of a Dense layer, the length of W5.
"""

from __future__ import annotations

import dataclasses

import numpy as np

WORDS, USERS, ITEMS, FACTORS, TOKENS = 10_000, 944, 1683, 100, 20_000


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its data and its batch size.

    Attributes:
        name: the row of the table.
        model: "linear", "factors", "cnn", "transformer" or "dense".
        batch_size: examples in a step.
        size: what the model leaves open: units of "linear", the length of "transformer",
            the width of "dense".
        nonzeros: words of a row of "linear".
    """

    name: str
    model: str
    batch_size: int
    size: int = 0
    nonzeros: int = 0

    def data(self, steps: int = 20):
        """Features and labels of that many batches."""
        rng = np.random.default_rng(0)
        return _DATA[self.model](self, rng, self.batch_size * steps)


def _linear(workload, rng, rows):
    x = np.zeros((rows, WORDS), np.float32)
    x[np.arange(rows)[:, None], rng.integers(0, WORDS, (rows, workload.nonzeros))] = 1.0
    if workload.size == 1:
        return x, rng.integers(0, 2, (rows, 1)).astype(np.float32)
    return x, rng.integers(0, workload.size, rows).astype(np.int32)


def _factors(workload, rng, rows):
    users, items = (rng.integers(0, n, (rows, 1)).astype(np.int32) for n in (USERS, ITEMS))
    return (users, items), rng.uniform(1, 5, (rows, 1)).astype(np.float32)


def _cnn(workload, rng, rows):
    return rng.uniform(size=(rows, 28, 28, 1)).astype(np.float32), rng.integers(0, 10, rows).astype(np.int32)


def _transformer(workload, rng, rows):
    # Words are as frequent as in text: the r-th one in proportion to 1 / r.
    tokens = np.floor(TOKENS ** rng.uniform(size=(rows, workload.size))).astype(np.int32) - 1
    return tokens, rng.integers(0, 2, (rows, 1)).astype(np.float32)


def _dense(workload, rng, rows):
    return rng.normal(size=(rows, workload.size)).astype(np.float32), rng.normal(
        size=(rows, workload.size)
    ).astype(np.float32)


_DATA = {"linear": _linear, "factors": _factors, "cnn": _cnn, "transformer": _transformer, "dense": _dense}

MAIN = [
    *(Workload(f"W1-{n}", "linear", n, 1, 130) for n in (64, 1024)),
    *(Workload(f"W2-{n}", "linear", n, 500, 20) for n in (64, 256)),
    *(Workload(f"W3-{n}", "factors", n) for n in (64, 1024)),
    Workload("W4-250", "cnn", 250),
    Workload("W5-64", "transformer", 64, 128),
]
GROWTH = [
    *(Workload(f"width-{n}", "dense", 64, n) for n in (256, 512, 1024, 2048, 4096)),
    *(Workload(f"batch-{n}", "dense", n, 1024) for n in (64, 128, 256, 512, 1024)),
    *(Workload(f"length-{n}", "transformer", 32, n) for n in (32, 64, 128, 256, 512)),
]
WORKLOADS = {w.name: w for w in (*MAIN, *GROWTH)}
