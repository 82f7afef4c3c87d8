"""Writes what was measured: python benchmarks/report.py results.json docs/benchmarks.md

The figure of growth goes beside the document, under the same name.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys

import contenders
import growth
import targets
import workloads

METHOD = """\
One process for each contender trains the same made-up data at the same batch size. The processes of a
workload are alive at once and take turns, {rounds} each, after they have compiled and warmed up (160
steps, or five seconds); so a slow minute of the machine slows all of them. A turn has epochs of 20 steps,
of which the first 5 are not timed, until half a second is timed. Epochs of contenders that are slow on
some workload have 4 steps there, the first not timed. Those marked * ran alone, in such epochs, so that
their memory was no one else's.

Figures are medians over turns, with quartiles in brackets. A step ends when its parameters are new, and
it includes taking the batch from the data, which Keras and this package do ahead, in other threads. Peak
memory is that of the whole process: interpreter, libraries and data are in it. Ratios are to plain Keras
on the same workload. Noise multiplier and clip are 1. This package draws Poisson batches, whose sizes
vary about the batch size; the others get exactly that many rows. TF Privacy, Opacus and jax-privacy
update by plain SGD, the cheapest rule. TF Privacy runs on TensorFlow 2.14, and its ratios too are to
Keras 3 on the modern stack."""


def document(results, figure):
    """The whole document."""
    parts = [
        *("# Benchmarks", "## How it was measured", METHOD.format(**results), about(results["machine"])),
        table(["environment", "versions"], version_rows(results["versions"])),
        *("## Contenders", contender_table(), "## Time and memory"),
        *(part for name, words in families() for part in family(results["workloads"], name, words)),
        *(
            "## Targets",
            targets.WORDS,
            table(targets.HEAD, targets.rows(results["workloads"])),
            targets.PROFILE,
        ),
        *("## Parts", PARTS, *(f"```\n{text.strip()}\n```" for text in results["parts"].values())),
        *("## Growth", GROWTH, f"![Time and memory against size]({figure})"),
        table(["contender", *growth.COLUMNS], growth.exponent_rows(results["workloads"])),
        table(growth.INCREMENT_COLUMNS, growth.increment_rows(results["workloads"])),
        *failures(results["workloads"], workloads.GROWTH),
    ]
    return "\n\n".join(parts) + "\n"


GROWTH = """\
One size is doubled four times: the width of a square Dense layer (batch 64), its batch (width 1,024), and
the length of the sequences of W5 (batch 32). Below the figure are the exponents p of size^p, fitted to
the three largest sizes: 1 is a doubling for a doubling, and 2 in the width is linear in the weights,
which are its square. Attention itself takes time with the square of the length. Memory includes what
every process needs, which makes exponents small; the last column of the second table shows what the last
doubling added, beside what a gradient for each example would add. It is a sum, of activations and
weights, not a product."""


PARTS = """\
What noise costs, outside XLA and inside; then what sampling and accounting cost beside the cheapest step
there is. So XLA compiles the clipped sum where `jit_compile=True` asks for it, and never the noise: its words
of 64 bits come faster inside, but the transform takes twice as long, and a small draw a call of its own."""


def about(machine):
    """One line about the machine."""
    return "Machine: {cpu}, {cores} cores, {memory_gb} GB, no GPU; {date}. Commit {commit}.".format(**machine)


def table(head, rows):
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def version_rows(versions):
    """A row for each environment: its packages and their versions."""
    for name, packages in versions.items():
        yield name, ", ".join(f"{package} {version}" for package, version in packages.items())


def contender_table():
    """How each contender is called."""
    rows = ([f"`{c.name}`", c.environment, c.algorithm, c.call] for c in contenders.CONTENDERS)
    return table(["contender", "environment", "a step", "how it is called"], rows)


def families():
    """Names and words of the workloads W1 to W5, as workloads.py lists them."""
    return re.findall(r"\| (W\d) \| (.+?) \|", workloads.__doc__)


def family(measured, name, words):
    """The heading, the table and the failures of workloads that differ in batch size."""
    yield f"### {name}: {words}"
    cases = [(w, c) for w in workloads.MAIN for c in contenders.CONTENDERS if w.name.startswith(name)]
    cases = [(w, c, measured[w.name][c.name]) for w, c in cases if c.name in measured.get(w.name, {})]
    rows = [row(w, c, entry, measured[w.name].get("keras", {})) for w, c, entry in cases]
    yield table(["contender", "batch", "ms a step", "ratio", "peak MB", "ratio"], rows)
    yield from failures(measured, [w for w in workloads.MAIN if w.name.startswith(name)])


def failures(measured, chosen):
    """A list of what failed, and with which words."""
    errors = [
        (n, w.name, e["error"]) for w in chosen for n, e in measured.get(w.name, {}).items() if "error" in e
    ]
    if errors:
        yield "\n".join(f"- `{name}` fails on {workload}: {error}" for name, workload, error in errors)


def row(workload, contender, entry, floor):
    """A contender's row of a table."""
    star = "*" if workload.name in contender.heavy else ""
    head = [f"`{contender.name}`{star}", str(workload.batch_size)]
    if "error" in entry:
        return [*head, "fails", "", "", ""]
    time = "{} ({}–{})".format(*(digits(entry[key]) for key in ("ms", "ms_low", "ms_high")))
    return [
        *head,
        time,
        ratio(entry, floor, "ms"),
        f"{entry['peak_mb']:,.0f}",
        ratio(entry, floor, "peak_mb"),
    ]


def ratio(entry, floor, key):
    """How many times the floor."""
    return f"{entry[key] / floor[key]:.2f}" if key in floor else ""


def digits(value):
    """A number with three digits that count."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def main(source, target):
    results = json.loads(source.read_text())
    figure = target.with_suffix(".png")
    growth.plot(results["workloads"], figure)
    target.write_text(document(results, figure.name))


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
