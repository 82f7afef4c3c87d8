"""Audits optimizers of every kind hundreds of times, and a build that is broken on purpose.

    python tests/campaigns/audits.py [--audits 200] [--jobs 2] [--output docs/audits.md]

The worst case of `dp2_keras.audit`, with new coins each time. A lower bound of 95 % may lie above the claim
in one audit of twenty. Exit status 1 if it does so more often than that allows (binomial test, p <= 1e-6), or
if a build without noise in its adaptive phase is found out, at a claim of 2, in less than 95 % of its audits.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

CONFIDENCE, DELTA, CANARIES, BATCH, EPOCHS = 0.95, 1e-3, 2000, 505, 2
LEAST_P_VALUE, LEAST_FOUND = 1e-6, 0.95

OPTIMIZERS = {
    "DPSGD": {},
    "DPRMSprop": {},
    "DPAdagrad": {},
    "DPYogi": {},
    "DPAdam": {},
    "DP2RMSprop": {"delay": 2, "sgd_l2_norm_clip": 0.2},
    "DP2Adagrad": {"delay": 2},
    "DP2Yogi": {"sgd_steps": 1, "adaptive_steps": 3},
    "DP2NoiseFloor": {"delay": 2},
    "DP2RMSpropNoiseFirst": {"delay": 2},
    "DP2RMSpropExtraQuery": {"delay": 2},
    "DP2AdagradNoiseFirst": {"delay": 2},
    "DP2AdagradExtraQuery": {"delay": 2},
    "AdaDPSRMSprop": {},
    "AdaDPSAdagrad": {},
    "PDADPMD": {"alpha": 0.5},
    "DPAdagradPublicSubspace": {"subspace_size": 2},
}
BROKEN = "DP2RMSprop without noise in its adaptive phase"


def optimizer_of(name: str, sigma: float):
    """The optimizer of that name, or the broken one."""
    import tensorflow as tf

    import dp2_keras as dp2

    if name != BROKEN:
        return getattr(dp2, name)(0.1, 1.0, noise_multiplier=sigma, **OPTIMIZERS[name])

    class DP2RMSprop(dp2.DP2RMSprop):
        def _private_mean(self, clipped, stream, draw):
            noisy = super()._private_mean(clipped, stream, draw)
            bare = [value / self._batch_size for value in clipped.values]
            return [tf.where(self.phase() > 0, b, n) for b, n in zip(bare, noisy)]

    return DP2RMSprop(0.1, 1.0, noise_multiplier=sigma, **OPTIMIZERS["DP2RMSprop"])


def lower_bounds(name: str, sigma: float, audits: int) -> tuple[float, list[float]]:
    """The epsilon that is claimed, and the bounds that audits found."""
    import keras

    import dp2_keras as dp2
    from dp2_keras.auditing.attack import WorstCase

    x = np.random.default_rng(0).normal(size=(20 + 8, 3)).astype(np.float32)
    x, public_x = x[:20], x[20:]
    optimizer = optimizer_of(name, sigma)
    model = dp2.DP2Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    public = {"public_data": (public_x, public_x[:, 0])} if optimizer.public_gradients else {}
    model.compile(optimizer, loss="mse", **public)
    attack, coins = WorstCase(model, x, x[:, 0], CANARIES, BATCH), np.random.default_rng(1)
    claims, found = [], []
    for _ in range(audits):
        included = coins.integers(0, 2, CANARIES).astype(bool)
        scores = attack.scores(included, EPOCHS)
        claims = claims or [attack.model.privacy_spent(DELTA)]  # Of one training: the ledger goes on.
        found.append(attack.lower_bound(scores, included, DELTA, CONFIDENCE))
    return claims[0], found


def row(name: str, audits: int, epsilon: float) -> tuple[str, bool]:
    """A row of the table, and whether all is as it must be."""
    from scipy import stats

    from dp2_keras import calibration

    sigma = calibration.calibrate_noise_multiplier(epsilon, DELTA, CANARIES + 20, BATCH, EPOCHS)
    claim, found = lower_bounds(name, sigma, audits)
    above = sum(bound > claim for bound in found)
    p_value = stats.binomtest(above, audits, 1 - CONFIDENCE, alternative="greater").pvalue
    good = above >= LEAST_FOUND * audits if name == BROKEN else p_value > LEAST_P_VALUE
    figures = f"{claim:.2f} | {np.median(found):.2f} | {max(found):.2f} | {above} of {audits}"
    return f"| {name} | {figures} | {'as it must be' if good else 'NOT as it must be'} |", good


def main() -> int:
    """Runs the campaign, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--audits", type=int, default=200)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args()
    names = [*OPTIMIZERS, BROKEN]
    with concurrent.futures.ProcessPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(row, name, args.audits, args.epsilon) for name in names]
        rows = []
        for future in futures:
            rows.append(future.result())
            print(rows[-1][0], flush=True)
    table = "\n".join(line for line, _ in rows)
    if args.output is not None:
        args.output.write_text(
            f"# Audits\n\nBy `make audits`: {args.audits} audits of each optimizer, {CANARIES} canaries, "
            f"{EPOCHS * ((CANARIES + 20) // BATCH)} steps, delta {DELTA}, confidence {CONFIDENCE}. A bound "
            "may lie above the claim in one audit of twenty. All have the noise that an epsilon of "
            f"{args.epsilon:g} asks of one release a step; those of two a step claim what both cost, and the "
            "attack listens to the one that moves the weights. So few steps have no pilot; `make test` "
            "audits one.\n\n"
            f"| optimizer | claimed epsilon | median lower bound | largest | above the claim | |\n"
            f"|---|---|---|---|---|---|\n{table}\n"
        )
    return 0 if all(good for _, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
