"""Privacy bugs, each as a small change of the code that some test must not let pass.

Most of them were found in libraries for private training; `seen` says where, or what they would do. To add
one, add an entry: the text to replace occurs once in its file, so that a mutant that no longer fits is an
error and not a survivor.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change of one file.

    Attributes:
        bug: what is wrong with it.
        file: below `dp2_keras/`.
        old: text that occurs once in the file.
        new: what takes its place.
        tests: arguments of pytest, of which at least one test must fail.
    """

    bug: str
    file: str
    old: str
    new: str
    tests: str


_PILOT = "tests/test_pilot.py"
_PRIVATIZER = "tests/test_privatizer.py"
_TRAJECTORIES = "tests/test_trajectories.py"
_GHOST = "tests/test_ghost_bounds.py tests/test_ghost.py"
_SPARSE = "tests/test_sparse.py"
_SQUARES = "tests/test_ghost_squares.py"
_MEAN = "        return [value / self._batch_size for value in replicas.added_up(values)]\n"
_FINISH = "            self.optimizer.finish_step(result.clipped_sum, regularization)\n"

MUTANTS = [
    # What is clipped.
    Mutant(
        "the norm is that of the gradient before it is scaled",
        "privatizer.py",
        "tf.add_n([squared_norms(g) for g in scaled])",
        "tf.add_n([squared_norms(g) for g in gradients])",
        _PRIVATIZER,
    ),
    Mutant(
        "ghost norms without the scale",
        "per_example/contributions.py",
        "if scale is None:\n            return product_norms(",
        "if True:\n            return product_norms(",
        _GHOST,
    ),
    Mutant(
        "ghost norms of sparse rows without the scale",
        "per_example/sparse.py",
        "if scale is None:",
        "if True:",
        _SPARSE,
    ),
    Mutant(
        "each layer is clipped by a norm of its own",
        "privatizer.py",
        "            sums = [self.total(factors, g, kept) for g in scaled]\n",
        "            sums = [self.total(self.factors(squared_norms(g), mask)[0], g, kept) for g in scaled]\n",
        _PRIVATIZER,
    ),
    Mutant(
        "the mean of a chunk is clipped, not each example",
        "per_example/vectorized.py",
        "    values, norms = query.each(lambda one: one.clip(gradients, mask))\n",
        "    import tensorflow as tf\n"
        "    gradients = [0 * g + tf.reduce_mean(g, axis=0) for g in gradients]\n"
        "    values, norms = query.each(lambda one: one.clip(gradients, mask))\n",
        "tests/test_models.py",
    ),
    Mutant(
        "gradients up to twice the clip norm pass",
        "privatizer.py",
        "return tf.where(norms > clip, clip / tf.maximum(norms, clip), tf.ones_like(norms))",
        "return tf.where(norms > 2 * clip, clip / tf.maximum(norms, clip), tf.ones_like(norms))",
        _PRIVATIZER,
    ),
    Mutant(
        "padding counts as examples",
        "privatizer.py",
        "kept = tf.math.is_finite(norms) & mask",
        "kept = tf.math.is_finite(norms)",
        _PRIVATIZER,
    ),
    Mutant(
        "one NaN makes the sum NaN, which tells that its example is there",
        "privatizer.py",
        "kept = tf.math.is_finite(norms) & mask",
        "kept = mask",
        _PRIVATIZER,
    ),
    Mutant(
        "examples left out are multiplied by 0, and 0 * inf is NaN",
        "privatizer.py",
        "        return tf.where(as_column(kept, tensor.shape.rank), tensor, tf.zeros_like(tensor))\n",
        "        return tensor * tf.cast(as_column(kept, tensor.shape.rank), tensor.dtype)\n",
        _PRIVATIZER,
    ),
    Mutant(
        "a token that occurs twice counts as two in the norm",
        "per_example/contributions.py",
        "super().__init__([ids, d] if ids.shape[1] == 1 else _sum_repeated(ids, d), shape)",
        "super().__init__([ids, d], shape)",
        _GHOST,
    ),
    Mutant(
        "of a layer that is used twice, one use is in the norm",
        "per_example/ghost.py",
        "return {n: first.plus(others) if others else first for n, (first, *others) in found.items()}",
        "return {n: first for n, (first, *others) in found.items()}",
        _GHOST,
    ),
    Mutant(
        "weights used outside their layers are not in the norm",
        "per_example/ghost.py",
        "    _check_bypass(variables, gradients[len(recorded) :])\n",
        "",
        _GHOST,
    ),
    # The noise.
    Mutant(
        "no noise at all",
        "optimizers/base.py",
        "        if self.sigma > 0 and replicas.is_chief(tf.distribute.get_strategy()):\n",
        "        if False:\n",
        _PRIVATIZER,
    ),
    Mutant(
        "no noise in adaptive steps",
        "optimizers/base.py",
        _MEAN,
        "        bare = self._by_phase(0.0, 1.0)\n"
        "        values = [bare * b + (1.0 - bare) * v for b, v in zip(clipped.values, values)]\n" + _MEAN,
        _PRIVATIZER,
    ),
    Mutant(
        "no noise in the step that refreshes the preconditioner",
        "optimizers/base.py",
        _MEAN,
        "        if self.is_delayed:\n"
        "            bare = tf.cast(self.schedule.refreshes(self._step()), tf.float32)\n"
        "            values = [bare * b + (1.0 - bare) * v for b, v in zip(clipped.values, values)]\n"
        + _MEAN,
        f"{_PRIVATIZER} {_TRAJECTORIES}",
    ),
    Mutant(
        "noise for the clip norm of the other phase",
        "optimizers/base.py",
        "values = add_noise(clipped, self.sigma,",
        "values = add_noise(clipped, self.sigma * self._clip(Phase.ADAPTIVE) / clipped.query.sensitivity,",
        f"{_PRIVATIZER} {_TRAJECTORIES}",
    ),
    Mutant(
        "noise of deviation sigma, whatever the clip norm",
        "privatizer.py",
        "stddev = clipped.values, noise_multiplier * clipped.query.sensitivity",
        "stddev = clipped.values, noise_multiplier",
        _PRIVATIZER,
    ),
    Mutant(
        "noise for a sum of squares as for a sum of gradients",
        "privatizer.py",
        "        return self.l2_norm_clip * self.l2_norm_clip\n",
        "        return self.l2_norm_clip\n",
        f"{_PRIVATIZER} tests/test_public_optimizers.py",
    ),
    Mutant(
        "noise is added once for each chunk",
        "per_example/chunks.py",
        "        values = [a + b for a, b in zip(values, more)]\n",
        "        values = [a + b + tf.random.normal(tf.shape(b)) for a, b in zip(values, more)]\n",
        "tests/test_models.py tests/test_ghost.py",
    ),
    Mutant(
        "normals never exceed 5.7 deviations",
        "noise.py",
        "    uniform = tf.cast(words, tf.float32) * 2.0**-64 + 2.0**-65\n",
        "    uniform = tf.cast(words >> 41, tf.float32) * 2.0**-23 + 2.0**-24\n",
        "tests/test_noise.py",
    ),
    Mutant(
        "noise in bfloat16",
        "privatizer.py",
        "noisy = [tf.cast(value, tf.float32) + z for value, z in zip(values, noise)]",
        "noisy = [tf.cast(value, tf.float32) + tf.cast(tf.cast(z, tf.bfloat16), tf.float32)"
        " for value, z in zip(values, noise)]",
        f"{_PRIVATIZER} {_TRAJECTORIES}",
    ),
    Mutant(
        "the last bits of a float64 sum are released as they are",
        "privatizer.py",
        "noisy = [tf.cast(value, tf.float32) + z for value, z in zip(values, noise)]",
        "noisy = [value + tf.cast(z, value.dtype) for value, z in zip(values, noise)]",
        _PRIVATIZER,
    ),
    # Where it comes from.
    Mutant(
        "all variables have the same noise",
        "privatizer.py",
        "noise_of(shapes[k], variable=indices[k], stddev=stddev)",
        "noise_of(shapes[k], variable=0, stddev=stddev)",
        f"{_PRIVATIZER} tests/test_noise.py {_TRAJECTORIES}",
    ),
    Mutant(
        "all steps have the same noise",
        "noise.py",
        "return tf.convert_to_tensor(self._draws.assign_add(1))",
        "return tf.convert_to_tensor(self._draws)",
        f"{_PRIVATIZER} tests/test_noise.py",
    ),
    Mutant(
        "both releases of a step have the same noise",
        "optimizers/base.py",
        "zip(clipped.parts(), NOISE_STREAMS)",
        "zip(clipped.parts(), NOISE_STREAMS[:1] * 2)",
        f"{_PRIVATIZER} {_TRAJECTORIES}",
    ),
    Mutant(
        "every process has the same key",
        "noise.py",
        "secrets.token_bytes(16)",
        "bytes(range(16))",
        "tests/test_noise.py tests/test_fresh_keys.py",
    ),
    Mutant(
        "a copy of the optimizer repeats the noise of the original",
        "noise.py",
        "    def __deepcopy__(self, memo):\n        return type(self)(self.seed)\n",
        "    def __deepcopy__(self, memo):\n        return self\n",
        "tests/test_fresh_keys.py tests/test_noise.py",
    ),
    Mutant(
        "the key is in checkpoints",
        "optimizers/base.py",
        "        self._noise_source = NOISE_SOURCES[noise](noise_seed)\n",
        "        self._noise_source = NOISE_SOURCES[noise](noise_seed)\n"
        "        self.kept_key = self._noise_source._key\n",
        "tests/test_secrecy.py",
    ),
    # What else is released, or let in.
    Mutant(
        "the noisy sum is divided by the number of examples that came",
        "training.py",
        _FINISH,
        "            rows = tf.maximum(_row_count(first.data), 1)\n"
        "            self.optimizer._batch_size = tf.cast(rows, tf.float32)\n" + _FINISH,
        "tests/test_sampling_in_fit.py tests/test_models.py",
    ),
    Mutant(
        "an exact metric is in the update",
        "training.py",
        _FINISH,
        "            leak = [tf.fill(v.shape, tf.reduce_mean(result.norms)) for v in query.variables]\n"
        "            self.optimizer.finish_step(result.clipped_sum, leak)\n",
        "tests/test_sampling_in_fit.py tests/test_models.py",
    ),
    Mutant(
        "the preconditioner is made of gradients without noise",
        "optimizers/base.py",
        "        updates = self._directions(variables, *releases)\n",
        "        bare = [[v / self._batch_size for v in part.values] for part in clipped.parts()]\n"
        "        updates = self._directions(variables, *bare)\n        updates = releases[-1]\n",
        f"{_PRIVATIZER} {_TRAJECTORIES}",
    ),
    Mutant(
        "any gradient may update the weights",
        "optimizers/base.py",
        "        if not self._updating:\n",
        "        if False:\n",
        "tests/test_optimizers.py tests/test_validation.py tests/test_stock.py tests/test_config.py",
    ),
    Mutant(
        "a step accepts a sum that was not clipped for it",
        "optimizers/base.py",
        "        if not isinstance(clipped, ClippedSum) or clipped.query is not self._open_query:\n",
        "        if False:\n",
        _PRIVATIZER,
    ),
    Mutant(
        "batch normalization may mix the examples",
        "training.py",
        "        validation.check_model(self)\n",
        "",
        "tests/test_validation.py",
    ),
    Mutant(
        "R replicas add R times the noise, or none",
        "optimizers/readiness.py",
        "    if count > 1 and not tf.distribute.in_cross_replica_context():\n",
        "    if False:\n",
        "tests/test_validation.py tests/test_optimizers.py tests/test_models.py",
    ),
    # Sampling, and its price.
    Mutant(
        "batches of a fixed size, priced as Poisson samples",
        "sampling.py",
        "count = rng.binomial(self.dataset_size, self.batch_size / self.dataset_size)",
        "count = self.batch_size",
        "tests/test_sampling.py",
    ),
    Mutant(
        "rows are drawn with replacement",
        "sampling.py",
        "rows = rng.choice(self.dataset_size, count, replace=False, shuffle=False)",
        "rows = rng.choice(self.dataset_size, count, replace=True, shuffle=False)",
        "tests/test_sampling.py",
    ),
    Mutant(
        "every step has the same batch",
        "sampling.py",
        "counter = step if self.seed is not None else next(self._draws)",
        "counter = 0",
        "tests/test_sampling.py",
    ),
    Mutant(
        "squares are clipped by the norm of what they are squares of",
        "per_example/ghost.py",
        "        return _clip(query, squares, scales and list(map(tf.square, scales)), mask)\n",
        "        return _clip(query, squares, scales, mask)\n",
        _PILOT,
    ),
    Mutant(
        "squares of an example's terms are added up in place of the square of their sum",
        "per_example/contributions.py",
        "return super().squared() if self.is_made else Outer(*map(tf.square, self.operands), self.shape)",
        "return Outer(*map(tf.square, self.operands), self.shape)",
        _PILOT,
    ),
    Mutant(
        "gradients are squared before they are clipped",
        "privatizer.py",
        "return tf.reduce_sum(tf.square(weighted(factors, gradients, kept)), axis=0)",
        "return tf.reduce_sum(weighted(factors, tf.square(gradients), kept), axis=0)",
        _SQUARES,
    ),
    Mutant(
        "of a weight with several uses, the squares are added up in place of the square of their sum",
        "per_example/contributions.py",
        "    def elements(self):\n        return sum(part.elements() for part in self.parts)\n",
        "    def elements(self):\n        return sum(part.elements() for part in self.parts)\n\n"
        "    def sum_of_squares(self, factors, kept):\n"
        "        return tf.add_n([part.sum_of_squares(factors, kept) for part in self.parts])\n",
        _SQUARES,
    ),
    Mutant(
        "entries of a sparse row that are given twice are taken as two",
        "per_example/sparse.py",
        "self.rows = _distinct(a)",
        "self.rows = a",
        _SQUARES,
    ),
    Mutant(
        "the pilot moves weights by squares",
        "optimizers/piloted.py",
        "return tf.where(self._is_pilot(), 0.0, rate) if self.pilot_share else rate",
        "return rate",
        _PILOT,
    ),
    Mutant(
        "two releases of a batch are priced as one",
        "optimizers/ablations.py",
        "        return (sigma, sigma)\n",
        "        return (sigma,)\n",
        "tests/test_accounting.py tests/test_model_ledger.py tests/test_trajectories.py",
    ),
    Mutant(
        "two releases of a batch are priced as two samples",
        "accounting.py",
        "return dp_accounting.GaussianDpEvent(least / math.hypot(*ratios))",
        "return dp_accounting.GaussianDpEvent(least)",
        "tests/test_accounting.py",
    ),
    Mutant(
        "steps are not counted",
        "meter.py",
        "return tf.convert_to_tensor(self._steps.assign_add(1))",
        "return tf.convert_to_tensor(self._steps)",
        "tests/test_budget.py tests/test_model_ledger.py tests/test_model_ledger_file.py",
    ),
    Mutant(
        "a budget is overspent by one step",
        "meter.py",
        "paid = self._skip > 0, self._steps < self._limit",
        "paid = self._skip > 0, self._steps <= self._limit",
        "tests/test_budget.py",
    ),
]
