"""What counting reaches: the cross-entropy of unigram and bigram models on the tokens that a run is judged on.

Counts come from all training documents. Each model is smoothed in several usual ways and the best on the held-out
tokens themselves is taken, so the numbers flatter the baselines rather than the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Baseline:
    """`loss` in nats per token, and the smoothing that reached it."""

    loss: float
    smoothing: str


def unigram(documents: Iterable[Ids], labels: Ids, vocab: int) -> Baseline:
    """Frequencies of single tokens, with `k` added to every count."""
    counts = np.zeros(vocab, dtype=np.int64)
    for ids in documents:
        counts += np.bincount(ids, minlength=vocab)
    found = []
    for k in (0.01, 0.1, 1.0):
        nats = -np.log((counts[labels] + k) / (counts.sum() + k * vocab)).mean()
        found.append(Baseline(float(nats), f"add {k:g}"))
    return min(found, key=lambda baseline: baseline.loss)


def bigram(documents: Iterable[Ids], inputs: Ids, labels: Ids, vocab: int) -> Baseline:
    """Frequencies of pairs of neighbours within a document, backed off to single tokens.

    Smoothings: linear interpolation with a fixed weight; Witten and Bell (1991); interpolated Kneser-Ney with one
    discount (Chen and Goodman 1999, equation 4.36).
    """
    pairs = np.concatenate([ids[:-1] * vocab + ids[1:] for ids in documents if len(ids) > 1])
    keys, counts = np.unique(pairs, return_counts=True)
    before, after = keys // vocab, keys % vocab
    context_total = np.bincount(before, weights=counts, minlength=vocab)
    context_kinds = np.bincount(before, minlength=vocab)
    wanted = inputs * vocab + labels
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    count = np.where(keys[place] == wanted, counts[place], 0)
    total = np.maximum(context_total[inputs], 1)
    kinds = context_kinds[inputs]

    single = np.bincount(after, weights=counts, minlength=vocab) + 0.01
    single /= single.sum()
    # Kneser-Ney backs off to how many different tokens a token follows, not to how often it occurs.
    spread = np.bincount(after, minlength=vocab) + 0.01
    spread /= spread.sum()
    unseen = context_total[inputs] == 0
    found = []
    for weight in (0.7, 0.8, 0.9, 0.95):
        share = np.where(unseen, 0.0, weight)
        found.append((share * count / total + (1 - share) * single[labels], f"interpolation {weight:g}"))
    share = np.where(unseen, 0.0, total / np.maximum(total + kinds, 1))
    found.append((share * count / total + (1 - share) * single[labels], "Witten-Bell"))
    for discount in (0.5, 0.75, 0.9):
        rest = np.where(unseen, 1.0, discount * kinds / total)
        found.append((np.maximum(count - discount, 0) / total + rest * spread[labels], f"Kneser-Ney {discount:g}"))
    return min((Baseline(float(-np.log(p).mean()), name) for p, name in found), key=lambda baseline: baseline.loss)


def bits_per_byte(loss: float, tokens: int, size: int) -> float:
    """Nats per token as bits per UTF-8 byte, for `tokens` that cover `size` bytes."""
    return loss * tokens / math.log(2) / size


def pairs_of(batches: Iterable[object]) -> tuple[Ids, Ids, int]:
    """Inputs and labels of all trained places of a run's batches, and the UTF-8 bytes that the labels cover."""
    inputs, labels, size = [], [], 0
    for batch in batches:
        trained = batch.labels_BS != -100  # type: ignore[attr-defined]
        inputs.append(batch.ids_BS[trained].numpy())  # type: ignore[attr-defined]
        labels.append(batch.labels_BS[trained].numpy())  # type: ignore[attr-defined]
        size += batch.bytes  # type: ignore[attr-defined]
    return np.concatenate(inputs), np.concatenate(labels), size


def measure(train: object, batches: Iterable[object], vocab: int) -> dict[str, dict[str, float | str]]:
    """{"unigram" | "bigram": {"loss", "bits_per_byte", "smoothing"}} on `batches`, counted on all of `train`."""

    def documents() -> Iterator[Ids]:
        return train.document_tokens()  # type: ignore[attr-defined,no-any-return]

    inputs, labels, size = pairs_of(batches)
    found = {
        "unigram": unigram(documents(), labels, vocab),
        "bigram": bigram(documents(), inputs, labels, vocab),
    }
    return {
        name: {
            "loss": baseline.loss,
            "bits_per_byte": bits_per_byte(baseline.loss, len(labels), size),
            "smoothing": baseline.smoothing,
        }
        for name, baseline in found.items()
    }
