"""What an audit found: an empirical lower bound beside the claimed upper bound."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of `dp2_keras.audit`.

    Attributes:
        kind: "gradients" or "examples".
        epsilon: what the ledger claims, an upper bound.
        lower_bound: what the attack proves with the confidence, unless chance misled it; 0 if nothing.
        delta: of both.
        confidence: of the lower bound.
        canaries: how many there were.
        steps: how many steps were audited.
        scores: of each canary; the larger, the more likely it was in.
        included: whether it was.
    """

    kind: str
    epsilon: float
    lower_bound: float
    delta: float
    confidence: float
    canaries: int
    steps: int
    scores: np.ndarray = dataclasses.field(repr=False)
    included: np.ndarray = dataclasses.field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether the lower bound is not above the claim."""
        return self.lower_bound <= self.epsilon

    def __str__(self):
        verdict = "consistent with" if self.passed else "REFUTES"
        return (
            f"epsilon >= {self.lower_bound:.3f} at delta = {self.delta!r}, with confidence "
            f"{self.confidence:g}: {verdict} the claimed {self.epsilon:.3f}\n"
            f"  {self.canaries:,} canaries ({self.kind}), {self.steps:,} steps"
        )

    def plot(self, axes=None):
        """Draws histograms of the scores of canaries that were in and that were out.

        Args:
            axes: Matplotlib axes. Defaults to new ones.

        Returns:
            The axes.
        """
        if axes is None:
            import matplotlib.pyplot as plt

            _, axes = plt.subplots()
        bins = np.histogram_bin_edges(self.scores, bins=40)
        for name, chosen in (("out", ~self.included), ("in", self.included)):
            axes.hist(self.scores[chosen], bins=bins, alpha=0.6, label=f"canary {name}")
        axes.set_xlabel("score")
        axes.set_ylabel("canaries")
        axes.set_title(f"claimed epsilon {self.epsilon:.2f}, audited at least {self.lower_bound:.2f}")
        axes.legend()
        return axes
