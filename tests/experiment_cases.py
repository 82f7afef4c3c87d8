"""The runs that tests of the experiments share."""

from dp2_keras.experiments import methods, tasks
from dp2_keras.experiments.runs import Run

SGD = {"learning_rate": 4.0, "l2_norm_clip": 0.5}
RUN = Run("synthetic", "DPSGD", SGD, seed=0, epochs=1, batch_size=200, noise_multiplier=1.0)
SETTING = methods.Setting(1.0, 50, 0, 10, 500, None, tasks.get("synthetic"))
