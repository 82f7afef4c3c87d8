"""What a step costs: its noise multiplier, settled once, and what the ledger notes of it.

    event = Gaussian(sigma); of several releases of one batch Gaussian((sigma_1^-2 + sigma_2^-2 + ...)^(-1/2))

The same in both phases of Algorithm 1 of arXiv:2212.00309, so that a schedule has no price.
"""

from __future__ import annotations

import dp_accounting

from dp2_keras import _checks
from dp2_keras.entries import Mechanism


class Priced:
    """An optimizer that knows what its steps release.

    It has `noise_seed`, `uses_public_data`, `_clips` and `_sigma`.
    """

    @property
    def sigma(self) -> float | None:
        """The noise multiplier as a number; None while "auto" waits for its calibration."""
        return self._sigma

    def calibrate(self, noise_multiplier: float) -> None:
        """Settles "auto", once; `fit` calls it.

        Raises:
            AttributeError: if the noise multiplier is settled.
        """
        _checks.positive(noise_multiplier=noise_multiplier)
        if self._sigma is not None:
            raise AttributeError(
                "`noise_multiplier` is settled, because steps that ran were priced with it. Make a new "
                f"optimizer. Received: noise_multiplier={noise_multiplier}, after {self._sigma}"
            )
        self._sigma = float(noise_multiplier)

    def noise_multipliers(self, sigma: float) -> tuple[float, ...]:
        """What each release that one step makes of its batch has for its noise multiplier."""
        return (sigma,)

    def dp_event(self) -> dp_accounting.DpEvent:
        """What one step releases of its batch, whatever its phase: one Gaussian sum.

        Compose it over the steps, inside the sampling that drew the batches; or ask
        `model.privacy_spent()`, which knows both.

        Raises:
            ValueError: while `noise_multiplier="auto"` is not calibrated.
        """
        return self.mechanism().event

    def mechanism(self) -> Mechanism:
        """What the ledger notes of a step.

        Raises:
            ValueError: while `noise_multiplier="auto"` is not calibrated.
        """
        self._check_calibrated()
        return self.mechanism_with(self.sigma)

    def mechanism_with(self, sigma: float) -> Mechanism:
        """What the ledger would note of a step with the noise multiplier sigma."""
        return Mechanism(
            type(self).__name__,
            self.noise_multipliers(sigma),
            tuple(dict.fromkeys(self._clips())),
            seeded=self.noise_seed is not None,
            public_data=self.uses_public_data,
        )

    def _check_calibrated(self):
        if self._sigma is None:
            raise ValueError(
                '`noise_multiplier="auto"` is settled by `fit`, with a `dp2_keras.PrivacyBudget` among its '
                "callbacks: call that first, or give a number, such as `calibrate_noise_multiplier` finds."
            )
