"""The written form of a layout."""

from __future__ import annotations

import pytest

from moesaic.spec.errors import SpecError
from moesaic.spec.layout import parse_layout, written
from moesaic.spec.tables import LayoutTable

FULL = "pp2 dp4 cp1 tp2 / edp1 ep8 etp1"


@pytest.mark.parametrize("text", [FULL, "pp2 dp4 tp2/ep8", "tp2 dp4 pp2 / ep8 etp1"])
def test_written_form_reads_back(text: str) -> None:
    assert written(parse_layout(text)) == FULL


def test_automatic_data_parallelism_needs_its_degree() -> None:
    layout = LayoutTable(tp=2, ep=4)
    assert written(layout, dp=8) == "pp1 dp8 cp1 tp2 / edp4 ep4 etp1"
    with pytest.raises(SpecError, match="auto"):
        written(layout)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("dp4 / ep3", "1·1·4 = 4"),
        ("dp8 / edp2 ep8", "edp1"),
        ("dq4", "'dp'"),
        ("ep4", "'ep4'"),
        ("dp2 dp4", "dp twice"),
        ("dp0", "at least 1"),
        ("dp2 / ep2 / etp1", "more than one slash"),
        ("dp", "'dp'"),
    ],
)
def test_illegal_forms(text: str, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_layout(text)
    assert part in str(caught.value)
