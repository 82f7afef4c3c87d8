"""Noisy AdaGrad whose noisy squares are projected on what public gradients span.

    g~ = ( sum_i clip(g_i, C)   + N(0, (sigma C)^2 I) ) / B
    s~ = ( sum_i clip(g_i, C)^2 + N(0, (sigma C^2)^2 I) ) / B          the square is elementwise
    v <- v + P s~,   P the projection on the top k eigenvectors of public gradients (see `subspace.py`)
    w <- w - lr g~ / (sqrt(max(v, 0)) + eps)

Kairouz et al. 2021 (arXiv:2008.06570), in the diagonal form of arXiv:2212.00309, Appendix "Additional Results
for Comparison with Public Data-Assisted Methods". Two releases of one batch: a step costs what both cost
together, and the second has sensitivity C^2, because ||clip(g)^2||_2 <= ||clip(g)||_2^2. v is made
non-negative where it is used, and not where it is kept, so that the noise of many steps averages out. (The
authors' experiment clips the accumulated squares of batches; here those of each example are bounded before
they are added up, which is what the noise is priced for.)
"""

from __future__ import annotations

import tensorflow as tf

from dp2_keras import _checks, _keras, preconditioners
from dp2_keras.optimizers.rules import Accumulating, EveryStep
from dp2_keras.privatizer import JointQuery, SquaresQuery
from dp2_keras.subspace import project


@_keras.register
class DPAdagradPublicSubspace(Accumulating, EveryStep):
    """AdaGrad on private gradients, with private squares projected on a subspace of public gradients.

    Compile the model with `public_data=(x, y)`, of which `public_batch_size` gradients span the space.

    Args:
        learning_rate: float or `LearningRateSchedule`.
        l2_norm_clip: C, the largest norm an example's gradient may have.
        noise_multiplier: sigma, of each of the two releases.
        subspace_size: k, the dimensions of the subspace, at most `public_batch_size`.
        eps: the stabiliser, outside the root. A coordinate whose noisy v is not positive is multiplied by
            1 / eps. Defaults to 1e-2.
        **kwargs: see `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> optimizer = DPAdagradPublicSubspace(0.1, l2_norm_clip=0.5, noise_multiplier=1.0, subspace_size=8)
    >>> f"{optimizer.dp_event().noise_multiplier:.4f}"  # Of both releases together.
    '0.7071'

    Reference:
        Kairouz et al., (Nearly) Dimension Independent Private ERM with AdaGrad Rates via Publicly Estimated
        Subspaces, https://arxiv.org/abs/2008.06570, 2021.
    """

    rule = preconditioners.Adagrad

    def __init__(self, learning_rate, l2_norm_clip, noise_multiplier, *, subspace_size, eps=1e-2, **kwargs):
        _checks.positive_integer(subspace_size=subspace_size)
        super().__init__(learning_rate, l2_norm_clip, noise_multiplier, eps=eps, **kwargs)
        self.subspace_size = subspace_size

    @property
    def public_gradients(self):
        return "each"

    def noise_multipliers(self, sigma):
        return (sigma, sigma)

    def _check_public(self, public):
        super()._check_public(public)
        count = public.values[0].shape[0]
        if count < self.subspace_size:
            rule = "at most `public_batch_size`, the number of public gradients"
            _checks.fail(rule, subspace_size=self.subspace_size, public_batch_size=count)

    def _query(self, variables):
        return JointQuery([SquaresQuery(variables, None, self.l2_norm_clip), super()._query(variables)])

    def _directions(self, variables, squares, gradients):
        projected = project(squares, self._public.values, self.subspace_size)
        for variable, square in zip(variables, projected):
            moment = self._state(self._second_moments, variable)
            moment.assign(self.preconditioner.refresh(moment, square))
        return self._scaled(gradients, variables)

    def _scale(self, variable):
        moment = tf.maximum(tf.convert_to_tensor(self._state(self._second_moments, variable)), 0.0)
        return self.preconditioner.scale(moment, refreshes=self._step() + 1)
