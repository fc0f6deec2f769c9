"""Rules against facts that others fix: published sizes, and names that must not collide."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

from moesaic.cost.counts import parameters
from moesaic.hf import WeightsError, rules
from moesaic.hf.mapping import OWN_FAMILY
from moesaic.hf.naming import NAMINGS
from moesaic.spec.families import FAMILIES, load_model_spec
from moesaic.spec.presets import PRESETS


def test_every_family_has_names() -> None:
    assert set(FAMILIES) <= set(NAMINGS) | {OWN_FAMILY}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets(preset: str) -> None:
    """Every tensor has its own keys, and together they are the published number of parameters."""
    spec = load_model_spec(preset)
    found = rules(spec)
    keys = Counter(piece.key for rule in found for piece in rule.layout)
    keys.update(key for rule in found for key in rule.copies)
    assert max(keys.values()) == 1
    on_disk = sum(prod(piece.shape) for rule in found if not rule.mtp for piece in rule.layout if not rule.fp32)
    assert on_disk == parameters(spec).total
    for rule in found:
        assert prod(rule.shape) == sum(prod(piece.shape) for piece in rule.layout)


def test_unknown_family_names_the_nearest() -> None:
    spec = load_model_spec("mixtral-8x7b")
    with pytest.raises(WeightsError, match="'olmoe'"):
        rules(spec, "olmo")
