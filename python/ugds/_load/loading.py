# SPDX-License-Identifier: Apache-2.0
"""Reads parts of files into memory that is made for them: several files, and every GPU, at once."""

from __future__ import annotations

import errno
import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

from ugds._load import layout, transfer
from ugds._load.files import Source
from ugds._load.layout import Item, Run
from ugds._load.memory import Arena
from ugds._load.progress import bar
from ugds._load.transfer import Piece

Key = TypeVar("Key", bound=Hashable)
Job = TypeVar("Job")
#: Files whose pieces are given out in turn; besides, each thread may be at the last piece of another.
MOST_FILES = 8


class Wanted(NamedTuple):
    """Bytes of a file that are to come into a device's memory."""

    source: Source
    item: Item
    device: Any


class _Reading:
    """A file of which parts are read, each into its arena. It is open from the first piece to the last."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.parts: list[tuple[Arena, list[Run]]] = []
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._left = 0
        self.ended = threading.Event()  #: of all pieces that were given out

    def open(self) -> Iterator[Piece]:
        """Raises OSError, and `ugds.Error`."""
        self._left = 0
        device = self.source.device()
        self._stack.callback(self.source.leave)
        queues: list[Iterable[Piece]] = []
        for arena, runs in self.parts:
            buffer = self._stack.enter_context(arena.register([device]))
            queues.append([Piece(self.source.path, device, buffer, *run, self._ended) for run in runs])
            self._left += len(runs)
        return in_turn(queues)

    def _ended(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self.close()
            self.ended.set()

    def close(self) -> None:
        """None of it is under way. May be called again."""
        self._stack.close()


def load(
    wanted: Mapping[Key, Wanted], new_arena: Callable[[int, Any], Arena], what: str, progress: bool | None
) -> dict[Key, Any]:
    """A tensor or array of bytes for each that has some. One arena for each file and device. Raises OSError where a
    file cannot be opened, and `ugds.Error`."""
    groups: dict[tuple[int, Any], list[Key]] = {}
    for key, (source, item, device) in wanted.items():
        if item.size:
            groups.setdefault((id(source), device), []).append(key)
    found: dict[Key, Any] = {}
    readings: dict[int, _Reading] = {}
    by_device: dict[Any, list[_Reading]] = {}
    with ExitStack() as stack:
        total = 0
        for (name, device), keys in groups.items():
            source = wanted[keys[0]].source
            laid = layout.lay_out([wanted[key].item for key in keys], str(device) == "cpu")
            arena = new_arena(laid.size, device)
            if name not in readings:
                readings[name] = _Reading(source)
                by_device.setdefault(device, []).append(readings[name])
                stack.callback(readings[name].close)
            readings[name].parts.append((arena, list(layout.pieces(laid.runs))))
            total += sum(run.size for run in laid.runs)
            found.update(
                (key, arena.part(place, wanted[key].item.size)) for key, place in zip(keys, laid.places, strict=True)
            )
        with bar(what, total, progress) as advance:
            count = sum(len(runs) for reading in readings.values() for _, runs in reading.parts)
            transfer.read(few_at_a_time(in_turn(list(by_device.values()))), advance, count)
    return found


def few_at_a_time(readings: Iterable[_Reading]) -> Iterator[Piece]:
    """The pieces of several files in turn. The next file is opened when all of another's were given out; where no more
    may be open in this process, when fewer are."""
    waiting = deque(readings)
    open_now: deque[tuple[_Reading, Iterator[Piece]]] = deque()
    given_out: list[_Reading] = []
    while waiting or open_now:
        while waiting and len(open_now) < MOST_FILES:
            try:
                pieces = waiting[0].open()
            except OSError as error:
                waiting[0].close()
                given_out = [one for one in given_out if not one.ended.is_set()]
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not (open_now or given_out):
                    raise
                if open_now:
                    break
                given_out[0].ended.wait()
            else:
                open_now.append((waiting.popleft(), pieces))
        reading, pieces = open_now.popleft()
        piece = next(pieces, None)
        if piece is None:
            given_out.append(reading)
        else:
            open_now.append((reading, pieces))
            yield piece


def in_turn(queues: Sequence[Iterable[Job]]) -> Iterator[Job]:
    """One of each, so that no file or GPU waits for the others."""
    for row in itertools.zip_longest(*queues):
        yield from (job for job in row if job is not None)
