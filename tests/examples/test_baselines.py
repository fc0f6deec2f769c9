import itertools
import math
from collections import Counter

import numpy as np
import pytest


def documents(vocab: int, seed: int = 0):
    chance = np.random.default_rng(seed)
    return [chance.integers(0, vocab, size).astype(np.int64) for size in (40, 1, 25, 60)]


def test_add_k_by_hand(baselines):
    train = [np.array([0, 0, 1])]
    found = baselines.unigram(train, np.array([0, 2]), 3)
    by_hand = [-(math.log((2 + k) / (3 + 3 * k)) + math.log(k / (3 + 3 * k))) / 2 for k in (0.01, 0.1, 1.0)]
    assert found.loss == pytest.approx(min(by_hand))


def test_a_uniform_unigram_is_the_logarithm_of_the_vocabulary(baselines):
    train = [np.arange(50)]
    assert baselines.unigram(train, np.arange(50), 50).loss == pytest.approx(math.log(50))


def test_the_bigram_is_the_best_of_its_smoothings_computed_pair_by_pair(baselines):
    vocab = 7
    train, (inputs, labels) = documents(vocab), np.random.default_rng(1).integers(0, vocab, (2, 30))
    pairs = Counter((a, b) for ids in train for a, b in itertools.pairwise(ids.tolist()))
    after, kinds_before = Counter(), Counter()
    for (_, b), count in pairs.items():
        after[b] += count
        kinds_before[b] += 1
    total = {a: sum(count for (x, _), count in pairs.items() if x == a) for a in range(vocab)}
    kinds = {a: sum(1 for x, _ in pairs if x == a) for a in range(vocab)}

    def single(b):
        return (after[b] + 0.01) / (sum(after.values()) + 0.01 * vocab)

    def spread(b):
        return (kinds_before[b] + 0.01) / (sum(kinds_before.values()) + 0.01 * vocab)

    def mixed(share):
        return lambda a, b: share(a) * pairs[a, b] / total[a] + (1 - share(a)) * single(b)

    def kneser_ney(d):
        return lambda a, b: max(pairs[a, b] - d, 0) / total[a] + d * kinds[a] / total[a] * spread(b)

    models = [mixed(lambda _, w=w: w) for w in (0.7, 0.8, 0.9, 0.95)]
    models.append(mixed(lambda a: total[a] / (total[a] + kinds[a])))
    models += [kneser_ney(d) for d in (0.5, 0.75, 0.9)]
    losses = [
        -sum(math.log(model(int(a), int(b))) for a, b in zip(inputs, labels, strict=True)) / len(labels)
        for model in models
    ]
    assert baselines.bigram(train, inputs, labels, vocab).loss == pytest.approx(min(losses))


def test_every_smoothed_bigram_is_a_probability(baselines, monkeypatch):
    vocab = 6
    # Token 5 is never seen, as input or label.
    train = documents(vocab - 1, seed=3)
    grid = np.array([(a, b) for a in range(vocab) for b in range(vocab)])
    seen = []
    real = np.log
    monkeypatch.setattr(np, "log", lambda p: seen.append(p) or real(p))
    baselines.bigram(train, grid[:, 0], grid[:, 1], vocab)
    assert len(seen) == 8
    for p in seen:
        assert p.reshape(vocab, vocab).sum(axis=1) == pytest.approx(np.ones(vocab))


def test_pairs_never_cross_documents(baselines):
    apart = baselines.bigram([np.array([0, 1]), np.array([2, 3])], np.array([1]), np.array([2]), 4)
    together = baselines.bigram([np.array([0, 1, 2, 3])], np.array([1]), np.array([2]), 4)
    assert together.loss < apart.loss


def test_bits_per_byte(baselines):
    assert baselines.bits_per_byte(math.log(2), tokens=10, size=20) == pytest.approx(0.5)
