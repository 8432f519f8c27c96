# SPDX-License-Identifier: Apache-2.0
"""Our libcufile.so.0 against NVIDIA's: the same calls, on the same file, by processes that live side by side and work
in turn; and fio's io_uring, for what the disk gives.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ugds import sizes as units
from ugds._report import CommandError, Record
from ugds.bench import _udev, fio, load
from ugds.bench._cufile_process import Died, Process, Stuck, find_theirs, ours
from ugds.bench._gpu import GIB, KIB, MIB, Figures, median_ratio
from ugds.bench.files import file_of

SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
LARGEST = 16 * MIB
OPENINGS = 5
SPAN, MEMORY = 256 * MIB, 64 * MIB
#: Requests of a batch and their size.
BATCHES = ((16, 4 * KIB), (128, 4 * KIB), (128, 64 * KIB))
LIMIT_S = 20.0
#: What a measurement moves at most, in bytes and in requests: a fraction of a second of a slow disk.
_MOVED, _MOST, _MOST_STREAM = 128 * MIB, 2000, 512

Found = dict[str, list[dict[str, Any]]]


class Pair:
    """Both libraries' processes: "ours", and "theirs" where there is one that takes the file."""

    def __init__(self, libraries: dict[str, Path], gpu: int, file: Path, scratch: Path | None, direct: bool) -> None:
        self._libraries, self._gpu, self._direct = libraries, gpu, direct
        self.file, self.scratch = file, scratch
        self.gpu_name, self.versions = "", dict[str, int]()
        self._said: set[str] = set()
        self.processes: dict[str, Process] = {}

    def open(self) -> dict[str, list[tuple[float, float]]]:
        """Opens the drivers, each in fresh processes, in turn; the last ones stay, where they take the file. Gives the
        milliseconds of opening, and those until a first read has ended (nan where there was none)."""
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in self._libraries}
        for turn in range(OPENINGS):
            for name in taken if turn % 2 == 0 else reversed(list(taken)):
                self.stop(name)
                opened = self._start(name)
                taken[name].append((opened, opened + self._prepare(name)))
        return taken

    def _start(self, name: str) -> float:
        process = Process(self._libraries[name], self._gpu)
        self.processes[name] = process
        self.gpu_name, self.versions[name] = process.hello["gpu_name"], process.hello["version"]
        return float(process.ask("open")["ms"])

    def _prepare(self, name: str) -> float:
        """Registers files and memory, and reads for the first time. Gives the milliseconds; nan where it may not."""
        process = self.processes[name]
        paths = [str(path) for path in (self.file, self.scratch) if path is not None]
        given = process.ask("prepare", _refusable=name != "ours", paths=paths, nbytes=MEMORY, direct=self._direct)
        if "refused" in given:
            self.say(f"NVIDIA's library takes no file here: {given['refused']}; only ours is measured further")
            self.stop(name)
            return math.nan
        if "unregistered" in given:
            self.say(f"{name}: memory could not be registered ({given['unregistered']}), and is used as it is")
        try:
            first = process.ask("sync", _refusable=name != "ours", path=paths[0], size=4 * KIB, count=1, span=SPAN)
        except (Stuck, Died) as error:
            if name == "ours":
                raise
            first = {"refused": str(error)}
        if "refused" in first:
            self.say(f"NVIDIA's library does not read here: {first['refused']}; only ours is measured further")
            self.stop(name)
            return math.nan
        return float(given["ms"] + first["seconds"] * 1e3)

    def ask(self, name: str, what: str, patience: float | None = None, **request: Any) -> dict[str, Any]:
        """An answer; of theirs also that it failed, in words ("refused"), and then there is a fresh process. Raises
        CommandError where ours failed, or bytes are wrong."""
        try:
            answer = self.processes[name].ask(what, patience, _refusable=name != "ours", **request)
        except (Stuck, Died) as error:
            if name == "ours":
                raise
            self.again(name)
            return {"refused": str(error), "fresh": True}
        if answer.get("wrong"):
            raise CommandError(f"{answer['wrong']} bytes that {name} moved are wrong ({what}, {request})")
        return answer

    def _unfinished(self, name: str, what: str, done: int, count: int) -> dict[str, Any]:
        """One that did not finish is of no more use."""
        why = f"{done} of {count} requests ended in {LIMIT_S:g} s"
        if name == "ours":
            raise CommandError(f"{what} by our library: {why}")
        self.again(name)
        return {"refused": why}

    def again(self, name: str) -> None:
        """A fresh process for one that hung or died; none where that does not start, which is fatal for ours."""
        self.stop(name)
        try:
            self._start(name)
            self._prepare(name)
        except CommandError as error:
            if name == "ours":
                raise
            self.say(f"NVIDIA's library is measured no further: {error}")
            self.stop(name)

    def stop(self, name: str) -> None:
        if (process := self.processes.pop(name, None)) is not None:
            process.kill()

    def close(self) -> None:
        for name in list(self.processes):
            self.stop(name)

    def say(self, text: str) -> None:
        """Once."""
        if text not in self._said:
            print(text, file=sys.stderr)
        self._said.add(text)

    def in_turn(self, rounds: int, what: str, more: Callable[[], float] | None = None, **request: Any) -> Found:
        """Each library once a round, forwards and backwards by turns, and fio (`more`) with them; after one round that
        does not count. Raises CommandError where bytes differ, or a call of ours fails; one of theirs that fails is
        said, and left out."""
        found: Found = {name: [] for name in self.processes}
        if more is not None:
            found["io_uring"] = []
        for turn in range(-1, rounds):
            names = list(found)
            for name in names if turn % 2 == 0 else reversed(names):
                if name == "io_uring":
                    assert more is not None
                    answer: dict[str, Any] = {"seconds": more()} if turn >= 0 else {}
                else:
                    answer = self.ask(name, what, **request)
                if answer.get("done", request["count"]) < request["count"]:
                    answer = self._unfinished(name, what, answer["done"], request["count"])
                if "refused" in answer:
                    self.say(
                        f"{what} of {units.format(request['size'])} by NVIDIA's library failed: {answer['refused']}"
                    )
                    del found[name]
                    continue
                if turn >= 0:
                    found[name].append(answer)
        return found


def measure(place: str, gpu: int, library: str | None, sizes: Sequence[int], rounds: int) -> list[Record]:
    """Records of opening the driver, of each way and size, and of what the project promises. Raises CommandError, with
    status 2 where there is no GPU."""
    theirs = find_theirs(library)
    Process(ours(), gpu).kill()  # nothing is made where there is no GPU
    with ExitStack() as stack:
        file = stack.enter_context(file_of(place))
        with fio.FileTarget(f"io_uring:{file}", "io_uring", file) as target:
            direct = target.route == "direct"
        scratch = stack.enter_context(_scratch(file))
        libraries = {"ours": ours()}
        if theirs is None:
            print("NVIDIA's libcufile is not here: ours alone is measured (--library names another)", file=sys.stderr)
        else:
            libraries["theirs"] = theirs
            print(f"compared with {theirs}", file=sys.stderr)
            print(stack.enter_context(_udev.entry(file)), file=sys.stderr)
        pair = Pair(libraries, gpu, file, scratch, direct)
        stack.callback(pair.close)
        return _measure(pair, sizes, rounds, target)


def _measure(pair: Pair, sizes: Sequence[int], rounds: int, target: fio.FileTarget) -> list[Record]:
    promised: Figures = {}
    made = [_opened(pair)]
    for write in (False, True):
        if not write or pair.scratch is not None:
            made += [_sync(pair, size, write, rounds) for size in sizes]
    for fixed in (True, False):
        streams = [_stream(pair, size, fixed, rounds, target, promised) for size in sizes]
        made += [reads for reads, _ in streams] + [calls for _, calls in streams]
    made += [_batch(pair, count, size, rounds, promised) for count, size in BATCHES]
    return [*made, *([_record(pair, {"way": "promised"}, promised)] if promised else [])]


def _record(pair: Pair, params: dict[str, Any], figures: Figures) -> Record:
    about: dict[str, Any] = {"gpu": pair.gpu_name, "theirs": pair.versions.get("theirs", "none")}
    return Record("cufile", {**about, **params}, f"file:{pair.file}", "cuda", "staged", figures)


def _rates(found: Found, moved: int, of: Sequence[str] = ("ours", "theirs", "io_uring")) -> Figures:
    """What each reached, and how many times as much as others ours did, in the same round."""
    times = {name: [answer["seconds"] for answer in found[name]] for name in of if name in found}
    figures: Figures = {
        f"{name}_gib_per_s": (moved / GIB / statistics.median(taken), "GiB/s") for name, taken in times.items()
    }
    if "theirs" in times:
        figures["ratio_to_theirs"] = (median_ratio(times["theirs"], times["ours"]), "1")
    if "io_uring" in times:
        figures["share_of_io_uring"] = (median_ratio(times["io_uring"], times["ours"]), "1")
    return figures


def _opened(pair: Pair) -> Record:
    taken = pair.open()
    figures: Figures = {}
    for which, word in enumerate(("driver_open", "open_to_first_read")):
        for name, each in taken.items():
            times = [one[which] for one in each]
            if not any(map(math.isnan, times)):
                figures[f"{name}_{word}_ms"] = (statistics.median(times), "ms")
    if "theirs" in taken:
        ratio = figures["theirs_driver_open_ms"][0] / figures["ours_driver_open_ms"][0]
        figures["driver_open_ratio_to_theirs"] = (ratio, "1")
    return _record(pair, {"way": "open", "openings": OPENINGS}, figures)


def _sync(pair: Pair, size: int, write: bool, rounds: int) -> Record:
    path, span = (pair.scratch, MEMORY) if write else (pair.file, SPAN)
    count = max(2, min(_MOST, (MEMORY if write else _MOVED) // size))
    found = pair.in_turn(rounds, "sync", path=str(path), size=size, count=count, span=span, write=write)
    figures = _rates(found, count * size)
    if "ratio_to_theirs" in figures:
        figures["sync_ratio_to_theirs"] = figures.pop("ratio_to_theirs")
    return _record(pair, {"way": "sync write" if write else "sync read", "size": size}, figures)


def _stream(pair: Pair, size: int, fixed: bool, rounds: int, target: fio.FileTarget, promised: Figures) -> list[Record]:
    """The throughput, and the part of the time that the caller spends in submitting. All is enqueued at once. What is
    on one stream runs one after another, and so does what io_uring is compared by: one request of that size in
    flight."""
    count = max(4, min(_MOST_STREAM, _MOVED // size))

    def by_fio() -> float:
        with fio.FileTarget(target.uri, "io_uring", pair.file, depth=1) as one:
            reached = one.load(load.Load(100, size, 1, 0.4)).every.gib_per_s
        return count * size / GIB / reached

    more = by_fio if target.route == "direct" else None
    found = pair.in_turn(rounds, "stream", more, path=str(pair.file), size=size, count=count, span=SPAN, fixed=fixed)
    figures = _rates(found, count * size)
    if size == 64 * KIB:
        word = "stream" if fixed else "late_stream"
        for name in ("ratio_to_theirs", "share_of_io_uring"):
            if name in figures:
                promised[f"{word}_{name}_64kib"] = figures[name]
    inside: Figures = {}
    for name in ("ours", "theirs"):
        if name in found:
            share = statistics.median(answer["inside"] / answer["seconds"] for answer in found[name])
            inside[f"{name}_submission_percent"] = (100 * share, "%")
    # Known when it is submitted, or read when the stream is there.
    params = {"way": "stream", "values": "fixed" if fixed else "late", "size": size, "requests": count}
    return [_record(pair, params, figures), _record(pair, params, inside)]


def _batch(pair: Pair, count: int, size: int, rounds: int, promised: Figures) -> Record:
    """A library that does not finish is told by how many of the requests ended; what it would take is no figure."""
    params: dict[str, Any] = {"way": "batch", "requests": count, "size": size}
    figures: Figures = {}
    for name in list(pair.processes):
        done, why = _finished(pair, name, count, size)
        figures[f"{name}_batch_done"] = (done, "requests")
        if why:
            pair.say(f"a batch of {count} x {units.format(size)} by {name}: {why}")
            params[name] = why
    if (count, size) == BATCHES[-1]:
        promised["batch_128x64kib_done"] = figures["ours_batch_done"]
    batches = max(1, min(8, 32 * MIB // (count * size)))
    aside = {name: pair.processes.pop(name) for name in list(pair.processes) if name in params}
    try:
        found = pair.in_turn(rounds, "batch", **_batch_of(pair, count, size, batches))
    finally:
        pair.processes |= aside
    return _record(pair, params, {**figures, **_rates(found, batches * count * size)})


def _batch_of(pair: Pair, count: int, size: int, batches: int) -> dict[str, Any]:
    where: dict[str, Any] = {"path": str(pair.file), "size": size, "count": count, "span": SPAN}
    return {**where, "batches": batches, "limit": LIMIT_S}


def _finished(pair: Pair, name: str, count: int, size: int) -> tuple[int, str]:
    """How many requests of one batch ended within the limit; and if not all, why. Then there is a fresh process."""
    answer = pair.ask(name, "batch", LIMIT_S + 3, **_batch_of(pair, count, size, 1))
    done = int(answer.get("done", 0))
    if done == count:
        return done, ""
    if "fresh" not in answer:
        pair.again(name)
    if "refused" in answer:
        return done, str(answer["refused"]).splitlines()[0]
    return done, f"{done} of {count} requests ended in {LIMIT_S:g} s"


@contextmanager
def _scratch(beside: Path) -> Iterator[Path | None]:
    """A file to write to, in the same folder, removed at the end; None where none can be made."""
    path = beside.parent / f"{beside.name}.ugds-bench-writes"
    target = fio.FileTarget(f"posix:{path}", "posix", path, MEMORY)
    try:
        target.__enter__()
    except CommandError as error:
        print(f"writes are left out: {error}", file=sys.stderr)
        yield None
        return
    try:
        yield path
    finally:
        target.__exit__(None, None, None)
