"""Audits: how much privacy a training step loses at least, measured on the step itself."""

from dp2_keras.auditing.attack import audit
from dp2_keras.auditing.result import Audit

__all__ = ["Audit", "audit"]
