"""Who is measured: each contender's environment, script, and how it is called."""

from __future__ import annotations

import dataclasses

import workloads


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to train a workload.

    Attributes:
        name: what its script knows it by.
        environment: whose Python runs it.
        script: a file of this directory.
        algorithm: what a step computes.
        call: how it is called, in words.
        growth: whether it runs the growth workloads too.
        heavy: workloads on which it takes gigabytes: there it runs by itself.
        slow: workloads on which a step takes a large part of a second. On these and on heavy ones its turns
            are short.
    """

    name: str
    environment: str
    script: str
    algorithm: str
    call: str
    growth: bool = False
    heavy: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()

    def runs(self, workload: workloads.Workload) -> bool:
        """Whether this contender trains a workload."""
        return self.growth or workload in workloads.MAIN

    def steps(self, workload: workloads.Workload) -> int:
        """Steps of a turn."""
        return 4 if workload.name in (*self.heavy, *self.slow) else 20


# The environments, and which versions in them matter.
PACKAGES = {
    "modern": ["dp2-keras", "tensorflow", "keras", "numpy"],
    "classic": ["tensorflow-privacy", "tensorflow", "keras", "numpy"],
    "torch": ["opacus", "torch", "numpy"],
    "jax": ["jax-privacy", "jax", "numpy"],
}


def _keras(name, algorithm, call, growth=True, **options):
    return Contender(name, "modern", "contend_keras.py", algorithm, call, growth=growth, **options)


def _tf_privacy(name, call, *heavy):
    heavy, script = ("W1-1024", *heavy), "contend_tf_privacy.py"
    return Contender(name, "classic", script, "DP-SGD", call, heavy=heavy, slow=("W2-64", "W3-1024"))


def _opacus(name, call, **options):
    return Contender(name, "torch", "contend_opacus.py", "DP-SGD", call, **options)


def _jax_privacy(name, algorithm, call):
    return Contender(name, "jax", "contend_jax_privacy.py", algorithm, call, slow=("W2-64", "W2-256"))


CONTENDERS = [
    _keras("keras", "RMSprop, no privacy", "`model.fit` of Keras 3: the floor"),
    _keras(
        "dp2-sgd", "DP², SGD phase", "`make_private(model)`, `DP2RMSprop` that stays in its SGD phase, `fit`"
    ),
    _keras("dp2-adaptive", "DP², adaptive phase", "the same, that stays in its adaptive phase"),
    _keras("jit-dp2-adaptive", "DP², adaptive phase", "the same, with `jit_compile=True`", growth=False),
    _keras(
        "dp2-vectorized-adaptive",
        "DP², adaptive phase",
        'the same, with `compile(method="vectorized")`',
        heavy=("W2-256", "width-4096", "batch-1024"),
        slow=("W2-64", "W3-1024"),
    ),
    _tf_privacy(
        "tfp-vectorized",
        "`VectorizedDPKerasSGDOptimizer(num_microbatches=batch)`, `fit`",
        *("W2-256", "W4-250", "W5-64"),
    ),
    _tf_privacy("tfp-dpmodel", "`DPModel`, compiled with XLA as is its default, `fit`", "W2-256"),
    _tf_privacy(
        "tfp-fast", "`DPModel(layer_registry=...)`: its default registry and the layers of W5, `fit`"
    ),
    _opacus(
        "opacus-hooks",
        "`PrivacyEngine.make_private`, loop by hand",
        heavy=("W2-256",),
        slow=("W2-64", "W3-1024"),
    ),
    _opacus("opacus-ghost", 'the same, with `grad_sample_mode="ghost"`', growth=True),
    _jax_privacy(
        "jax-privacy",
        "DP-SGD",
        "`clipped_grad` and `gaussian_privatizer` in one `jax.jit`; `microbatch_size=1`, but all at once for "
        "W4, which is what runs fastest",
    ),
    _jax_privacy(
        "jax-privacy-scaled", "DP², adaptive phase", "the same, with a `pre_clipping_transform` that scales"
    ),
]
