"""Kills training with SIGKILL at random moments, hundreds of times, and starts it again.

    python tests/campaigns/kills.py [--kills 200] [--output docs/kills.md]

Each run trains with `BackupAndRestore` and a ledger file until it is done, however often it is killed. Every
step that ends is one byte of another file, written by a callback: the truth. After every kill

    the ledger file can be read, and counts at least as many steps as ended

and in the end the weights went through exactly the steps that were asked for, and the model's own ledger
counts at least as many. Exit status 1 if one of these does not hold, or a run cannot be finished.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

BATCHES, EPOCHS = 10, 40


def train(directory: str) -> None:
    """One attempt: goes on from the backup, if there is one."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras
    import numpy as np

    import dp2_keras as dp2

    class Truth(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):  # The backup before it in the list is restored.
            if int(self.model.optimizer.iterations):
                note(directory, "resumed")

        def on_train_batch_end(self, batch, logs=None):
            note(directory, "truth")
            time.sleep(0.01)  # Leaves moments to be killed at.

    x = np.linspace(-1, 1, 20 * BATCHES).astype(np.float32)[:, None]
    model = dp2.DP2Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(dp2.DP2RMSprop(0.1, 1.0, noise_multiplier=1.0, delay=7), loss="mse")
    backup = keras.callbacks.BackupAndRestore(os.path.join(directory, "backup"))
    ledger = os.path.join(directory, "ledger.jsonl")
    model.fit(x, x, batch_size=20, epochs=EPOCHS, ledger_file=ledger, callbacks=[backup, Truth()], verbose=0)
    facts = {"steps": model.ledger.steps, "iterations": int(model.optimizer.iterations)}
    part = pathlib.Path(directory, "done.part")
    part.write_text(json.dumps(facts))
    part.rename(pathlib.Path(directory, "done.json"))


def note(directory: str, name: str) -> None:
    """Writes one more byte, of which a kill leaves nothing or all."""
    with open(os.path.join(directory, name), "ab") as file:
        file.write(b".")


def noted(directory: str, name: str) -> int:
    """How often it was noted."""
    path = pathlib.Path(directory, name)
    return path.stat().st_size if path.exists() else 0


def counted(directory: str) -> int:
    """Steps that the ledger file counts."""
    from dp2_keras.ledger_file import LedgerFile

    path = os.path.join(directory, "ledger.jsonl")
    if not os.path.exists(path):
        return 0
    with LedgerFile(path) as file:
        return file.ledger.steps


def attempt(context, directory: str, patience: float) -> bool:
    """Trains until it is done, or until it is killed; whether it was killed."""
    process = context.Process(target=train, args=(directory,))
    process.start()
    process.join(patience)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        return True
    if process.exitcode != 0:
        raise RuntimeError(f"Training did not go on after a kill: exit code {process.exitcode}")
    return False


def finished(context, kills_left: int, generator: random.Random) -> dict[str, int]:
    """One run, killed at random and started again until it is done."""
    kills = lost = 0
    with tempfile.TemporaryDirectory() as directory:
        while not os.path.exists(os.path.join(directory, "done.json")):
            patience = generator.uniform(1.0, 6.0) if kills < kills_left else 600.0
            kills += attempt(context, directory, patience)
            in_file, ended = counted(directory), noted(directory, "truth")
            lost += max(ended - in_file, 0)
        done = json.loads(pathlib.Path(directory, "done.json").read_text())
        lost += max(done["iterations"] - done["steps"], 0)
        steps = {"ended": ended, "counted": in_file, "lost": lost, "in weights": done["iterations"]}
        return {"kills": kills, "resumes": noted(directory, "resumed"), **steps}


def main() -> int:
    """Runs the campaign, prints what was counted, and says whether nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["keras", "tensorflow", "dp2_keras"])
    generator, runs = random.Random(args.seed), []
    while sum(run["kills"] for run in runs) < args.kills:
        runs.append(finished(context, args.kills - sum(run["kills"] for run in runs), generator))
        print(runs[-1], flush=True)
    total = {name: sum(run[name] for run in runs) for name in runs[0]}
    print(total)
    if args.output is not None:
        args.output.write_text(report(runs, total))
    return 1 if total["lost"] or any(run["in weights"] != EPOCHS * BATCHES for run in runs) else 0


def report(runs: list[dict[str, int]], total: dict[str, int]) -> str:
    """The table of all runs."""
    rows = [(number, *run.values()) for number, run in enumerate(runs, 1)] + [("all", *total.values())]
    table = [("run", *total), ("---",) * (1 + len(total)), *rows]
    lines = "\n".join(f"| {' | '.join(map(str, row))} |" for row in table)
    return (
        f"# Kills\n\nBy `make kills`: runs of {EPOCHS * BATCHES} steps with `BackupAndRestore` and a ledger "
        "file, killed with SIGKILL at random moments, started again each time, and all finished. *Resumes*: "
        "attempts that found a backup and went on from it; before there is one, a run starts anew. "
        "*Ended*: steps that ended in any attempt. *Counted*: steps in the ledger file, which are those that "
        "began, and those of an epoch that was killed. *Lost*: steps that ended or are in the weights, and "
        f"are not counted. *In weights*: steps that the final weights went through.\n\n{lines}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
