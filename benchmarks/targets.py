"""What a step should cost, what it does, and where the time goes that is too much."""

from __future__ import annotations

PHASES = ("dp2-sgd", "dp2-adaptive")
MOST_MEMORY = 1.3
# Of each workload: the most time to plain Keras's, and the least of jax-privacy's time to ours in DP².
LIMITS = {
    "W1-64": (1.5, 3),
    "W1-1024": (1.5, 3),
    "W2-64": (3.0, 10),
    "W2-256": (3.0, 10),
    "W3-64": (1.5, 10),
    "W3-1024": (1.5, 10),
    "W4-250": (1.5, 2),
    "W5-64": (1.5, 10),
}
HEAD = [
    "workload",
    "time to Keras's",
    "at most",
    "memory to Keras's",
    "at most",
    "`jax-privacy-scaled` to ours",
    "at least",
    "`opacus-ghost` to ours",
    "at least",
]
WORDS = """\
SGD phase, then adaptive phase. What misses its target is bold."""

# By TensorFlow's profiler, and by taking parts out; of the machine above.
PROFILE = """\
Where the time goes:

- W1 at batch 64 is fixed cost. A hand-written step with the same arithmetic takes 1.1 (SGD phase) and 1.4
  (adaptive phase) of Keras's time; the rest, about 0.6 ms, is some 300 small operations to Keras's 80.
  The loss of each example by itself takes 0.1 to 0.2 ms of it, drawing the batch 0.1, then gate, phases,
  diagnostics.
- W1 at batch 1024, adaptive phase: the squares of the batch, 40 MB, are made once for the norms. Alone
  that takes 5.2 ms, and the norms of the SGD phase, which need no squares in memory, 1.7.
- W3 at batch 64 is noise: all 262,500 weights have it, while a batch has gradients for 12,800 at most.
  Words take 1.3 ms of CPU time, the transform 1.7.
- W4 is the gradients of its convolutions, which are made for each example: one convolution 8.3 ms,
  patches 4.8, products 3.7 and 3.7, in a profile of two threads beside other work, in which all
  operations took about 38.
- Memory of W5 is hardly arrays: it grows by 365 MB with the first step, and the distance to Keras is as
  large at a quarter of the length and half of the batch. The graph of the step has the clipped sum four
  times: with a scale and without, with all gradients in memory and in blocks.
- Memory of W3 at batch 1024 and of W4 also grows with the sizes of Poisson batches, no two of which are
  the same: by 139 and 252 MB over 400 and 280 steps, and by 45 and 167 with batches of one size.
- jax-privacy takes one example at a time, its fastest setting here: on small batches the loop is short."""


def rows(measured):
    """A row for each workload that was measured."""
    for name, (time, scaled) in LIMITS.items():
        if name in measured:
            yield _row(name, measured[name], time, scaled)


def _row(name, entries, time, scaled):
    ours, floor = [entries[phase] for phase in PHASES], entries["keras"]
    slower = entries["jax-privacy-scaled"]["ms"] / ours[1]["ms"]
    return [
        name,
        _pair([entry["ms"] / floor["ms"] for entry in ours], lambda x: x <= time),
        f"{time:g}",
        _pair([entry["peak_mb"] / floor["peak_mb"] for entry in ours], lambda x: x <= MOST_MEMORY),
        f"{MOST_MEMORY:g}",
        _marked(slower, lambda x: x >= scaled),
        f"{scaled:g}",
        _pair([entries["opacus-ghost"]["ms"] / entry["ms"] for entry in ours], lambda x: x >= 1),
        "1",
    ]


def _pair(values, is_met):
    return " / ".join(_marked(value, is_met) for value in values)


def _marked(value, is_met):
    return f"{value:.2f}" if is_met(value) else f"**{value:.2f}**"
