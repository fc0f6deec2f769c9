"""The order in which sequences are trained: a function of the seed and the position alone.

A Feistel network over the smallest even-bit power of two that holds all sequences is a permutation that can be
evaluated at any position without storing it; positions that fall outside are walked along their cycle until they
come back (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, §3). So a run that resumes needs the step
number and nothing else, and a corpus of a billion sequences costs no memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDS = 8
MASK = (1 << 64) - 1


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every input bit reaches every output bit. Wraps modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """One key per round from the seed and the epoch, uint64 [ROUNDS]."""
    state = mix(np.array([seed & MASK], dtype=np.uint64))
    state = mix(state ^ np.uint64((epoch * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & MASK))
    rounds = np.arange(1, ROUNDS + 1, dtype=np.uint64)
    return mix(state + rounds * np.uint64(0x9E3779B97F4A7C15))


def permuted(positions: ArrayLike, count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The sequences at `positions` of one epoch.

    positions: integers in [0, count), any shape. Returns int64 of the same shape; over all positions every number
    below `count` appears exactly once. The same on every machine and for any grouping of the positions.
    """
    source = np.asarray(positions, dtype=np.int64)
    if source.size and (source.min() < 0 or source.max() >= count):
        raise ValueError(f"positions must be in [0, {count}), got {source.min()} to {source.max()}")
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    keys = round_keys(seed, epoch)
    values = source.astype(np.uint64).reshape(-1)
    pending = np.arange(values.size)
    while pending.size:
        block = values[pending]
        left, right = block >> half, block & low
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & low)
        block = (left << half) | right
        values[pending] = block
        pending = pending[block >= np.uint64(count)]
    return values.astype(np.int64).reshape(source.shape)


def sequences_at(first: int, count_wanted: int, sequences: int, seed: int) -> NDArray[np.int64]:
    """Sequence numbers of the places first … first + count_wanted − 1 of an endless run over the data.

    Place g belongs to epoch g // sequences; each epoch has its own permutation. Returns int64 [count_wanted].
    """
    places = np.arange(first, first + count_wanted, dtype=np.int64)
    epochs, positions = np.divmod(places, sequences)
    out = np.empty_like(places)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        out[chosen] = permuted(positions[chosen], sequences, seed, int(epoch))
    return out
