"""What can be wrong with weights on disk."""

from __future__ import annotations

from moesaic.spec.errors import MoesaicError


class WeightsError(MoesaicError):
    """Weights that cannot be read, do not fit the model, or cannot be written."""
