"""Errors that a user can act on: one sentence, the numbers in it, and a way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MoesaicError(Exception):
    """Base of the errors that the command line prints without a traceback.

    `exit_code` is what the process returns: 2 for bad input or a refusal, 4 for a non-finite loss.
    """

    exit_code = 2


class SpecError(MoesaicError):
    """A description (model, run file, layout) that is wrong or incomplete."""


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
    """A half-sentence that names the closest known words, or the first few if none is close."""
    names = sorted(set(known))
    close = difflib.get_close_matches(word, names, n=count, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    shown = ", ".join(repr(name) for name in names[:12])
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"known are {shown}{more}"
