"""Puts each mutant into a copy of the package, and runs the tests that should find it out.

    python tests/mutants/run.py [WORD ...] [--output docs/mutants.md] [--jobs 2]

A mutant is killed if a test fails, and survives if all pass. WORDs select mutants by their bug. Exit status 1
if one survives, or its tests cannot run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from catalogue import MUTANTS, Mutant

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEAD = """\
# Mutants

Bugs that break privacy, put into the code one at a time by `make mutants`; each must turn a test red.

| bug | file | killed by |
|---|---|---|
"""


def mutated(mutant: Mutant, directory: pathlib.Path) -> None:
    """Copies the package and its tests, with the mutant in them.

    Raises:
        ValueError: if the text to replace does not occur exactly once.
    """
    for name in ("dp2_keras", "tests"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", directory)
    (directory.parent / "shared").symlink_to(ROOT.parent / "shared")
    file = directory / "dp2_keras" / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"The text of {mutant.bug!r} must occur once in {mutant.file}.")
    file.write_text(text.replace(mutant.old, mutant.new))


def fate(mutant: Mutant) -> str | None:
    """The name of the first test that fails; None if all pass.

    Raises:
        RuntimeError: if the tests cannot run.
    """
    with tempfile.TemporaryDirectory() as directory:
        copy = pathlib.Path(directory, "copy")
        mutated(mutant, copy)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *mutant.tests.split(),
        ]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) \S*?(\w+\.py(?:::\S+)?)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or not found:
        raise RuntimeError(
            f"The tests of {mutant.bug!r} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return found[1]


def main() -> int:
    """Runs the mutants, prints the table, and says whether all were killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if all(word in m.bug for word in args.words)]
    lines, survivors = [], 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for mutant, killer in zip(chosen, pool.map(fate, chosen)):
            survivors += killer is None
            lines.append(f"| {mutant.bug} | {mutant.file} | {killer or '**survives**'} |")
            print(lines[-1], flush=True)
    summary = f"{len(chosen) - survivors} of {len(chosen)} killed."
    print(summary)
    if args.output is not None:
        args.output.write_text(HEAD + "\n".join(lines) + f"\n\n{summary}\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
