"""Which documents are held out for validation."""

from __future__ import annotations

import numpy as np

from moesaic.train.data.errors import DataError
from moesaic.train.data.order import permuted
from moesaic.train.data.packing import Stream
from moesaic.train.data.store import TokenStore

SPLIT_SEED = 20240229
"""Fixed, so that runs with different seeds are judged on the same held-out documents."""


def whole(store: TokenStore) -> Stream:
    """All documents of `store`."""
    return Stream(store, store.begin, store.length)


def split(store: TokenStore, fraction: float) -> tuple[Stream, Stream | None, str]:
    """Training stream, validation stream (None for a fraction of 0), and how it was done.

    Whole documents are drawn in a fixed random order until they hold `fraction` of the tokens; one that would
    overshoot by half is passed over. Where that comes out at less than half the fraction, as with one long document,
    the end of the data is held out instead. Raises DataError unless 0 ≤ fraction < 1 and both sides get tokens.
    """
    if not 0 <= fraction < 1:
        raise DataError(f"data.validation_fraction is {fraction}; it must be at least 0 and below 1.")
    if fraction == 0:
        return whole(store), None, "nothing is held out"
    total = store.tokens
    target = fraction * total
    held = np.zeros(store.documents, dtype=bool)
    taken = 0
    if store.documents > 1:
        for start in range(0, store.documents, 4096):
            places = np.arange(start, min(start + 4096, store.documents))
            for document in permuted(places, store.documents, SPLIT_SEED, 0):
                size = int(store.length[document])
                if taken < target and taken + size <= 1.5 * target:
                    held[document] = True
                    taken += size
            if taken >= target:
                break
    if taken >= 0.5 * target and not held.all():
        train = Stream(store, store.begin[~held], store.length[~held])
        validation = Stream(store, store.begin[held], store.length[held])
        return train, validation, f"{int(held.sum()):,} of {store.documents:,} documents held out"
    keep = total - max(2, round(target))
    if keep < 2:
        raise DataError(
            f"the data has {total:,} tokens; holding out {fraction:.3g} of it leaves {keep}. Give more text, "
            "or data.validation_path."
        )
    ends = np.cumsum(store.length)
    cut = int(np.searchsorted(ends, keep, side="left"))
    inside = keep - int(ends[cut] - store.length[cut])
    train = Stream(store, store.begin[: cut + 1], np.append(store.length[:cut], inside))
    begin = store.begin[cut:].copy()
    length = store.length[cut:].copy()
    begin[0] += inside
    length[0] -= inside
    filled = length > 0
    return train, Stream(store, begin[filled], length[filled]), f"the last {total - keep:,} tokens held out"
