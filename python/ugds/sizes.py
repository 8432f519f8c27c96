# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write them. Everywhere that uGDS takes a size, it takes an `int` of bytes or such a text."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_LIMIT = 1 << 63


def parse(size: int | str) -> int:
    """Bytes of `size`: an int, or a text such as "4096", "64MiB", "1.5GiB" or "2GB" (a billion twice).

    Raises ValueError for what is not a size: no number, an unknown unit, negative, a fraction of a byte, 2^63 or more.
    """
    if isinstance(size, int):
        count = Fraction(size)
    else:
        match = _FORM.fullmatch(size)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(
                f'"{size}" is not a size; write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB'
            )
        count = Fraction(match[1]) * unit
    if count.denominator != 1:
        raise ValueError(f'"{size}" is not a whole number of bytes')
    if not 0 <= count < _LIMIT:
        raise ValueError(f'"{size}" is out of range: sizes are 0 to 2^63 - 1 bytes')
    return int(count)


def format(size: int) -> str:
    """`size` bytes for people: "4 KiB", "1.5 GiB", "513 B". Exact where it can be said in two decimals."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"
