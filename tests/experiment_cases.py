"""The runs and results that tests of the experiments share."""

from dp2_keras.experiments import methods, tasks
from dp2_keras.experiments.runs import Run

SGD = {"learning_rate": 4.0, "l2_norm_clip": 0.5}
RUN = Run("synthetic", "DPSGD", SGD, seed=0, epochs=1, batch_size=200, noise_multiplier=1.0)
SETTING = methods.Setting(1.0, 50, 0, 10, 500, None, tasks.get("synthetic"))


def result(**changes):
    fields = dict(method="DPSGD", varied={}, noise_multiplier=1.0, hyper={"learning_rate": 5}, source="paper")
    fields.update(search=None, paper=[0.687, 0.018], seeds=5, errors=[], epsilon=3.03051, steps=39000)
    fields.update(train={"mean": 0.9, "deviation": 0.01}, test={"mean": 0.8564, "deviation": 0.002}, curve=[])
    fields.update(keys=["a", "b"], versions=[{"keras": "3"}])
    return {**fields, **changes}


def report_of(*results):
    setting = dict(
        task="imdb", label="IMDB", task_title="IMDB", metric="accuracy", higher_is_better=True, epochs=100
    )
    setting.update(batch_size=64, train_size=25000, test_size=25000, delta=1e-5)
    setting.update(trivial={"majority class": {"train": 0.5, "test": 0.5}}, results=list(results))
    return [dict(name="main", title="Main", source="Table 2", plot=None, settings=[setting])]
