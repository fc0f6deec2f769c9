import math
import struct
import zlib
from base64 import b64decode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.report.numbers import bins, duration, short, smooth, thin, ticks
from moesaic.report.png import DEAD, SHADES, heat_png, shade


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12345, "12.3k"), (46.7e9, "46.7B"), (0.00042, "0.00042"), (1.0, "1"), (None, "–"), (math.nan, "–")],
)
def test_short(value, text):
    assert short(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(3.25, "3.2 s"), (75, "1 min 15 s"), (3600, "1 h 0 min"), (None, "–")])
def test_duration(seconds, text):
    assert duration(seconds) == text


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 12))
def test_ticks_lie_inside_and_are_evenly_spaced(low, span, count):
    high = low + span
    values = ticks(low, high, count)
    assert all(low - 1e-6 * span <= value <= high + 1e-6 * span for value in values)
    assert len(values) <= count + 1


@given(st.integers(1, 500), st.integers(1, 100))
def test_bins_cover_everything_once(count, wanted):
    slices = bins(count, wanted)
    assert len(slices) <= wanted
    assert [index for start, end in slices for index in range(start, end)] == list(range(count))


def test_thinning_keeps_the_ends_and_a_constant():
    points = [(float(x), 3.0) for x in range(5000)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert thinned[0] == points[0] and thinned[-1] == points[-1]
    assert all(y == 3.0 for _, y in thinned)


def test_smoothing_keeps_a_straight_line():
    points = [(float(x), 2.0 * x) for x in range(50)]
    assert [y for _, y in smooth(points, 9)] == pytest.approx([y for _, y in points])
    assert [x for x, _ in smooth(points, 9)] == [x for x, _ in points]


def test_shades_are_symmetric_in_doublings():
    assert shade(1.0) == SHADES
    assert shade(2.0) - SHADES == SHADES - shade(0.5) == SHADES // 2
    assert shade(100.0) == 2 * SHADES and shade(0.001) == 0
    assert shade(0) == DEAD


def test_the_picture_holds_the_cells():
    cells = [[0, 5, DEAD], [SHADES, 2 * SHADES, 1]]
    content = b64decode(heat_png(cells).removeprefix("data:image/png;base64,"))
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    position, chunks = 8, {}
    while position < len(content):
        (length,) = struct.unpack_from(">I", content, position)
        kind = content[position + 4 : position + 8]
        body = content[position + 8 : position + 8 + length]
        assert struct.unpack_from(">I", content, position + 8 + length)[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        position += 12 + length
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (3, 2, 8, 3, 0, 0, 0)
    assert zlib.decompress(chunks[b"IDAT"]) == b"\0" + bytes(cells[0]) + b"\0" + bytes(cells[1])
    assert len(chunks[b"PLTE"]) == 3 * (DEAD + 1) == 3 * len(chunks[b"tRNS"])
