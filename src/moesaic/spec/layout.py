"""The written form of a layout: `pp2 dp4 cp1 tp2 / edp1 ep8 etp1`, dense mesh before the slash, expert mesh after.

Both meshes cover the same processes of a pipeline stage, so tp·cp·dp = etp·ep·edp (parallel folding).
"""

from __future__ import annotations

import re

from .errors import SpecError, nearest
from .tables import LayoutTable

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("edp", "ep", "etp")
_DEGREE = re.compile(r"([a-z]+)([0-9]+)")


def written(layout: LayoutTable, dp: int | None = None) -> str:
    """The written form. `dp` stands in for `layout.dp = "auto"`.

    Raises:
        SpecError: dp is not known, or the two meshes do not cover the same processes.
    """
    degree = layout.dp if layout.dp != "auto" else dp
    if degree is None:
        raise SpecError('layout.dp is "auto": its degree is known once the number of processes is.')
    edp = _expert_data_degree(layout.tp, layout.cp, degree, layout.ep, layout.etp)
    return f"pp{layout.pp} dp{degree} cp{layout.cp} tp{layout.tp} / edp{edp} ep{layout.ep} etp{layout.etp}"


def parse_layout(text: str) -> LayoutTable:
    """The degrees that a written form gives; those left out are 1, edp follows from the others and is checked if given.

    Raises:
        SpecError: an unknown or repeated name, a degree of 0, or two meshes of different size.
    """
    degrees: dict[str, int] = {}
    for side, names in zip(_sides(text), (DENSE, EXPERT), strict=True):
        for word in side.split():
            match = _DEGREE.fullmatch(word)
            name = match[1] if match else word
            if match is None or name not in names:
                raise SpecError(f"{word!r} in layout {text!r}: {nearest(name, names)}")
            if name in degrees:
                raise SpecError(f"layout {text!r} gives {name} twice.")
            if int(match[2]) < 1:
                raise SpecError(f"{word!r} in layout {text!r}: a degree is at least 1.")
            degrees[name] = int(match[2])
    given = degrees.pop("edp", None)
    layout = LayoutTable.model_validate({"dp": 1} | degrees)
    assert layout.dp != "auto"
    edp = _expert_data_degree(layout.tp, layout.cp, layout.dp, layout.ep, layout.etp)
    if given is not None and given != edp:
        raise SpecError(
            f"layout {text!r} gives edp{given}, but tp·cp·dp = {layout.tp}·{layout.cp}·{layout.dp} and etp·ep = "
            f"{layout.etp}·{layout.ep} make it edp{edp}."
        )
    return layout


def _sides(text: str) -> tuple[str, str]:
    dense, _, expert = text.partition("/")
    if "/" in expert:
        raise SpecError(f"layout {text!r} has more than one slash; write it like 'pp2 dp4 cp1 tp2 / edp1 ep8 etp1'.")
    return dense, expert


def _expert_data_degree(tp: int, cp: int, dp: int, ep: int, etp: int) -> int:
    dense, expert = tp * cp * dp, ep * etp
    if dense % expert:
        raise SpecError(
            f"tp·cp·dp = etp·ep·edp does not hold: {tp}·{cp}·{dp} = {dense} is not a multiple of "
            f"etp·ep = {etp}·{ep} = {expert}."
        )
    return dense // expert
