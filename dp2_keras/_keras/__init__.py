"""The one place that knows Keras 2 from Keras 3.

Everything below speaks one dialect; `keras3.py` and `keras2.py` translate it. Both
define the same names, and what a name means is said once, in `keras3.py`.
"""

import keras

KERAS_3 = hasattr(keras, "StatelessScope")

if KERAS_3 and tuple(int(part) for part in keras.__version__.split(".")[:2]) < (3, 12):
    raise ImportError(f"dp2_keras needs Keras 2.14 or Keras 3.12 and above. Received: {keras.__version__}")

if KERAS_3 and keras.backend.backend() != "tensorflow":
    raise ImportError(
        "dp2_keras needs Keras's TensorFlow backend: set KERAS_BACKEND=tensorflow before the "
        f"first import of keras. Received: backend={keras.backend.backend()!r}"
    )

if KERAS_3:
    from dp2_keras._keras.keras3 import *  # noqa: F403
else:
    from dp2_keras._keras.keras2 import *  # noqa: F403
