"""The command: `dp2 reproduce`, or `python -m dp2_keras.experiments`.

    dp2 reproduce --table main --quick                          # minutes, without data
    dp2 reproduce --table main --data DIR                       # the paper's hyper-parameters
    dp2 reproduce --table main --data DIR --search 60 --refine 12    # every method tuned alike
    dp2 reproduce --list

Called again, it goes on where it was stopped; when all is done it only writes the report anew.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from dp2_keras.experiments import configuration as configurations
from dp2_keras.experiments import methods, tasks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--table", nargs="+", default=[], choices=configurations.names("table"))
    parser.add_argument("--figure", nargs="+", default=[], choices=configurations.names("figure"))
    parser.add_argument("--all", action="store_true", help="every table and figure")
    parser.add_argument("--list", action="store_true", help="say what there is, and stop")
    parser.add_argument("--quick", action="store_true", help="small runs on synthetic data, for a look")
    parser.add_argument(
        "--data", metavar="DIR", help="imdb.npz, movielens-100k/u.data, stackoverflow.npz, mnist.npz"
    )
    parser.add_argument("--out", metavar="DIR", default="results", help="default: %(default)s")
    parser.add_argument("--search", metavar="N", type=int, default=0, help="tune each method by N runs")
    parser.add_argument(
        "--refine",
        metavar="R",
        type=int,
        default=0,
        help="and R more around the best, then up to 8 past ends",
    )
    parser.add_argument("--halving", action="store_true", help="the worse candidates do not run to the end")
    parser.add_argument("--seeds", type=int, help="instead of the configuration's")
    parser.add_argument("--epochs", type=int, help="instead of the configuration's")
    parser.add_argument("--jobs", type=int, help="processes (default: one for each core)")
    parser.add_argument("--tasks", nargs="+", choices=tuple(tasks.TASKS), metavar="TASK")
    parser.add_argument("--methods", nargs="+", choices=tuple(methods.METHODS), metavar="METHOD")
    parser.add_argument("--retry-failed", action="store_true", help="run again what failed")


def run(arguments: argparse.Namespace) -> str:
    """Does what the options say.

    Returns:
        What to print.

    Raises:
        ValueError: for a value out of range, or if nothing is asked for.
    """
    if arguments.list:
        return _listing()
    names = configurations.names() if arguments.all else [*arguments.table, *arguments.figure]
    if not names:
        raise ValueError("Nothing to do: give --table, --figure, --all or --list.")
    from dp2_keras.experiments.reproduce import Options, reproduce

    shared = ("out", "data", "jobs", "search", "refine", "halving", "seeds", "epochs", "retry_failed")
    options = Options(**{name: getattr(arguments, name) for name in shared})
    for name in names:
        chosen = configurations.load(name, arguments.quick).only(arguments.tasks, arguments.methods)
        if chosen.cases:
            reproduce(chosen, options)
    return _outcome(os.path.join(arguments.out, "report.md"))


def _listing():
    lines = []
    for name in configurations.names():
        found = configurations.document(name)
        lines.append(f"--{found['kind']} {name:<16} {found['title']} ({found['source']})")
    lines += ["", f"tasks:   {' '.join(tasks.TASKS)}", f"methods: {' '.join(methods.METHODS)}"]
    return "\n".join(lines)


def _outcome(path):
    if not os.path.exists(path):
        return "Nothing of it concerns these tasks and methods."
    with open(path, encoding="utf-8") as file:
        tables = [line for line in file.read().splitlines() if line.startswith(("##", "|"))]
    return "\n".join([*tables, "", f"Report: {path}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `python -m dp2_keras.experiments`: `dp2 reproduce` by its other name.

    Args:
        argv: the arguments. Defaults to those of the process.

    Returns:
        The exit status.
    """
    import sys

    from dp2_keras import cli

    return cli.main(["reproduce", *(sys.argv[1:] if argv is None else argv)])
