"""The error of this room."""

from __future__ import annotations

from moesaic.spec.errors import MoesaicError


class DataError(MoesaicError):
    """Training data or a tokenizer that cannot be used as given."""
