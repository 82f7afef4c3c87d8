"""An audit: train with canaries that are in or out by a coin, guess which, and bound epsilon from below.

    coin_i ~ Bernoulli(1/2)                      for each canary i
    train  on the ordinary examples and the canaries with coin_i = 1; the others have weight 0
    score  each canary by what training released
    bound  epsilon from how well scores tell the coins; see `bounds.py`

Two kinds. "gradients" is the worst case, and nearly tight: every canary has a coordinate of its own
(`canaries.py`), so that canaries are independent trials, and the attacker sees what each step released.
Half of the canaries choose score and threshold, the other half are judged by them. "examples" is what an
attacker can do who sees the trained model: canaries are ordinary examples, scored by how much training
lowered their loss; the highest and lowest scores are guessed, and the bound is that of one run.

What is audited is the step as `fit` compiles it: a copy of the model with its optimizer's configuration, its
loss, its method, its chunks and its public data. The noise has a key of its own, unless the optimizer has a
`noise_seed`.
"""

from __future__ import annotations

import numpy as np

from dp2_keras import _checks, _keras, accounting
from dp2_keras.auditing import bounds, canaries
from dp2_keras.auditing.result import Audit
from dp2_keras.model import make_private, unwrap

keras = _keras.keras
KINDS = ("gradients", "examples")


def audit(
    model,
    x,
    y,
    *,
    batch_size: int,
    epochs: int = 1,
    kind: str = "gradients",
    num_canaries: int = 1000,
    delta: float | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
) -> Audit:
    """Audits the private training of a model, empirically.

    Args:
        model: a private model, compiled; it is copied, not trained.
        x: inputs: an array, or a tuple or list of arrays.
        y: labels, an array.
        batch_size: B, the expected size of a Poisson batch.
        epochs: how many times (n + canaries) // B steps; for "examples" n // B.
        kind: "gradients", the worst case: canaries are added to x and y, each with a weight of its own; or
            "examples": the last examples of x and y are the canaries.
        num_canaries: m. The more, the tighter: 1,000 canaries show an epsilon of up to about 5.
        delta: of both figures. Defaults to that of `privacy_spent`.
        confidence: of the lower bound: above the claim with at most the remaining probability if the claim
            is true.
        seed: of the coins alone. Defaults to none.

    Returns:
        An `Audit`, which can be printed and plotted.

    Raises:
        ValueError: if the model is not compiled with a private optimizer that has noise, or an argument is
            out of range.

    Example:
    >>> import dp2_keras as dp2, keras, numpy as np
    >>> model = dp2.DP2Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(dp2.DP2RMSprop(0.1, 1.0, noise_multiplier=1.0, delay=2), loss="mse")
    >>> found = dp2.audit(model, np.ones((100, 2)), np.ones(100), batch_size=110, num_canaries=1000)
    >>> found.steps, found.canaries, found.lower_bound < 10
    (10, 1000, True)

    References:
        Nasr et al., Tight Auditing of Differentially Private Machine Learning, arXiv:2302.07956, 2023.
        Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run, arXiv:2305.08846, 2023.
    """
    _checks.one_of(KINDS, kind=kind)
    _checks.positive_integer(batch_size=batch_size, epochs=epochs, num_canaries=num_canaries)
    _checks.open_unit(confidence=confidence)
    _check_model(model)
    if kind == "examples" and num_canaries >= len(y):
        _checks.fail(f"below the number of examples, {len(y)}", num_canaries=num_canaries)
    included = np.random.default_rng(seed).integers(0, 2, num_canaries).astype(bool)
    size = len(y) + (num_canaries if kind == "gradients" else 0)
    if batch_size > size:
        _checks.fail(f"at most the number of examples and canaries, {size}", batch_size=batch_size)
    delta = accounting.default_delta(size) if delta is None else delta
    run = _gradients if kind == "gradients" else _examples
    trained, scores, lower_bound = run(model, x, y, included, batch_size, epochs, (delta, confidence))
    return Audit(
        kind,
        epsilon=trained.privacy_spent(delta),
        lower_bound=lower_bound,
        delta=delta,
        confidence=confidence,
        canaries=num_canaries,
        steps=trained.ledger.steps,
        scores=scores,
        included=included,
    )


def _check_model(model):
    optimizer = getattr(model, "optimizer", None)
    if not hasattr(model, "ledger") or optimizer is None:
        raise ValueError(
            "`model` must be a private model, compiled: see `dp2_keras.make_private`. Received: "
            f"{type(model).__name__}"
        )
    if not optimizer.sigma:
        _checks.fail("a number above 0 to have a claim to audit", noise_multiplier=optimizer.sigma)


# The worst case.


def _gradients(model, x, y, included, batch_size, epochs, terms):
    attack = WorstCase(model, x, y, len(included), batch_size)
    scores = attack.scores(included, epochs)
    return attack.model, scores[0], attack.lower_bound(scores, included, *terms)


class WorstCase:
    """A copy of a model with canaries that can be trained, and listened to, again and again.

    Args:
        model, x, y, num_canaries, batch_size: as for `audit`.
    """

    def __init__(self, model, x, y, num_canaries: int, batch_size: int):
        copy, weights = canaries.with_canaries(model, num_canaries)
        self._x, self._y, self._batch_size = x, y, batch_size
        self.rate = batch_size / (len(y) + num_canaries)
        self.optimizer = canaries.listening(model.optimizer, self.rate)
        self.model = make_private(copy)
        self.model.compile(
            self.optimizer, [model.loss, canaries.pull_at_own_weight], **_how(model, canaries.public_rows)
        )
        self.optimizer.listen_to(weights.embeddings)
        held = [*self.model.weights, *self.optimizer.variables, self.optimizer.scores]
        self._start = [(variable, np.array(variable)) for variable in held]
        self.steps = 0

    def scores(self, included: np.ndarray, epochs: int) -> list[np.ndarray]:
        """Trains from the start, and gives the canaries' scores: over all steps, and kind by kind."""
        for variable, value in self._start:
            variable.assign(value)
        before = self.model.ledger.steps
        rows = canaries.rows(self._x, self._y, included, self.optimizer.largest_clip())
        _fit(self.model, *rows, self._batch_size, epochs)
        self.steps = self.model.ledger.steps - before
        kinds = self.optimizer.scores.numpy()
        return [kinds.sum(axis=0), *kinds]

    def lower_bound(self, scores, included, delta: float, confidence: float) -> float:
        """Of epsilon, from the scores of one training."""
        step = self.optimizer.sigma, self.rate, self.steps
        return _independent_bound(scores, included, step, delta, confidence)


def _independent_bound(scores, included, step, delta, confidence):
    """The better of two bounds, each at half of the error, so that both hold together."""
    each = (1 + confidence) / 2
    extreme = _told(scores, included, lambda rates: rates.epsilon(delta, each))
    middling = _told(scores, included, lambda rates: np.subtract(*rates.bounds(each)))
    return max(extreme.epsilon(delta, each), middling.gaussian_epsilon(*step, delta, each))


def _told(candidates, included, gain):
    """How one half of the canaries is told by the score and threshold with the most gain on the other."""
    half = len(included) // 2
    found = [_best_threshold(scores[:half], included[:half], gain) for scores in candidates]
    best = max(range(len(found)), key=lambda k: found[k][0])
    return bounds.Rates.of(candidates[best][half:] > found[best][1], included[half:])


def _best_threshold(scores, included, gain):
    """The gain, and the threshold that has it."""
    order = np.sort(scores)
    thresholds = np.unique((order[1:] + order[:-1]) / 2)[:: max(1, len(order) // 100)]
    return max((gain(bounds.Rates.of(scores > t, included)), t) for t in [0.0, *thresholds])


# What the trained model shows.


def _examples(model, x, y, included, batch_size, epochs, terms):
    audited = make_private(keras.models.clone_model(unwrap(model)))
    audited.compile(
        type(model.optimizer).from_config(model.optimizer.get_config()), model.loss, **_how(model)
    )
    count = len(included)
    weights = np.concatenate([np.ones(len(y) - count), included]).astype(np.float32)
    last = _last(x, count), np.asarray(y)[-count:]
    before = _losses(audited, *last)
    _fit(audited, x, y, weights, batch_size, epochs)
    scores = before - _losses(audited, *last)
    return audited, scores, bounds.one_run_epsilon(*_guessed(scores, included), count, *terms)


def _last(x, count):
    if isinstance(x, (tuple, list)):
        return [np.asarray(column)[-count:] for column in x]
    return np.asarray(x)[-count:]


def _losses(model, x, y):
    """Of each example by itself."""
    loss = keras.losses.get(model.loss)
    predicted = model.predict(x, verbose=0)
    return np.array([np.mean(loss(y[k : k + 1], predicted[k : k + 1])) for k in range(len(y))])


def _guessed(scores, included):
    """How many guesses are right, and how many there are: "in" for a sixth on top, "out" for one below."""
    count = max(1, len(scores) // 6)
    order = np.argsort(scores, kind="stable")
    correct = np.sum(included[order[-count:]]) + np.sum(~included[order[:count]])
    return int(correct), 2 * count


# The step, as the user has it.


def _how(model, public_rows=lambda data: data):
    how = dict(
        method=model.method,
        physical_batch_size=model.physical_batch_size,
        jit_compile=_keras.wants_jit(model),
        run_eagerly=model.run_eagerly,
    )
    public = model.public_data
    if public is None:
        return how
    return {**how, "public_data": public_rows(public.data), "public_batch_size": public.batch_size}


def _fit(model, x, y, sample_weight, batch_size, epochs):
    model.fit(x, y, sample_weight=sample_weight, batch_size=batch_size, epochs=epochs, verbose=0)
