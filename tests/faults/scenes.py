# SPDX-License-Identifier: Apache-2.0
"""What is done in a cell, by the name that its row gives."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from typing import Any

import cell
import numpy as np
import ugds
import ugds.testing
from rows import COMMAND, COMMANDS, Row
from ways import WAYS, name_of


def request(row: Row, way: str) -> None:
    bench = cell.Bench(row, way)
    cell.finish(bench, bench.run())


#: The end of a device that says it has more blocks than it has.
end = request


def power(row: Row, way: str) -> None:
    """The power fails while a command is in flight."""
    bench = cell.Bench(row, way)

    def cut() -> None:
        assert cell.until(lambda: bench.device.stats().in_flight != 0, 5)
        bench.emulator.power_cut()

    outcomes = bench.run(cut)
    cell.finish(bench, outcomes)


def removed(row: Row, way: str) -> None:
    bench = cell.Bench(row, way)
    bench.emulator.remove()
    cell.finish(bench, bench.run())


def one_by_one(row: Row, way: str) -> None:
    """Four requests of one command each: what one leaves behind in the completion ring is found by the next."""
    bench = cell.Bench(row, way)
    bench.buffer.close()
    outcomes = []
    for number in range(COMMANDS):
        at = number * COMMAND
        with ugds.register(bench.memory[at : at + COMMAND]) as part:
            going = WAYS[way](bench.device, part, row.op, at, 1)
            going.begin()
            outcomes += going.finish(row.bound)
            going.close()
    bench.check_bytes(outcomes)
    bench.buffer = ugds.register(bench.memory)
    cell.finish(bench, outcomes)


def close(row: Row, way: str) -> None:
    """Closing waits for what is in flight: it was done, and its bytes are there when the device is opened again."""
    name = f"closed-{way}"
    uri = f"{row.uri}&name={name}"
    bench = cell.Bench(row, way, uri)
    going = bench.request()
    going.begin()
    assert cell.until(lambda: bench.device.stats().in_flight != 0, 5), "nothing was submitted"
    bench.device.close(10)
    if way != "batch":  # which was closed with its device
        outcomes = going.finish(row.bound)
        cell.check_results(row, way, outcomes)
        going.close()
    bench.buffer.close()
    with ugds.open(uri) as again:
        there = np.frombuffer(ugds.testing.emulator(again).peek(0, row.size), "u1")
        wrong = np.flatnonzero(there != bench.data)
        assert wrong.size == 0, f"closing did not wait: {wrong.size} bytes of the write are not there"
    ugds.testing.forget_subsystem(name)


def dropped(row: Row, way: str) -> None:
    """Nobody refers to a wedged device any more: it is leaked, and with it the memory that it goes on writing to."""
    bench = cell.Bench(row, way)
    cell.check_results(row, way, bench.run())
    assert bench.device.state == "wedged", bench.device.state
    buffer, memory = bench.buffer, bench.memory
    del bench
    gc.collect()
    cell.refused(buffer.close, "EBUSY")
    before = memory.copy()
    assert cell.until(lambda: bool((memory != before).any()), 2), "it was unmapped while the device may write to it"
    with ugds.open(row.uri) as other, ugds.empty("4KiB") as mine:
        assert other.read(mine) == 4096


def open(row: Row, way: str) -> None:
    """It fails with the right error, and the next one works."""
    outcome = "ok"
    try:
        with ugds.testing.faults_at_open(*(dict(fault) for fault in row.at_open)):
            ugds.open(row.uri, **{"queues": 2, **row.options}).close()
    except ugds.Error as error:
        outcome = name_of(error)
        assert error.operation == "open", error.operation
        assert "emulated:" in error.device
    expected = row.results[way] or ""
    assert outcome in expected.split("|"), f"expected {expected}, got {outcome}"
    with ugds.open(row.uri) as device, ugds.empty("4KiB") as buffer:
        assert device.write(buffer) == device.read(buffer) == 4096


# --- What opens, registers and requests as a whole -------------------------------------------------------------------


def attempt(row: Row, way: str, **options: Any) -> None:
    """All of it, undone at its end whatever happens. Raises what the library raises."""
    with ugds.open(row.uri, deadline=row.deadline, **{"queues": 2, **options}) as device:
        data, memory = cell.pattern(row.size), np.zeros(row.size, "u1")
        ugds.testing.emulator(device).poke(0, data.tobytes())
        with ugds.register(memory) as buffer:
            going = WAYS[way](device, buffer, "read", 0, COMMANDS)
            going.begin()
            outcomes = going.finish(row.bound)
            going.close()
        for outcome, error in outcomes:
            if error is not None:
                raise error
            assert outcome == "ok", outcome
        assert np.array_equal(memory, data), "wrong bytes"
        assert not ugds.testing.emulator(device).violations()


def steps(row: Row, way: str, part: Callable[[list[str]], range]) -> None:
    """Each of some set-up steps of an attempt fails once, with ENOMEM: nothing of it is left, what follows works."""
    attempt(row, way)  # what is made once and kept
    with ugds.testing.setup_steps() as names:
        attempt(row, way)
    chosen = part(names)
    assert len(chosen) > 0, f"no such step among {names}"
    for nth in chosen:
        with cell.NoLeak():
            with ugds.testing.failing_step(nth) as reached:
                try:
                    attempt(row, way)
                    failure = None
                except ugds.Error as error:
                    failure = error
            assert reached == [True], names[nth]
            left_out = names[nth].startswith("register:") and "attach" in names[:nth]
            assert failure is not None or left_out, f"step {nth}, {names[nth]!r}, did not fail"
            assert failure is None or left_out or name_of(failure) == "ENOMEM", f"{names[nth]}: {failure}"
            del failure
        if nth % 8 == 0 or nth == chosen[-1]:
            attempt(row, way)


def marks(names: list[str]) -> tuple[int, int]:
    """Where registering the attempt's buffer begins, and where its request does."""
    last = max(n for n, name in enumerate(names) if name == "register: index")
    ends = [n for n, name in enumerate(names) if name == "register: map"]
    first_map = next(n for n in ends if n > last)
    return last, first_map + 1


def steps_of_open(row: Row, way: str) -> None:
    steps(row, way, lambda names: range(marks(names)[0]))


def steps_of_register(row: Row, way: str) -> None:
    steps(row, way, lambda names: range(*marks(names)))


def steps_of_request(row: Row, way: str) -> None:
    steps(row, way, lambda names: range(marks(names)[1], len(names)))


def descriptors(row: Row, way: str) -> None:
    """With room for no further descriptor, one, two and so on: it works, or says EMFILE and leaves nothing."""
    attempt(row, way, interrupts=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    fillers = []
    while (filler := os.dup(0)) <= highest:
        fillers.append(filler)
    os.close(filler)
    told = []
    try:
        for room in range(24):
            with cell.NoLeak():
                resource.setrlimit(resource.RLIMIT_NOFILE, (filler + room, hard))
                try:
                    attempt(row, way, interrupts=True)
                    told.append("ok")
                except OSError as error:
                    told.append(name_of(error))
                    del error
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    finally:
        for filler in fillers:
            os.close(filler)
    assert set(told) <= {"ok", "EMFILE"}, told
    assert told[0] == "EMFILE" and told[-1] == "ok", told


def ones_at_open(row: Row, way: str) -> None:
    """CSTS reads as ones once, at one look after the other: it opens and works, or says that the device is gone."""
    for nth in range(8):
        with ugds.testing.faults_at_open({"kind": "all_ones", "at": 0x1C, "skip": nth}):
            try:
                attempt(row, way)
            except ugds.Error as error:
                assert name_of(error) in ("EIO", "ENODEV"), f"look {nth}: {error}"
                assert error.operation == "open", f"look {nth}: {error}"
