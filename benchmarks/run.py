"""Measures: python benchmarks/run.py [WORKLOAD ...] --environments DIR --output results.json

For each workload, one process for each contender, in that contender's own environment; they take
turns, so that a slow minute of the machine slows all of them. What the file already holds is not
measured again, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import tempfile
import threading

import contenders
import workloads

HERE = pathlib.Path(__file__).parent
SECONDS_TO_ANSWER = 15 * 60


class Failure(Exception):
    """A contender has died, or does not answer."""


class Process:
    """A contender that trains one workload, and waits for its turns."""

    def __init__(self, contender, workload, environments):
        self.timed_out = False
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        self.process = subprocess.Popen(
            [
                python(environments, contender.environment),
                HERE / contender.script,
                workload.name,
                contender.name,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "BENCH_STEPS": str(contender.steps(workload))},
        )

    def say(self, word):
        """Sends a word, and returns the answer to it."""
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failure(self.last_words()) from None
        return self.hear()

    def hear(self):
        """The next line meant for the runner."""
        timer = threading.Timer(SECONDS_TO_ANSWER, self.give_up)
        timer.start()
        answer = next((line for line in self.process.stdout if line.startswith("BENCH ")), None)
        timer.cancel()
        if answer is None:
            raise Failure(self.last_words())
        return json.loads(answer.removeprefix("BENCH "))

    def give_up(self):
        """Ends a process that does not answer."""
        self.timed_out = True
        self.process.kill()

    def last_words(self):
        """Why the process died: the first line of its last error."""
        code = self.process.wait()
        if self.timed_out:
            return f"no answer within {SECONDS_TO_ANSWER // 60} minutes"
        self.errors.seek(0)
        errors = [
            line for line in self.errors.read().splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)
        ]
        return errors[-1] if errors else f"exit code {code}"


class Run:
    """What one contender does with one workload: its times, its memory, or its error."""

    def __init__(self, contender, workload, environments):
        self.name, self.milliseconds, self.entry = contender.name, [], {}
        self.process = Process(contender, workload, environments)
        self.attempt(self.process.hear)

    def attempt(self, action, *arguments):
        """The answer to an action; {} where this contender has failed, now or before."""
        if "error" in self.entry:
            return {}
        try:
            return action(*arguments)
        except Failure as failure:
            self.entry = {"error": str(failure)}
            return {}

    def turn(self):
        """Lets the contender run its steps."""
        answer = self.attempt(self.process.say, "go")
        self.milliseconds += [1e3 * answer["seconds"]] if answer else []

    def end(self):
        """Ends the contender, and returns its entry."""
        answer = self.attempt(self.process.say, "end")
        self.process.process.kill()
        if answer:
            low, median, high = quartiles(self.milliseconds)
            self.entry = {"ms": median, "ms_low": low, "ms_high": high, "peak_mb": answer["peak_mb"]}
        return self.entry


def quartiles(values):
    """The three quartiles; of a single value, that value."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values


def python(environments, name):
    """The interpreter of an environment."""
    return environments / name / "bin" / "python"


def sittings(workload, names):
    """Contenders that are alive at once: the heavy ones one by one, after all others."""
    chosen = [c for c in contenders.CONTENDERS if c.runs(workload) and c.name in names]
    heavy = [c for c in chosen if workload.name in c.heavy]
    light = [c for c in chosen if c not in heavy]
    return [sitting for sitting in (light, *([contender] for contender in heavy)) if sitting]


def measured(sitting, workload, environments, rounds):
    """The entries of contenders that take turns."""
    runs = [Run(contender, workload, environments) for contender in sitting]
    for _ in range(rounds):
        for run in runs:
            run.turn()
    return {run.name: run.end() for run in runs}


def versions(environments, name, packages):
    """The versions of an environment's Python and packages."""
    code = (
        "import importlib.metadata, json, platform\n"
        f"packages = {{name: importlib.metadata.version(name) for name in {packages}}}\n"
        "print(json.dumps({'python': platform.python_version(), **packages}))"
    )
    return json.loads(subprocess.check_output([python(environments, name), "-c", code], text=True))


def printed(environments, script):
    """What a script of this directory prints, run by itself with the library's own environment."""
    return subprocess.check_output(
        [python(environments, "modern"), HERE / script], text=True, stderr=subprocess.DEVNULL
    )


def machine():
    """Where and when this runs."""
    models = re.findall(r"model name\s*: (.+)", pathlib.Path("/proc/cpuinfo").read_text())
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": models[0] if models else "unknown",
        "cores": os.cpu_count(),
        "memory_gb": round(pages / 2**30),
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.check_output(
            ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, text=True
        ).strip(),
    }


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(workloads.WORKLOADS)}"
    )
    parser.add_argument("--contenders", nargs="+", default=[c.name for c in contenders.CONTENDERS])
    parser.add_argument("--environments", type=pathlib.Path, default=pathlib.Path(".venv"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results.json"))
    parser.add_argument("--again", action="store_true", help="measure what the file already holds")
    return parser.parse_args()


def main():
    args = arguments()
    results = json.loads(args.output.read_text()) if args.output.exists() else {"workloads": {}}
    results |= {"machine": machine(), "rounds": args.rounds}
    results["versions"] = {
        name: versions(args.environments, name, packages) for name, packages in contenders.PACKAGES.items()
    }
    if args.again or "parts" not in results:
        results["parts"] = {name: printed(args.environments, f"{name}.py") for name in ("noise", "overhead")}
    for workload in [workloads.WORKLOADS[name] for name in args.workloads or workloads.WORKLOADS]:
        entries = results["workloads"].setdefault(workload.name, {})
        missing = {name for name in args.contenders if args.again or name not in entries}
        for sitting in sittings(workload, missing):
            entries |= measured(sitting, workload, args.environments, args.rounds)
            args.output.write_text(json.dumps(results, indent=1))
            print(
                workload.name,
                *(f"{c.name} {entries[c.name].get('ms', 'fails')}" for c in sitting),
                flush=True,
            )


if __name__ == "__main__":
    main()
