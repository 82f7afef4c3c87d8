"""Data sets for examples and tests."""

from dp2_keras.data.reviews import synthetic_reviews

__all__ = ["synthetic_reviews"]
