# SPDX-License-Identifier: Apache-2.0
"""The figures of the uGDS paper that benchmarks stand for, and their parameters.

Sections 4.1 to 4.6 of "uGDS: A User-Space Development Kit for High-Performance GPU Direct Storage".
"""

from __future__ import annotations

from dataclasses import dataclass

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class SyncFigure:
    modes: tuple[str, ...]
    threads: tuple[int, ...]
    sizes: tuple[int, ...] = tuple(n * _KIB for n in (4, 8, 16, 32, 64))
    processes: int = 3  #: of whose results each point is the median


@dataclass(frozen=True)
class BatchFigure:
    modes: tuple[str, ...]
    sizes: tuple[int, ...] = tuple(n * _KIB for n in (4, 8, 16, 32, 64, 128))
    depths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)  #: requests a batch
    total: int = 64 * _MIB
    processes: int = 3


SYNC = {
    4: SyncFigure(("read",), (2, 8, 12, 16)),
    5: SyncFigure(("write",), (2, 8, 12, 16)),
    6: SyncFigure(("read", "write"), (2, 8, 12, 16)),
    7: SyncFigure(("write",), (64,)),
}
BATCH = {
    8: BatchFigure(("read",)),
    9: BatchFigure(("write",)),
    10: BatchFigure(("read", "write"), sizes=(128 * _KIB,)),
    11: BatchFigure(("read", "write")),
}
SETUP, SETUP_PROCESSES = 3, 10
COMPLETION = 14
#: Of serialized reads on a stream: the sizes; and of 16 MiB reads, the right of Figure 16: many streams are so many.
STREAM = {12: tuple(4 * _KIB << power for power in range(9)), 16: (16 * _MIB,)}
STREAMS = 16
OVERLAP, OVERLAP_PAIRS = 13, 16
