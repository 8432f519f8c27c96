# SPDX-License-Identifier: Apache-2.0
"""One cell of the fault table: a fresh device, the fault, the request, and whether what came of it is what the table
says. A wrong one raises AssertionError, in words."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import scenes
import ugds
import ugds.testing
from rows import COMMAND, COMMANDS, Row
from ugds import _core
from ways import WAYS, Outcome, Way, name_of

#: What is before a read in its memory, and what a controller that goes on writing would change.
BEFORE = 0xC3
#: Seconds that an Abort may take where its answer is what the cell is about.
PATIENCE = 5.0
Memory = np.ndarray[Any, np.dtype[np.uint8]]


def pattern(size: int) -> Memory:
    return (np.arange(size, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8)


def until(what: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (true := what()) and time.monotonic() < end:
        time.sleep(0.002)
    return true


# --- What a process holds ------------------------------------------------------------------------------------------


def alive(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


Held = Counter[str]


def sight() -> Held:
    """What this process has, each kind with its number."""
    gc.collect()
    links = (alive(fd) for fd in os.listdir("/proc/self/fd"))
    held = Counter(link for link in links if link and not link.startswith("/proc/"))
    held["threads"] = len(os.listdir("/proc/self/task"))
    held["registrations"] = _core.open_registrations()
    return held


def settled(quiet: float = 0.1, most: float = 3.0) -> Held:
    """What is left when nothing has changed for a while: a thread that tells of events stays for 50 ms after the last,
    and what it has is not the next cell's."""
    end, held, since = time.monotonic() + most, sight(), time.monotonic()
    while time.monotonic() - since < quiet and time.monotonic() < end:
        time.sleep(0.01)
        if (now := sight()) != held:
            held, since = now, time.monotonic()
    return held


class NoLeak:
    """Nothing is held at the end of the block that was not at its beginning. Threads may take a moment to end, those of
    the cell before too: less than at the beginning is no leak."""

    fewest = 1 << 30  #: threads that this process had at any beginning

    def __enter__(self) -> None:
        self.before = sight()
        if self.before["threads"] > NoLeak.fewest:
            self.before = settled()
        NoLeak.fewest = min(NoLeak.fewest, self.before["threads"])

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None and not until(lambda: not sight() - self.before, 3):
            raise AssertionError(f"left behind: {dict(sight() - self.before)}, beyond what there was before")


# --- The device, and a request on it --------------------------------------------------------------------------------


class Bench:
    """A device with its fault planted, a registered buffer, and the bytes that a request is to move."""

    def __init__(self, row: Row, way: str, uri: str | None = None) -> None:
        self.row, self.way = row, way
        # Where an abort is to end it, it does, however long the controller's thread waits for a processor.
        _core.set_abort_limit(PATIENCE if row.resets == "0" else 0)
        with ugds.testing.faults_at_open(*(dict(fault) for fault in row.at_open)):
            self.device = ugds.open(uri or row.uri, deadline=row.deadline, **row.options)
        self.emulator = ugds.testing.emulator(self.device)
        self.mapped = self.emulator.counters()["mapped_bytes"]
        self.data = pattern(row.size)
        self.memory = self.data.copy() if row.op == "write" else np.full(row.size, BEFORE, "u1")
        self.buffer = ugds.register(self.memory)
        self.offset = self.device.capacity - row.size if row.scene == "end" else 0
        if row.op == "read" and row.scene != "end":
            self.emulator.poke(0, self.data.tobytes())
        self.resets = self.emulator.counters()["resets"]
        for fault in row.plant:
            self.emulator.inject(**fault)

    def request(self) -> Way:
        return WAYS[self.way](self.device, self.buffer, self.row.op, self.offset, COMMANDS)

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> list[Outcome]:
        """The request to its end, within the row's bound; its bytes are looked at."""
        request = self.request()
        start = time.monotonic()
        try:
            request.begin()
        except ugds.Error as error:
            return [(name_of(error), error)]
        meanwhile()
        try:
            outcomes = request.finish(self.row.bound)
        except TimeoutError:
            raise AssertionError(f"no result within {self.row.bound} s; the device is {self.device.state}") from None
        spent = time.monotonic() - start
        assert spent < self.row.bound, f"took {spent:.1f} s, and may take {self.row.bound} s"
        request.close()
        self.check_bytes(outcomes)
        return outcomes

    def check_bytes(self, outcomes: list[Outcome]) -> None:
        size = self.row.size // len(outcomes)
        for number, (outcome, error) in enumerate(outcomes):
            right = size if outcome == "ok" else 0
            if error is not None and error.errno not in (None, 0) and self.way != "stream":
                right = error.completed  # a stream's failed read has poisoned what it read
            at = number * size
            if self.row.op == "write":
                got = np.frombuffer(self.emulator.peek(self.offset + at, right), "u1") if right else self.data[:0]
            else:
                got = self.memory[at : at + right]
            wrong = np.flatnonzero(got != self.data[at : at + right])
            assert wrong.size == 0, f"{outcome}, and byte {at + wrong[0]} of [{at}, +{right}) is wrong"

    def works(self) -> None:
        """It is ready, and a write and a read by the same way bring the bytes. A completion too many may be found by a
        request later than the one that it stood beside."""
        self.emulator.clear_faults()
        size = COMMAND * COMMANDS
        fresh = np.random.default_rng(3).integers(0, 256, size, "u1")
        copy = np.zeros_like(fresh)
        with ugds.register(fresh) as source, ugds.register(copy) as target:
            for op, buffer in (("write", source), ("read", target)):
                for attempt in range(4):
                    request = WAYS[self.way](self.device, buffer, op, 0, COMMANDS)
                    request.begin()
                    outcomes = request.finish(30)
                    request.close()
                    if all(outcome == "ok" for outcome, _ in outcomes):
                        break
                    told = [(outcome, str(error)) for outcome, error in outcomes if outcome != "ok"]
                    busy = all(outcome in ("ok", "ETIMEDOUT", "ECANCELED") for outcome, _ in outcomes)
                    assert busy and attempt < 3, f"afterwards a {op} failed: {told}"
        wrong = np.flatnonzero(fresh != copy)
        assert wrong.size == 0, f"afterwards byte {wrong[0] if wrong.size else 0} of a read was wrong"
        assert until(lambda: self.device.stats().in_flight == 0, 2), "afterwards commands are in flight"


def check_results(row: Row, way: str, outcomes: list[Outcome]) -> None:
    expected = row.results[way]
    assert expected is not None
    hit, _, others = expected.partition("/")
    told = [f"{outcome} ({error})" if error else outcome for outcome, error in outcomes]
    first = outcomes[row.hit] if len(outcomes) > 1 else outcomes[0]
    assert first[0] in hit.split("|"), f"expected {hit}, got {told}"
    for number, (outcome, _) in enumerate(outcomes):
        if len(outcomes) > 1 and number != row.hit:
            assert outcome == "ok" or outcome in others.split("|"), f"expected ok or {others}, got {told}"


def refused(call: Callable[[], Any], *codes: str) -> None:
    try:
        call()
    except ugds.Error as error:
        assert name_of(error) in codes, f"expected {codes}, got {name_of(error)}: {error}"
        return
    raise AssertionError(f"succeeded, and {codes} was expected")


def check_violations(bench: Bench) -> None:
    seen = [(rule, what) for rule, what in bench.emulator.violations() if rule not in bench.row.violations]
    assert not seen, f"violations of the protocol: {seen}"


# --- What is left of the device ---------------------------------------------------------------------------------------


def end_ready(bench: Bench) -> None:
    settled = until(lambda: bench.device.state == "ready", 5)
    assert settled, f"the device is {bench.device.state}, and should be ready"
    resets = bench.emulator.counters()["resets"] - bench.resets
    wanted = bench.row.resets
    assert wanted == "any" or (resets == 0) == (wanted == "0"), f"{resets} resets, expected {wanted}"
    bench.works()
    bench.buffer.close()
    mapped = bench.emulator.counters()["mapped_bytes"]
    assert mapped <= bench.mapped, f"{mapped} bytes are mapped, and {bench.mapped} were before"
    quiet(bench.memory, 0.01)
    check_violations(bench)
    bench.device.close()


def end_stopped(bench: Bench) -> None:
    """The controller is known to have stopped: nothing is held, and nothing works."""
    after = bench.row.after
    assert until(lambda: bench.device.state == after, 5), f"the device is {bench.device.state}, and should be {after}"
    with ugds.empty("4KiB") as other:
        refused(lambda: bench.device.read(other), "ENODEV" if after == "lost" else "EIO")
    bench.buffer.close()
    quiet(bench.memory, 0.01)
    check_violations(bench)
    bench.device.close()


def end_wedged(bench: Bench) -> None:
    """Nothing is certain: what the controller may write to is held until a force has stopped it."""
    assert until(lambda: bench.device.state == "wedged", 5), f"the device is {bench.device.state}, and should be wedged"
    for _ in range(2):
        refused(bench.buffer.close, "EBUSY")
        refused(lambda: bench.device.close(0.02), "EBUSY")
    with ugds.empty("4KiB") as other:
        refused(lambda: bench.device.read(other), "EIO")
    check_violations(bench)
    bench.emulator.clear_faults()  # and the reset from outside works
    bench.device.close()
    bench.buffer.close()
    quiet(bench.memory, 0.02)


def quiet(memory: Memory, seconds: float) -> None:
    """Its owner has it back: nobody writes to it."""
    before = memory.copy()
    time.sleep(seconds)
    assert np.array_equal(memory, before), "memory was written to after it was given back"


ENDS = {"ready": end_ready, "failed": end_stopped, "lost": end_stopped, "wedged": end_wedged}


def finish(bench: Bench, outcomes: list[Outcome]) -> None:
    check_results(bench.row, bench.way, outcomes)
    ENDS[bench.row.after](bench)
    assert bench.device.closed and bench.buffer.closed


def run(row: Row, way: str) -> None:
    scene = getattr(scenes, row.scene.replace(" ", "_"))
    if row.scene == "dropped":
        scene(row, way)  # leaks on purpose
        return
    with NoLeak():
        scene(row, way)
