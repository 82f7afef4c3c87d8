"""Stack Overflow tag prediction as in the paper: 10,000 words, 500 tags, in one file that either stack reads.

    python examples/prepare_stackoverflow.py stackoverflow.npz
        # TFF downloads its data; 246,092 training and 61,719 test sentences are drawn

    python examples/prepare_stackoverflow.py stackoverflow.npz --csv questions.csv.gz --cache-dir substitute
        # without TFF's bucket: a CSV (split, title, body, tags) becomes a database in TFF's format, which
        # TFF's reader then reads; all its sentences, unless --num-train and --num-test say otherwise

It runs where TensorFlow Federated does: on the classic stack of BUILD.md.
"""

from __future__ import annotations

import argparse
import inspect
import time

from dp2_keras import data

PAPER = inspect.signature(data.prepare_stackoverflow).parameters
SIZES = ("num_train", "num_test")


def main(argv: list[str] | None = None) -> None:
    """Prepares the file, and prints what is in it."""
    arguments = parse(argv)
    started = time.perf_counter()
    counts = {}
    if arguments.csv:
        built = data.build_tff_database(arguments.csv, arguments.cache_dir)
        print(f"{arguments.cache_dir}: {built} in {time.perf_counter() - started:.1f} s")
        counts = dict(zip(("word_counts", "tag_counts"), data.read_tff_counts(arguments.cache_dir)))
    started = time.perf_counter()
    options = ("cache_dir", "num_words", "num_tags", "max_per_client", "seed", *SIZES)
    chosen = {name: getattr(arguments, name) for name in options}
    metadata = data.prepare_stackoverflow(arguments.out, **chosen, **counts)
    print(f"{arguments.out}: {metadata} in {time.perf_counter() - started:.1f} s")
    for name, (x, y) in zip(("train", "test"), data.stackoverflow(arguments.out)):
        print(f"{name}: x {x.shape}, {x.nnz:,} words; {len(set(y))} classes")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; without a CSV the numbers of sentences are the paper's."""
    parser = argparse.ArgumentParser(description="Prepares Stack Overflow tag prediction.")
    parser.add_argument("out", help="the file to write")
    parser.add_argument("--cache-dir", help="where TFF keeps its files; with --csv a new directory")
    parser.add_argument("--csv", help="questions from which to make a substitute for TFF's data")
    parser.add_argument("--num-words", type=int, default=PAPER["num_words"].default)
    parser.add_argument("--num-tags", type=int, default=PAPER["num_tags"].default)
    parser.add_argument("--num-train", type=int, help="default: the paper's, or with --csv all")
    parser.add_argument("--num-test", type=int, help="default: the paper's, or with --csv all")
    parser.add_argument("--max-per-client", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.csv and not arguments.cache_dir:
        parser.error("--csv needs --cache-dir: a directory for the substitute alone")
    for name in SIZES:
        if getattr(arguments, name) is None and not arguments.csv:
            setattr(arguments, name, PAPER[name].default)
    return arguments


if __name__ == "__main__":
    main()
