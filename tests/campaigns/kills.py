"""Kills training with SIGKILL at random moments, hundreds of times, and starts it again.

    python tests/campaigns/kills.py [--kills 200] [--output docs/kills.md]

Each run trains with `BackupAndRestore` and a ledger file until it is done, however often it is killed. Every
step that ends is one byte of another file, written by a callback: the truth. After every kill

    the ledger file can be read, and counts at least as many steps as ended

and in the end the model's own ledger counts at least the steps its weights went through. Exit status 1 if one
of these does not hold, or a run cannot be finished.
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
        def on_train_batch_end(self, batch, logs=None):
            with open(os.path.join(directory, "truth"), "ab") as file:
                file.write(b".")
            time.sleep(0.01)  # Leaves moments to be killed at.

    x = np.linspace(-1, 1, 20 * BATCHES).astype(np.float32)[:, None]
    model = dp2.DP2Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(dp2.DP2RMSprop(0.1, 1.0, noise_multiplier=1.0, delay=7), loss="mse")
    backup = keras.callbacks.BackupAndRestore(os.path.join(directory, "backup"))
    ledger = os.path.join(directory, "ledger.jsonl")
    model.fit(x, x, batch_size=20, epochs=EPOCHS, ledger_file=ledger, callbacks=[backup, Truth()], verbose=0)
    facts = {"steps": model.ledger.steps, "iterations": int(model.optimizer.iterations)}
    pathlib.Path(directory, "done.json").write_text(json.dumps(facts))


def counted(directory: str) -> tuple[int, int]:
    """Steps that the ledger file counts, and steps that ended."""
    from dp2_keras.ledger_file import LedgerFile

    truth = pathlib.Path(directory, "truth")
    ended = truth.stat().st_size if truth.exists() else 0
    path = os.path.join(directory, "ledger.jsonl")
    if not os.path.exists(path):
        return 0, ended
    with LedgerFile(path) as file:
        return file.ledger.steps, ended


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
    facts = {"kills": 0, "lost": 0}
    with tempfile.TemporaryDirectory() as directory:
        while not os.path.exists(os.path.join(directory, "done.json")):
            patience = generator.uniform(1.0, 6.0) if facts["kills"] < kills_left else 600.0
            facts["kills"] += attempt(context, directory, patience)
            in_file, ended = counted(directory)
            facts["lost"] += max(ended - in_file, 0)
        done = json.loads(pathlib.Path(directory, "done.json").read_text())
        facts["lost"] += max(done["iterations"] - done["steps"], 0)
        return {**facts, "ended": ended, "counted": in_file, "in weights": done["iterations"]}


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
    summary = f"{len(runs)} runs of {EPOCHS * BATCHES} steps, {total}"
    print(summary)
    if args.output is not None:
        args.output.write_text(f"# Kills\n\nBy `make kills`: {summary}.\n")
    return 1 if total["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
