# SPDX-License-Identifier: Apache-2.0
"""Reads parts of files into memory that is made for them: every file and every GPU at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

from ugds._load import layout, transfer
from ugds._load.files import Source
from ugds._load.layout import Item
from ugds._load.memory import Arena
from ugds._load.progress import bar
from ugds._load.transfer import Piece

Key = TypeVar("Key", bound=Hashable)


class Wanted(NamedTuple):
    """Bytes of a file that are to come into a device's memory."""

    source: Source
    item: Item
    device: Any


def load(
    wanted: Mapping[Key, Wanted], new_arena: Callable[[int, Any], Arena], what: str, progress: bool | None
) -> dict[Key, Any]:
    """A tensor or array of bytes for each that has some. One arena for each file and device. Raises `ugds.Error`."""
    groups: dict[tuple[int, Any], list[Key]] = {}
    for key, (source, item, device) in wanted.items():
        if item.size:
            groups.setdefault((id(source), device), []).append(key)
    found: dict[Key, Any] = {}
    with ExitStack() as stack:
        queues: list[Iterable[Piece]] = []
        total = 0
        for (_, device), keys in groups.items():
            source = wanted[keys[0]].source
            laid = layout.lay_out([wanted[key].item for key in keys], str(device) == "cpu")
            arena = new_arena(laid.size, device)
            ssd = source.device()
            buffer = stack.enter_context(arena.register([ssd]))
            queues.append(
                [Piece(source.path, ssd, buffer, run.start, run.size, run.place) for run in layout.pieces(laid.runs)]
            )
            total += sum(run.size for run in laid.runs)
            found.update(
                (key, arena.part(place, wanted[key].item.size)) for key, place in zip(keys, laid.places, strict=True)
            )
        with bar(what, total, progress) as advance:
            transfer.read(list(in_turn(queues)), advance)
    return found


def in_turn(queues: Sequence[Iterable[Piece]]) -> Iterator[Piece]:
    """One of each, so that no file or GPU waits for the others."""
    for row in itertools.zip_longest(*queues):
        yield from (piece for piece in row if piece is not None)
