# SPDX-License-Identifier: Apache-2.0
"""The bars: what the project promises of its figures. Tests hold it to them, and reports draw them."""

from __future__ import annotations

from typing import NamedTuple


class Bar(NamedTuple):
    limit: float
    at_most: bool = True  #: or at least

    def holds(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self.limit:g}"


#: By the name of the figure, in its unit.
BARS: dict[str, Bar] = {
    "sync_read_4k_instructions": Bar(400),
    "python_extra_instructions": Bar(1500),
    "python_extra_us": Bar(1.5),
    "open_to_first_read_ms": Bar(5),
    "ratio_to_memcpy": Bar(0.8, at_most=False),
    "interrupt_cpu_percent": Bar(10),
}
