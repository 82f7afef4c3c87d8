"""Trains the same models on one device and on several, in processes of their own, for test_replicas.py.

    python tests/replica_runs.py quick      one of the models, and noise, as "mirrored" has them
    python tests/replica_runs.py mirrored   on one device, and on two logical devices of one process
    python tests/replica_runs.py worker     as one of the workers that TF_CONFIG names
    python tests/replica_runs.py pair       as one of them, with two logical devices
    python tests/replica_runs.py endless    as one of them that does not stop by itself

TensorFlow takes its devices once for each process. What is printed last is a JSON object of numbers.
"""

import json
import os
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import dp2_keras as dp2

N, WIDTH, BATCH = 200, 5, 20
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, WIDTH)).astype(np.float32)
Y = (X.sum(axis=1, keepdims=True) > 0).astype(np.float32)


def rmsprop(**kwargs):
    return dp2.DP2RMSprop(
        0.3, 2.0, noise_multiplier=0.8, sgd_steps=3, adaptive_steps=4, sgd_learning_rate=0.5,
        sgd_l2_norm_clip=0.7, eps=1e-3, **kwargs,
    )  # fmt: skip


def decayed(**kwargs):
    return dp2.DPSGD(0.5, 1.0, noise_multiplier=0.5, weight_decay=0.01, use_ema=True, **kwargs)


def adam(**kwargs):
    return dp2.DPAdam(0.1, 1.0, noise_multiplier=0.5, **kwargs)


def noise_floor(**kwargs):
    return dp2.DP2NoiseFloor(noise_multiplier=1.0, weight_decay=0.01, **kwargs)


def piloted(**kwargs):
    return noise_floor(pilot_share=0.8, **kwargs)


def extra_query(**kwargs):
    return dp2.DP2RMSpropExtraQuery(0.3, 2.0, noise_multiplier=0.8, delay=3, eps=1e-3, **kwargs)


def model_of(optimizer, compiled=None):
    """A small network with a regulariser, the same in every process."""
    dense = keras.layers.Dense
    initial = [keras.initializers.RandomNormal(seed=k) for k in range(2)]
    hidden = dense(6, "tanh", kernel_initializer=initial[0], kernel_regularizer=keras.regularizers.L2(0.01))
    output = dense(1, "sigmoid", kernel_initializer=initial[1])
    model = dp2.DP2Sequential([keras.Input((WIDTH,)), hidden, output])
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], **compiled or {})
    return model


def numbers(model, history=None):
    logs = {} if history is None else {k: v for k, v in history.history.items() if k != "lr"}
    return {
        "weights": [float(x) for w in model.get_weights() for x in np.ravel(w)],
        "second_moments": [float(x) for v in model.optimizer.second_moments().values() for x in np.ravel(v)],
        "logs": {name: [float(x) for x in values] for name, values in logs.items()},
        "steps": model.ledger.steps,
        "iterations": int(model.optimizer.iterations.numpy()),
        "epsilon": model.privacy_spent(1e-3),
    }


def fitted(optimizer, compiled=None, **kwargs):
    model = model_of(optimizer(noise_seed=7), compiled)
    return numbers(model, model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, **kwargs))


def own_batches():
    model = model_of(rmsprop(noise_seed=7, expected_batch_size=BATCH))
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    return numbers(model, model.fit(batches, epochs=2, verbose=0, dataset_size=N))


def within_budget():
    budget = dp2.PrivacyBudget(epsilon=4.0, delta=1e-3)
    return fitted(rmsprop, callbacks=[budget])


def noise():
    """Of one step that has nothing to learn: noise, as often as there is a replica that adds it."""
    model = dp2.DP2Sequential(
        [keras.Input((100,)), keras.layers.Dense(400, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(dp2.DPSGD(1.0, l2_norm_clip=0.5, noise_multiplier=3.0), "mse")
    nothing = np.zeros((40, 100), np.float32)
    model.fit(nothing, np.zeros((40, 400), np.float32), batch_size=40, verbose=0)
    weights = model.trainable_variables[0]
    held = getattr(getattr(weights, "value", weights), "values", None)
    copies = [weights.numpy()] if held is None else [copy.numpy() for copy in held]
    return {
        "deviation": float(40 * copies[0].std()),
        "copies_differ": float(max(np.abs(c - copies[0]).max() for c in copies)),
    }


def refusals():
    model = model_of(rmsprop(noise_seed=7))
    attempts = {
        "train_on_batch": lambda: model.train_on_batch(X[:BATCH], Y[:BATCH]),
        "poisson_batches": lambda: model.fit(dp2.poisson_batches(X, Y, batch_size=BATCH, steps=3)),
    }
    return {name: message_of(attempt) for name, attempt in attempts.items()} | {"steps": model.ledger.steps}


def message_of(attempt):
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return "accepted"


CASES = {
    "ghost": lambda: fitted(rmsprop),
    "vectorized": lambda: fitted(rmsprop, {"method": "vectorized", "physical_batch_size": 4}),
    "eager": lambda: fitted(rmsprop, {"run_eagerly": True}),
    "compiled by XLA": lambda: fitted(rmsprop, {"jit_compile": True}),
    "several steps at once": lambda: fitted(rmsprop, {"steps_per_execution": 5}),
    "decay and averages": lambda: fitted(decayed),
    "adam": lambda: fitted(adam),
    "weights relative to the noise": lambda: fitted(noise_floor),
    "a pilot": lambda: fitted(piloted),
    "two releases": lambda: fitted(extra_query),
    "batches of one's own": own_batches,
    "budget": within_budget,
}


def run(case, strategy):
    with strategy.scope():
        return case()


def split_cpu():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def two_devices():
    split_cpu()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def quick():
    both, case = two_devices(), CASES["ghost"]
    return {"one": case(), "two": run(case, both), "noise": run(noise, both)}


def mirrored():
    alone, both = tf.distribute.get_strategy(), two_devices()
    return {
        "one": {name: case() for name, case in CASES.items()},
        "two": {name: run(case, both) for name, case in CASES.items()},
        "noise": {"one": noise(), "two": run(noise, both)},
        "refusals": run(refusals, both),
        "replicas": [alone.num_replicas_in_sync, both.num_replicas_in_sync],
    }


def worker():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with tempfile.TemporaryDirectory() as directory:
        ledger_file = os.path.join(directory, "ledger.jsonl")
        case = lambda: fitted(rmsprop, ledger_file=ledger_file)  # noqa: E731
        return {
            "ghost": run(case, strategy),
            "budget": run(within_budget, strategy),
            "noise": run(noise, strategy),
            "wrote_a_ledger": os.path.exists(ledger_file),
            "replicas": strategy.num_replicas_in_sync,
        }


def pair():
    """A worker of two replicas: without GPUs, TensorFlow would take one device only."""
    from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

    split_cpu()
    both = lambda self, resolver, worker: ([f"{worker}/device:CPU:{k}" for k in range(2)], "CPU")  # noqa: E731
    CollectiveAllReduceExtended._initialize_local_devices = both
    return worker()


def endless():
    """A worker that trains until it is stopped, and says when it has begun."""
    began = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: print("a step", flush=True))
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = model_of(rmsprop(noise_seed=7))
        model.fit(X, Y, batch_size=BATCH, epochs=10**6, verbose=0, callbacks=[began])


if __name__ == "__main__":
    cases = {"quick": quick, "mirrored": mirrored, "worker": worker, "pair": pair, "endless": endless}
    print("\n" + json.dumps(cases[sys.argv[1]]()))
