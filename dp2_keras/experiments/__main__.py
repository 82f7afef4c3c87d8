"""`python -m dp2_keras.experiments`."""

import sys

from dp2_keras.experiments.command import main

if __name__ == "__main__":
    sys.exit(main())
