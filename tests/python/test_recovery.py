# SPDX-License-Identifier: Apache-2.0
"""Overdue commands, controllers that fail, and devices that go away: the right error in bounded time, and no byte
written to memory that its owner has back."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ugds
import ugds.testing
from ugds import _core

KIB, MIB = 1 << 10, 1 << 20
DEADLINE = 0.3
#: Seconds that any recovery may take here, on a machine that others use as well.
BOUND = 15.0
URI = "emulated:1MiB?lba=512&mdts=1&timeout=1"
READ, WRITE = 2, 1
#: What the deadline of these tests may bring on a machine that is busy.
BUSY = (errno.ETIMEDOUT, errno.ECANCELED)
OpenSsd = Callable[..., ugds.Device]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    spent = time.monotonic() - start
    assert spent < seconds, f"took {spent:.2f} s, and may take {seconds} s"


@contextmanager
def fails(code: int, *words: str) -> Iterator[pytest.ExceptionInfo[ugds.Error]]:
    with within(BOUND), pytest.raises(ugds.Error) as caught:
        yield caught
    error = caught.value
    assert error.errno == code, f"{errno.errorcode.get(error.errno or 0)}: {error}"
    for word in words:
        assert word in str(error), str(error)


def again(call: Callable[[], Any]) -> Any:
    for _ in range(3):
        try:
            return call()
        except ugds.Error as error:
            if error.errno not in BUSY:
                raise
    return call()


def works(device: ugds.Device) -> None:
    """Writes and reads back, aligned and not, on every queue by several threads."""
    assert device.state == "ready"
    data = np.random.default_rng(1).integers(0, 256, 64 * KIB, "u1")
    copy = np.zeros_like(data)
    wrong: list[BaseException] = []

    def once(number: int) -> None:
        try:
            part = slice(number * 16 * KIB, (number + 1) * 16 * KIB)
            again(lambda: device.write(data[part], 128 * KIB + number * 16 * KIB))
            again(lambda: device.read(copy[part], 128 * KIB + number * 16 * KIB))
        except BaseException as error:
            wrong.append(error)

    with ugds.register(data), ugds.register(copy) as target:
        threads = [threading.Thread(target=once, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if wrong:
            raise wrong[0]
        assert np.array_equal(data, copy)
        try:
            again(device.flush)
        except ugds.Error as error:
            # What was written before the reset; once.
            assert error.errno == errno.EIO and "may be lost" in error.cause
            again(device.flush)
        assert again(lambda: device.read(target, 128 * KIB + 1, 1001)) == 1001
        assert copy[:1001].tobytes() == data[1:1002].tobytes()
    assert device.stats().in_flight == 0


@pytest.fixture(params=["thread", "caller"])
def device(request: pytest.FixtureRequest, open_ssd: OpenSsd) -> ugds.Device:
    return open_ssd(f"{URI}&pump={request.param}", deadline=DEADLINE, queues=2)


@pytest.fixture
def memory() -> np.ndarray[Any, Any]:
    return np.full(64 * KIB, 0xC3, "u1")


def await_commands(device: ugds.Device) -> None:
    end = time.monotonic() + BOUND
    while device.stats().in_flight == 0:
        assert time.monotonic() < end, "nothing was submitted"
        time.sleep(0.001)


def settle(device: ugds.Device) -> None:
    """A completion too many may be found by a later request than the one that it came beside."""
    calm, end = 0, time.monotonic() + BOUND
    with ugds.empty("64KiB") as buffer:
        while calm < 40 and time.monotonic() < end:
            try:
                device.read(buffer)
                calm += 1
            except ugds.Error as error:
                assert error.errno in BUSY, error
                calm = 0


def unchanged_for(memory: np.ndarray[Any, Any], seconds: float) -> bool:
    """Nobody writes to it: `late_write` does so all the time."""
    before = memory.copy()
    end = time.monotonic() + seconds
    # At each look: the pattern that is written comes round again after 256 writes.
    while time.monotonic() < end:
        if not np.array_equal(memory, before):
            return False
        time.sleep(0.003)
    return True


# --- Commands that do not come back -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hang", "late_write"])
def test_an_overdue_command_is_aborted(device: ugds.Device, memory: np.ndarray[Any, Any], kind: str) -> None:
    emulator = ugds.testing.emulator(device)
    resets = emulator.counters()["resets"]
    emulator.inject(kind, opcode=READ, skip=3)
    buffer = ugds.register(memory)
    with fails(errno.ETIMEDOUT, f"within {DEADLINE:.3f} s", "aborted", "deadline") as caught:
        device.read(buffer)
    assert caught.value.completed == 3 * 8 * KIB
    assert caught.value.status is None
    assert not memory[: 3 * 8 * KIB].any()
    assert emulator.counters()["resets"] == resets
    assert emulator.counters()["aborts"] == 1
    buffer.close()
    assert unchanged_for(memory, 0.1)
    works(device)


@pytest.mark.parametrize("kind", ["hang", "late_write"])
@pytest.mark.parametrize("shadow", [0, 1])
@pytest.mark.parametrize("doorbells", ["mapped", "trapped"])
def test_a_command_that_no_abort_ends_is_ended_by_a_reset(
    open_ssd: OpenSsd, memory: np.ndarray[Any, Any], kind: str, shadow: int, doorbells: str
) -> None:
    device = open_ssd(f"{URI}&shadow={shadow}&doorbells={doorbells}", deadline=DEADLINE, queues=2)
    emulator = ugds.testing.emulator(device)
    resets = emulator.counters()["resets"]
    emulator.inject(kind, opcode=READ, abortable=False)
    buffer = ugds.register(memory)
    with fails(errno.ETIMEDOUT, "reset"):
        device.read(buffer)
    assert emulator.counters()["resets"] > resets
    buffer.close()
    assert unchanged_for(memory, 0.1)
    works(device)


@pytest.mark.parametrize("call", ["write", "flush", "discard", "unaligned read", "unaligned write", "durable"])
@pytest.mark.parametrize("abortable", [True, False])
def test_every_kind_of_request_recovers(device: ugds.Device, call: str, abortable: bool) -> None:
    memory = np.full(64 * KIB, 1, "u1")
    with ugds.register(memory) as buffer:
        calls: dict[str, Callable[[], Any]] = {
            "write": lambda: device.write(buffer),
            "flush": device.flush,
            "discard": lambda: device.discard(0, 512),
            "unaligned read": lambda: device.read(buffer, 1, 5000),
            "unaligned write": lambda: device.write(buffer, 1, 5000, unaligned=True),
            "durable": lambda: device.write(buffer, durable=True),
        }
        ugds.testing.emulator(device).inject("hang", abortable=abortable)
        with fails(errno.ETIMEDOUT) as caught:
            calls[call]()
        assert caught.value.operation in call or call == "durable"
        calls[call]()
    works(device)


def test_a_command_that_is_merely_late_is_not_lost(open_ssd: OpenSsd, memory: np.ndarray[Any, Any]) -> None:
    device = open_ssd(URI, deadline=5)
    ugds.testing.emulator(device).inject("late", delay_ns=300_000_000)
    with ugds.register(memory) as buffer, within(BOUND):
        start = time.monotonic()
        assert device.read(buffer) == 64 * KIB
        assert time.monotonic() - start > 0.29
    assert ugds.testing.emulator(device).counters()["aborts"] == 0
    assert not memory.any()


def test_a_command_that_comes_after_its_deadline_harms_nothing(
    device: ugds.Device, memory: np.ndarray[Any, Any]
) -> None:
    ugds.testing.emulator(device).inject("late", opcode=READ, delay_ns=int((DEADLINE + 0.3) * 1e9), count=2)
    for _ in range(3):
        buffer = ugds.register(memory)
        try:
            with within(BOUND):
                assert device.read(buffer) == 64 * KIB
            assert not memory.any()
        except ugds.Error as error:
            assert error.errno in (errno.ETIMEDOUT, errno.ECANCELED), error
        buffer.close()
        memory[:] = 0xC3
        assert unchanged_for(memory, 0.1)
    works(device)


def test_a_timed_out_read_never_writes_to_memory_that_was_given_back(open_ssd: OpenSsd) -> None:
    """vLLM 51667. From the moment at which a registration can be closed its bytes are its owner's."""
    device = open_ssd(URI, deadline=DEADLINE, queues=2)
    for abortable in (True, False, True):
        memory = np.full(64 * KIB, 0xC3, "u1")
        buffer = ugds.register(memory)
        ugds.testing.emulator(device).inject("late_write", opcode=READ, skip=4, abortable=abortable)
        raised = threading.Event()

        def read(buffer: ugds.Registration = buffer, raised: threading.Event = raised) -> None:
            try:
                device.read(buffer)
            except ugds.Error:
                raised.set()

        thread = threading.Thread(target=read)
        thread.start()
        await_commands(device)
        refused, end = 0, time.monotonic() + BOUND
        while True:
            try:
                buffer.close()
                break
            except ugds.Error as error:
                assert error.errno == errno.EBUSY, error
                assert "in flight" in str(error)
                refused += 1
            assert time.monotonic() < end, "the buffer was never given back"
            time.sleep(0.002)
        memory[:] = 0x77  # its owner uses it again at once
        assert unchanged_for(memory, 0.2)
        assert (memory == 0x77).all()
        thread.join()
        assert raised.is_set()
        assert refused > 0
    works(device)


@pytest.mark.parametrize("abortable", [True, False])
@pytest.mark.parametrize("pump", ["thread", "caller"])
def test_requests_that_wait_behind_a_recovery_succeed_or_say_so(open_ssd: OpenSsd, abortable: bool, pump: str) -> None:
    """One command hangs while others come and go: after an abort they know nothing of it; a reset ends those in flight
    with ECANCELED, and those that were not submitted yet succeed."""
    # Long enough that on a busy machine nobody else's command is overdue.
    device = open_ssd(f"{URI}&pump={pump}", deadline=1, queues=2)
    emulator = ugds.testing.emulator(device)
    emulator.inject("hang", lba=0, blocks=1, abortable=abortable)
    emulator.poke(64 * KIB, b"\x2a" * 128 * KIB)
    results: dict[int, list[int]] = {}
    first: list[int] = []

    def victim() -> None:
        with ugds.empty("4KiB") as mine:
            try:
                device.read(mine, 0)
            except ugds.Error as error:
                first.append(error.errno or 0)

    def others(number: int) -> None:
        mine: list[int] = []
        results[number] = mine
        with ugds.empty("64KiB") as buffer:
            view = np.frombuffer(buffer, "u1")
            end = time.monotonic() + BOUND / 2
            while time.monotonic() < end and not (first and mine and mine[-1] == 0):
                view[:] = 0
                try:
                    device.read(buffer, 64 * KIB)
                    mine.append(0 if (view == 0x2A).all() else -1)
                except ugds.Error as error:
                    mine.append(error.errno or 0)
            del view

    threads = [threading.Thread(target=victim), *(threading.Thread(target=others, args=(n,)) for n in range(3))]
    with within(BOUND):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert first == [errno.ETIMEDOUT]
    for mine in results.values():
        assert mine[-1] == 0
        assert set(mine) <= ({0} if abortable else {0, errno.ECANCELED})
        assert mine.count(errno.ECANCELED) <= 1
    works(device)


def test_every_waiter_gets_an_answer_when_all_queues_hang(open_ssd: OpenSsd) -> None:
    device = open_ssd(URI, deadline=DEADLINE, queues=2, depth=4)
    ugds.testing.emulator(device).inject("hang", count=12, abortable=False)
    answers: list[int] = []

    def read() -> None:
        with ugds.empty("16KiB") as mine:
            try:
                device.read(mine)
                answers.append(0)
            except ugds.Error as error:
                answers.append(error.errno or 0)

    threads = [threading.Thread(target=read) for _ in range(8)]
    with within(2 * BOUND):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 8
    assert set(answers) <= {0, errno.ETIMEDOUT, errno.ECANCELED}
    assert errno.ETIMEDOUT in answers
    ugds.testing.emulator(device).clear_faults()
    works(device)


# --- Controllers that fail ----------------------------------------------------------------------------------------


def test_a_fatal_status_is_seen_before_the_deadline_and_recovered(open_ssd: OpenSsd) -> None:
    """SPDK 83/3017."""
    device = open_ssd(URI, deadline=60)
    with ugds.empty("64KiB") as buffer:
        ugds.testing.emulator(device).inject("fatal", opcode=READ, skip=2)
        with fails(errno.ECANCELED, "reset", "repeat the request"):
            device.read(buffer)
        assert device.read(buffer) == 64 * KIB
    works(device)


@pytest.mark.parametrize("kind", ["unknown_id", "duplicate", "wrong_sq_head"])
def test_a_completion_that_no_command_waits_for_is_an_error_and_no_crash(device: ugds.Device, kind: str) -> None:
    """libevpl 90. The request whose completion it stood beside is right, or says that it was ended."""
    emulator = ugds.testing.emulator(device)
    for skip in range(3):
        emulator.inject(kind, opcode=READ, skip=skip)
        emulator.poke(0, b"\x11" * 64 * KIB)
        memory = np.zeros(64 * KIB, "u1")
        with ugds.register(memory) as buffer, within(BOUND):
            try:
                assert device.read(buffer) == 64 * KIB
                assert (memory == 0x11).all()
            except ugds.Error as error:
                assert error.errno in (errno.ECANCELED, errno.EIO, errno.ETIMEDOUT), error
                assert (memory[: error.completed] == 0x11).all()
        end = time.monotonic() + BOUND
        while time.monotonic() < end:
            with ugds.empty("4KiB") as buffer:
                try:
                    device.read(buffer)
                    break
                except ugds.Error as error:
                    assert error.errno in (errno.ECANCELED, errno.EIO), error
    settle(device)
    works(device)


@pytest.mark.parametrize("kind", ["never_ready", "never_stopped"])
def test_a_controller_that_does_not_start_again_is_reported(open_ssd: OpenSsd, kind: str) -> None:
    device = ugds.open(URI, deadline=DEADLINE)
    emulator = ugds.testing.emulator(device)
    memory = np.full(64 * KIB, 0xC3, "u1")
    buffer = ugds.register(memory)
    emulator.inject("hang", opcode=READ, abortable=False)
    emulator.inject(kind)
    with within(BOUND), pytest.raises(ugds.Error) as caught:
        device.read(buffer)
    # CC.EN cleared without CSTS.RDY following leaves the reset of the bus, after which it works again.
    assert caught.value.errno in (errno.ETIMEDOUT, errno.EIO)
    assert device.state in ("ready", "failed")
    if device.state == "failed":
        with fails(errno.EIO, "could not be started again", "open it again"):
            device.read(buffer)
    else:
        works(device)
    buffer.close()
    assert unchanged_for(memory, 0.1)
    assert emulator.violations() == []
    with within(BOUND):
        device.close()


def test_a_controller_that_never_becomes_ready_is_an_error_of_open(open_ssd: OpenSsd) -> None:
    name = "never-ready"
    uri = f"emulated:1MiB?timeout=1&ready=2s&name={name}"
    before = _core.open_registrations()  # type: ignore[attr-defined]
    with fails(errno.EIO, "did not become ready"):
        ugds.open(uri)
    assert _core.open_registrations() == before  # type: ignore[attr-defined]
    assert ugds.testing.forget_subsystem(name)


@pytest.mark.parametrize("opcode", [0x06, 0x09, 0x05, 0x01])
def test_an_admin_command_that_fails_fails_recovery_in_words(open_ssd: OpenSsd, opcode: int) -> None:
    """Identify, Set Features, Create queue: the restart after a reset may meet an error too."""
    device = ugds.open(URI, deadline=DEADLINE, queues=1)
    emulator = ugds.testing.emulator(device)
    emulator.inject("hang", opcode=READ, abortable=False)
    emulator.inject("status", opcode=opcode, admin=True, status=0x006)
    memory = np.full(4096, 0xC3, "u1")
    buffer = ugds.register(memory)
    with within(BOUND), pytest.raises(ugds.Error) as caught:
        device.read(buffer)
    assert caught.value.errno in (errno.ETIMEDOUT, errno.EIO)
    assert device.state in ("ready", "failed")
    if device.state == "failed":
        for call in (lambda: device.read(buffer), lambda: device.read(buffer, 1, 3), device.flush):
            with fails(errno.EIO, "could not be started again"):
                call()
    buffer.close()
    assert emulator.violations() == []
    device.close()


# --- Removal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pump", ["thread", "caller"])
def test_removal_in_mid_request_reaches_every_waiter(pump: str) -> None:
    """SPDK 527, libvfn 62: promptly, and not after the deadline."""
    device = ugds.open(f"{URI}&pump={pump}", deadline=60, queues=2)
    emulator = ugds.testing.emulator(device)
    emulator.inject("hang", count=3, abortable=False)
    emulator.inject("remove")
    codes: list[int] = []

    def read() -> None:
        with ugds.empty("16KiB") as mine:
            try:
                device.read(mine)
                codes.append(0)
            except ugds.Error as error:
                codes.append(error.errno or 0)

    threads = [threading.Thread(target=read) for _ in range(5)]
    with within(BOUND):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert codes == [errno.ENODEV] * 5
    assert device.state == "lost"
    memory = np.zeros(4096, "u1")
    buffer = ugds.register(memory)
    for call in (
        lambda: device.read(buffer),
        lambda: device.write(buffer),
        lambda: device.write(buffer, 1, 9, unaligned=True),
        device.flush,
        lambda: device.discard(0, 512),
    ):
        with fails(errno.ENODEV, "gone"):
            call()
    buffer.close()
    assert emulator.violations() == []
    with within(BOUND):
        device.close()
    assert device.closed


def test_removal_while_idle_is_noticed_by_the_next_request() -> None:
    device = ugds.open(URI, deadline=60)
    ugds.testing.emulator(device).remove()
    with ugds.empty("4KiB") as buffer, fails(errno.ENODEV, "gone"):
        device.read(buffer)
    assert device.state == "lost"
    ugds.testing.emulator(device).plug()  # a device that is back is opened anew; the handle stays lost
    assert device.state == "lost"
    with within(BOUND):
        device.close()


# --- Wedged -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hang", "late_write"])
def test_a_controller_that_nothing_stops_keeps_its_buffers_until_a_force_works(kind: str) -> None:
    device = ugds.open(URI, deadline=DEADLINE, queues=1)
    emulator = ugds.testing.emulator(device)
    memory, bystander = np.full(64 * KIB, 0xC3, "u1"), np.zeros(4096, "u1")
    buffer, other = ugds.register(memory), ugds.register(bystander)
    emulator.inject(kind, opcode=READ, skip=2, abortable=False)
    emulator.inject("never_stopped")
    emulator.inject("reset_fails", count=3)
    with fails(errno.ETIMEDOUT, "could not be stopped", "held") as caught:
        device.read(buffer)
    assert caught.value.completed in (0, 16 * KIB)
    assert device.state == "wedged"

    # Its buffer is held, and the memory with it; a buffer that it does not use is free.
    for _ in range(3):
        with fails(errno.EBUSY, "in flight"):
            buffer.close()
        assert not buffer.closed
    other.close()
    # Nothing is submitted any more, promptly.
    with ugds.register(bystander) as mine:
        for call in (
            lambda: device.read(mine),
            lambda: device.write(mine),
            lambda: device.read(mine, 1, 5),
            lambda: device.write(mine, 1, 5, unaligned=True),
            device.flush,
            lambda: device.discard(0, 512),
        ):
            with fails(errno.EIO, "could not be stopped"):
                call()
    # Closing tries a reset from outside; where that fails too it says so and changes nothing.
    for _ in range(2):
        with fails(errno.EBUSY, "wedged"):
            device.close(drain=0.1)
        assert not device.closed
        assert device.state == "wedged"
        with fails(errno.EBUSY):
            buffer.close()
    assert emulator.violations() == []
    with within(BOUND):
        device.close()
    assert device.closed
    buffer.close()
    memory[:] = 0x99
    assert unchanged_for(memory, 0.1)
    with ugds.open(URI) as again:
        works(again)


def is_ours(descriptor: Path) -> bool:
    """Not one that is gone by now, as that of the folder was, nor one of the file of faults, which is open for a moment
    while the recovery is told of."""
    try:
        return not os.readlink(descriptor).startswith(_core.state_folder())
    except FileNotFoundError:
        return False


def held(emulator: ugds.testing.Emulator | None = None) -> dict[str, int]:
    """What this process holds: descriptors, mappings of its own, registrations; and what the device reaches of it."""
    counters = emulator.counters() if emulator else {}
    return {
        "descriptors": sum(map(is_ours, Path("/proc/self/fd").iterdir())),
        "shared mappings": Path("/proc/self/maps").read_text().count("memfd:ugds"),
        "registrations": _core.open_registrations(),  # type: ignore[attr-defined]
        "ranges for the device": counters.get("mapped_ranges", 0),
        "pages for the device": counters.get("mapped_bytes", 0) // 4096,
    }


def is_written(view: np.ndarray[Any, Any]) -> bool:
    before, end = view.copy(), time.monotonic() + BOUND
    while time.monotonic() < end:
        if (view != before).any():
            return True
    return False


@pytest.mark.parametrize("stop", ["reset", "force"])
def test_nothing_that_a_controller_writes_on_to_is_released_before_its_stop_is_certain(stop: str) -> None:
    """The controller goes on writing after the time-out. Every mapping, page and descriptor is counted: all are held
    while it does, and all are given back in the end."""
    with ugds.open(URI, queues=1) as warm, ugds.empty("64KiB") as buffer:
        warm.read(buffer)
    gc.collect()
    nothing = held()
    device = ugds.open("emulated:1MiB?lba=512&mdts=1&ready=300ms&timeout=4", deadline=DEADLINE, queues=1)
    emulator = ugds.testing.emulator(device)
    before = held(emulator)
    buffer = ugds.empty("64KiB")
    view = np.frombuffer(buffer, "u1")
    whole = held(emulator)
    assert whole["pages for the device"] == before["pages for the device"] + 16
    emulator.inject("late_write", opcode=READ, skip=2, abortable=False)
    if stop == "force":
        emulator.inject("never_stopped", count=100)
        emulator.inject("reset_fails", count=100)

    seen: list[dict[str, int]] = []
    codes: list[int | None] = []

    def read() -> None:
        with pytest.raises(ugds.Error) as caught:
            device.read(buffer)
        codes.append(caught.value.errno)

    reader = threading.Thread(target=read)
    reader.start()
    await_commands(device)
    assert is_written(view)
    while reader.is_alive():  # the deadline passes, the abort fails, and the reset takes its 300 ms
        seen.append(held(emulator))
        time.sleep(0.002)
    reader.join()
    assert codes == [errno.ETIMEDOUT]
    assert len(seen) > 50
    assert all(one == whole for one in seen), [one for one in seen if one != whole][:3]
    if stop == "force":
        assert device.state == "wedged"
        assert is_written(view)
        for _ in range(3):
            with fails(errno.EBUSY):
                buffer.close()
            with fails(errno.EBUSY):
                device.close(drain=0.05)
        assert held(emulator) == whole
        assert is_written(view)
        assert emulator.violations() == []
        emulator.clear_faults()
        device.close()  # by force, now that the reset of the function works
        view[:] = 0x5A
        assert unchanged_for(view, 0.1)
    else:
        view[:] = 0x5A
        assert unchanged_for(view, 0.1)
        works(device)
        assert held(emulator) == whole
        assert emulator.violations() == []
    del view
    buffer.close()
    if stop == "reset":
        assert held(emulator) == before
        device.close()
    assert held() == nothing


DROPPED = """
import errno, gc, time, numpy, ugds, ugds.testing
from ugds import _core

device = ugds.open("emulated:1MiB?timeout=1", deadline=0.2, queues=1)
emulator = ugds.testing.emulator(device)
buffer = ugds.empty("64KiB")
emulator.inject("late_write", opcode=2, abortable=False)
emulator.inject("never_stopped", count=100)
emulator.inject("reset_fails", count=100)
try:
    device.read(buffer)
except ugds.Error as error:
    print(errno.errorcode[error.errno], device.state)
del device, emulator
gc.collect()
try:
    buffer.close()
except ugds.Error as error:
    print(errno.errorcode[error.errno])
view = numpy.frombuffer(buffer, "u1")
before, end = view.copy(), time.monotonic() + 10
while not (before != view).any() and time.monotonic() < end:
    time.sleep(0.003)
print("written" if (before != view).any() else "quiet")
del view, buffer
gc.collect()
with ugds.open("emulated:1MiB") as again, ugds.empty("4KiB") as other:
    print(again.read(other), again.write(other))
print(_core.open_registrations())  # the buffer, and the device's own
"""


def test_a_wedged_device_that_is_dropped_leaks_what_it_may_write_to() -> None:
    """On purpose: the buffer can never be closed, its memory stays, and others work on, to a clean exit."""
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n") == ["ETIMEDOUT wedged", "EBUSY", "written", "4096 4096", "2", ""]


def test_a_slow_stop_holds_the_buffers_until_it_is_done(open_ssd: OpenSsd) -> None:
    """`late_write` goes on after CC.EN is cleared, until CSTS.RDY reads 0."""
    device = open_ssd("emulated:1MiB?lba=512&mdts=1&ready=300ms&timeout=4", deadline=DEADLINE, queues=1)
    memory = np.full(64 * KIB, 0xC3, "u1")
    buffer = ugds.register(memory)
    ugds.testing.emulator(device).inject("late_write", opcode=READ, skip=2, abortable=False)
    closed_at: list[float] = []

    def close_soon() -> None:
        while True:
            try:
                buffer.close()
            except ugds.Error:
                time.sleep(0.001)
            else:
                closed_at.append(time.monotonic())
                memory[:] = 0x55
                return

    thread = threading.Thread(target=close_soon)
    outcome: list[object] = []

    def read() -> None:
        try:
            outcome.append(device.read(buffer))
        except ugds.Error as error:
            outcome.append(error.errno)

    reader = threading.Thread(target=read)
    start = time.monotonic()
    with within(BOUND):
        reader.start()
        await_commands(device)
        thread.start()
        thread.join()
        reader.join()
    assert outcome == [errno.ETIMEDOUT]
    assert closed_at[0] - start > DEADLINE + 0.25
    assert (memory == 0x55).all()
    assert unchanged_for(memory, 0.2)
    assert (memory == 0x55).all()
    works(device)


def test_a_registration_collected_while_its_command_hangs_keeps_its_memory(open_ssd: OpenSsd) -> None:
    device = open_ssd(URI, deadline=0.5, queues=1)
    gc.collect()
    registrations = _core.open_registrations()  # type: ignore[attr-defined]
    buffer = ugds.empty("64KiB")
    ugds.testing.emulator(device).inject("late_write", opcode=READ)

    def read(buffer: ugds.Registration) -> None:
        with pytest.raises(ugds.Error):
            device.read(buffer)

    thread = threading.Thread(target=read, args=(buffer,))
    thread.start()
    del buffer
    gc.collect()
    thread.join()
    del thread
    gc.collect()
    works(device)
    assert _core.open_registrations() == registrations  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["read", "batch"])
def test_a_command_that_came_late_does_not_hide_what_the_device_says_of_another(open_ssd: OpenSsd, way: str) -> None:
    device = open_ssd("emulated:4MiB?lba=512&mdts=1", deadline=0.3, queues=1)
    emulator = ugds.testing.emulator(device)
    with ugds.empty("1MiB") as buffer:
        for _ in range(10):
            emulator.clear_faults()
            # Overdue, and it comes while it is being aborted; on a machine that is busy it may not.
            emulator.inject("late", opcode=2, delay_ns=310_000_000, lba=0, blocks=16)
            emulator.inject("abort_lies", opcode=8, admin=True)
            emulator.inject("status", opcode=2, status=0x281, lba=1000, blocks=8)
            if way == "read":
                with pytest.raises(ugds.Error) as caught:
                    device.read(buffer)
                error = caught.value
            else:
                with device.batch(4) as batch:
                    batch.read(buffer, 0, 1 << 20)
                    told = batch.completed(1, timeout=20)[0].error
                assert told is not None
                error = told
            assert error.completed in (0, 992 * 512)
            if error.completed != 0:
                break
        assert (error.errno, error.status) == (errno.EIO, 0x281), str(error)


def test_closing_meets_the_deadline_of_requests_that_nobody_waits_for() -> None:
    device = ugds.open("emulated:4MiB?lba=512&timeout=1", deadline=0.2)
    with ugds.empty("4KiB") as buffer:
        ugds.testing.emulator(device).inject("hang", opcode=2, abortable=False)
        device.batch(4).read(buffer, 0, 4096)
        start = time.monotonic()
        with pytest.raises(ugds.Error) as caught:  # which nobody has looked at
            device.close(drain=60)
        assert caught.value.errno == errno.ETIMEDOUT
        assert device.closed and time.monotonic() - start < 30
