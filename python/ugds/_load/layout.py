# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a file land where in one piece of memory.

What lies side by side in the file lies side by side in memory, so that the file is read by few and large requests. The
order is broken only where a tensor would not be aligned for its type: a new run begins there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

#: The beginning of an arena is a multiple of it: a page, and no file system asks for more.
PAGE = 4096
#: Bytes between two items that are read along, rather than asking twice.
MOST_GAP = 64 << 10
#: Runs from here on lie in a page as they lie in the file's blocks: then O_DIRECT reads into the memory itself.
_LARGE = 1 << 20
#: What the beginning of each other run is a multiple of.
_LINE = 256
#: A request, at most: see `ugds._load.transfer`.
PIECE = 16 << 20


class Item(NamedTuple):
    start: int  #: in the file, as every place here in bytes
    size: int
    align: int  #: a power of two up to 64, of which its address is to be a multiple


class Run(NamedTuple):
    """Bytes of the file that stay in one piece."""

    start: int
    size: int
    place: int  #: in the arena


class Layout(NamedTuple):
    runs: list[Run]
    places: list[int]  #: of each item, in the order in which they were given
    size: int  #: of the arena


def lay_out(items: Sequence[Item], like_the_file: bool) -> Layout:
    """Places items, none of which overlap, in an arena. like_the_file: a place in memory should be as far from a page's
    beginning as in the file, wherever alignment allows; host memory is then read into without a copy. For memory of a
    GPU that makes no difference, since its bytes are copied anyway."""
    places = [0] * len(items)
    runs: list[Run] = []
    cursor = 0
    members: list[int] = []
    first, phase, end = 0, 0, 0

    def close() -> None:
        nonlocal cursor
        if not members:
            return
        unit = PAGE if phase and end - first >= _LARGE else 64 if phase else _LINE
        place = cursor + (phase - cursor) % unit
        for index in members:
            places[index] = place + items[index].start - first
        runs.append(Run(first, end - first, place))
        cursor = place + end - first

    for index in sorted((i for i, item in enumerate(items) if item.size), key=lambda i: items[i].start):
        item = items[index]
        near = members and item.start - end <= MOST_GAP
        if not (near and (phase + item.start - first) % item.align == 0):
            close()
            members = []
            first = item.start
            phase = item.start % PAGE if like_the_file and item.start % item.align == 0 else 0
        members.append(index)
        end = item.start + item.size
    close()
    return Layout(runs, places, cursor)


def pieces(runs: Sequence[Run], most: int = PIECE) -> Iterator[Run]:
    """The runs in parts of up to so many bytes, cut at multiples of it in the file."""
    for run in runs:
        at, end = run.start, run.start + run.size
        while at < end:
            stop = min(end, (at // most + 1) * most)
            yield Run(at, stop - at, run.place + at - run.start)
            at = stop
