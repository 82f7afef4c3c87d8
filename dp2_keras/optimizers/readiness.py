"""What must be so before an optimizer may take a step; each check says what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dp2_keras import public_data
from dp2_keras.public_data import PublicGradients


def check_variables(variables: Sequence) -> None:
    """Refuses a step of nothing, and of what has no norm.

    Raises:
        ValueError: if there is no variable, or one that is not of real numbers.
    """
    if not variables:
        raise ValueError("The model must have a trainable weight. Received: trainable_variables=[]")
    for variable in variables:
        if not tf.as_dtype(variable.dtype).is_floating:
            raise ValueError(
                "Trainable variables must be real numbers to have a norm. Received: "
                f"'{variable.name}' of dtype {variable.dtype}"
            )


def check_batch_size(batch_size: int | None) -> None:
    """Refuses a step without a public number to divide by.

    Raises:
        ValueError: if there is none.
    """
    if batch_size is None:
        raise ValueError(
            "`expected_batch_size` must be given where `fit` gets no `batch_size`: the noisy "
            "sum is divided by a public number, not by how many examples came. "
            "Received: expected_batch_size=None"
        )


def check_replicas() -> None:
    """Refuses a step that one of several replicas would take by itself.

    Raises:
        ValueError: if this is one of several.
    """
    count = tf.distribute.get_strategy().num_replicas_in_sync
    if count > 1 and not tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Several replicas must be trained by `fit` of a private model, in which they meet: "
            "the noise of each by itself would not add up to the stated deviation. Received: "
            f"{count} replicas"
        )


def check_public(optimizer: str, needed: str | None, public: PublicGradients | None) -> None:
    """Refuses a step without the public gradients that it needs, or with some that it does not.

    Args:
        optimizer: its name.
        needed: which public gradients it needs; None for none.
        public: what it got.

    Raises:
        ValueError: if one is there without the other.
    """
    received = f"Received: {type(public).__name__}"
    if needed is not None and not isinstance(public, PublicGradients):
        raise ValueError(f"{public_data.MISSING.format(optimizer=optimizer)} {received}")
    if needed is None and public is not None:
        raise ValueError(f"{optimizer} takes no public gradients. {received}")
