"""A heat map as a palette PNG in a data URI: one byte per cell, so that thousands of experts stay small."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

SHADES = 16
DEAD = 2 * SHADES + 1
OVER_RGB = (217, 98, 20)
UNDER_RGB = (36, 113, 206)
DEAD_RGB = (190, 24, 93)


def shade(ratio: float | None) -> int:
    """Palette index of a load relative to the mean: SHADES is balanced, one shade per eighth of a doubling,
    up to four times above or below; DEAD for no load at all."""
    if ratio is None:
        return SHADES
    if ratio <= 0:
        return DEAD
    return SHADES + max(-SHADES, min(SHADES, round(math.log2(ratio) * SHADES / 2)))


def colour(index: int) -> tuple[tuple[int, int, int], float]:
    """RGB and opacity of a palette index. A balanced load is transparent, so that it takes the page's colour."""
    if index == DEAD:
        return DEAD_RGB, 1.0
    distance = abs(index - SHADES) / SHADES
    return (OVER_RGB if index > SHADES else UNDER_RGB), distance**0.85


def heat_png(cells: Sequence[Sequence[int]]) -> str:
    """Data URI of a PNG with one pixel per cell; `cells` are rows of palette indices of equal length."""
    height, width = len(cells), len(cells[0])
    palette = b"".join(bytes(colour(index)[0]) for index in range(DEAD + 1))
    alpha = bytes(round(255 * colour(index)[1]) for index in range(DEAD + 1))
    lines = b"".join(b"\0" + bytes(row) for row in cells)
    content = (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
        + _chunk(b"PLTE", palette)
        + _chunk(b"tRNS", alpha)
        + _chunk(b"IDAT", zlib.compress(lines, 9))
        + _chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii")


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
