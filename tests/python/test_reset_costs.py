# SPDX-License-Identifier: Apache-2.0
"""What a reset may have lost: completed writes that no flush had followed. A flush says so, once, whatever else
hides the reset; and every error says what has become of its range."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable

import numpy as np
import pytest
import ugds
import ugds.testing

KIB = 1 << 10
READ, WRITE, FLUSH, DISCARD = 2, 1, 0, 9
URI = "emulated:4MiB?lba=512&mdts=1&timeout=1&vwc=1"
OpenSsd = Callable[..., ugds.Device]


@pytest.fixture
def buffer() -> ugds.Registration:
    return ugds.empty("64KiB")


def code_of(call: Callable[[], object]) -> int | None:
    try:
        call()
    except ugds.Error as error:
        return error.errno
    return None


def in_doubt(call: Callable[[], object]) -> ugds.Error:
    with pytest.raises(ugds.Error) as caught:
        call()
    error = caught.value
    assert error.errno == errno.EIO and "may be lost" in error.cause, error
    assert "write again what was written since the last flush" in error.hint
    assert (error.operation, error.device) == ("flush", URI)
    return error


def written(ssd: ugds.Device, buffer: ugds.Registration, way: str, durable: bool = False) -> None:
    if way == "sync":
        ssd.write(buffer, 0, 16 * KIB, durable=durable)
    elif way == "batch":
        with ssd.batch(16) as batch:
            batch.write(buffer, np.arange(4) * 4096, 4096, durable=durable)
    else:
        asyncio.run(ssd.awrite(buffer, 0, 16 * KIB, durable=durable))


@pytest.mark.parametrize("way", ["sync", "batch", "await"])
@pytest.mark.parametrize("retry", [0, 2])
def test_a_flush_after_a_loss_of_power_says_once_that_writes_may_be_gone(
    open_ssd: OpenSsd, buffer: ugds.Registration, way: str, retry: int
) -> None:
    ssd = open_ssd(URI, retry=retry)
    emulator = ugds.testing.emulator(ssd)
    np.frombuffer(buffer, "u1")[:] = 0x42
    written(ssd, buffer, way)
    emulator.power_cut()
    code_of(lambda: ssd.read(buffer, 1 << 20, 4096))  # which finds the controller reset
    assert ssd.read(buffer, 1 << 20, 4096) == 4096
    assert emulator.peek(0, 512) == bytes(512)
    assert ssd.stats().resets == 1
    in_doubt(ssd.flush)
    ssd.flush()
    np.frombuffer(buffer, "u1")[:] = 0x43
    written(ssd, buffer, way)
    ssd.flush()
    emulator.power_cut()
    code_of(lambda: ssd.read(buffer, 1 << 20, 4096))
    ssd.flush()  # nothing was written since the last one
    assert emulator.peek(0, 512) == b"\x43" * 512


def test_an_awaited_flush_says_it_too(open_ssd: OpenSsd, buffer: ugds.Registration) -> None:
    ssd = open_ssd(URI, retry=1)
    ssd.write(buffer, 0, 4096)
    ugds.testing.emulator(ssd).power_cut()
    ssd.read(buffer, 1 << 20, 4096)
    in_doubt(lambda: asyncio.run(ssd.aflush()))
    asyncio.run(ssd.aflush())


@pytest.mark.parametrize("kind", ["fatal", "hang", "never_stopped"])
def test_a_reset_of_the_librarys_own_puts_writes_in_doubt_too(
    open_ssd: OpenSsd, buffer: ugds.Registration, kind: str
) -> None:
    """No specification says that a volatile write cache outlives one, by CC.EN or of the function."""
    ssd = open_ssd(URI, deadline=0.2, queues=1)
    emulator = ugds.testing.emulator(ssd)
    ssd.write(buffer, 0, 4096)
    if kind == "never_stopped":
        emulator.inject(kind)
    emulator.inject("fatal" if kind == "fatal" else "hang", opcode=READ, abortable=False)
    assert code_of(lambda: ssd.read(buffer)) in (errno.ECANCELED, errno.ETIMEDOUT)
    in_doubt(ssd.flush)
    ssd.flush()


@pytest.mark.parametrize("way", ["sync", "batch", "await"])
def test_durable_writes_flushed_ones_and_devices_without_such_a_cache_leave_no_doubt(
    open_ssd: OpenSsd, buffer: ugds.Registration, way: str
) -> None:
    durable, flushed, without = open_ssd(URI), open_ssd(URI), open_ssd(URI.replace("vwc=1", "vwc=0"))
    for ssd in (durable, flushed, without):
        written(ssd, buffer, way, durable=ssd is durable)
        if ssd is flushed:
            ssd.flush()
        ugds.testing.emulator(ssd).inject("fatal", opcode=READ)
        assert code_of(lambda ssd=ssd: ssd.read(buffer)) == errno.ECANCELED
        ssd.flush()


def test_an_abort_that_ends_a_command_puts_nothing_in_doubt(open_ssd: OpenSsd, buffer: ugds.Registration) -> None:
    ssd = open_ssd(URI, deadline=0.2, queues=1)
    ugds.testing.emulator(ssd)
    ssd.write(buffer, 0, 4096)
    for _ in range(20):  # the controller's thread may be late, and is reset then
        ugds.testing.emulator(ssd).inject("hang", opcode=READ)
        assert code_of(lambda: ssd.read(buffer)) == errno.ETIMEDOUT
        if ssd.stats().resets == 0:
            break
        code_of(ssd.flush)
        ssd.write(buffer, 0, 4096)
    assert ssd.stats().aborts >= 1
    ssd.flush()


def test_a_flush_that_a_reset_ends_says_what_may_be_lost_and_the_next_one_is_good(
    open_ssd: OpenSsd, buffer: ugds.Registration
) -> None:
    ssd = open_ssd(URI, queues=1)
    ssd.write(buffer, 0, 4096)
    ugds.testing.emulator(ssd).inject("fatal", opcode=FLUSH)
    with pytest.raises(ugds.Error) as caught:
        ssd.flush()
    assert caught.value.errno == errno.ECANCELED
    assert "may be lost" in caught.value.cause
    assert "write again what was written since the last flush" in caught.value.hint
    assert "repeat the request" not in str(caught.value)
    ssd.write(buffer, 0, 4096)
    ssd.flush()


def test_a_flush_that_fails_by_itself_does_not_use_up_what_is_to_be_told(
    open_ssd: OpenSsd, buffer: ugds.Registration
) -> None:
    ssd = open_ssd(URI, queues=1)
    ssd.write(buffer, 0, 4096)
    ugds.testing.emulator(ssd).inject("fatal", opcode=READ)
    assert code_of(lambda: ssd.read(buffer)) == errno.ECANCELED
    ugds.testing.emulator(ssd).inject("status", opcode=FLUSH, status=0x006)
    with pytest.raises(ugds.Error) as caught:
        ssd.flush()
    assert caught.value.status == 0x006 and "at byte" not in caught.value.cause and "SMART" in caught.value.hint
    in_doubt(ssd.flush)


def test_every_flush_that_had_begun_when_the_first_was_told_fails(open_ssd: OpenSsd, buffer: ugds.Registration) -> None:
    """Ten flushes hang, a reset ends them: none of them says that all is well."""
    ssd = open_ssd(URI, deadline=0.3)
    emulator = ugds.testing.emulator(ssd)
    ssd.write(buffer, 0, 4096)
    emulator.inject("hang", opcode=FLUSH, abortable=False, count=1)
    codes: list[int | None] = []
    threads = [threading.Thread(target=lambda: codes.append(code_of(ssd.flush))) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errno.ETIMEDOUT in codes  # those that the device had done before are good
    assert set(codes) <= {errno.ETIMEDOUT, errno.ECANCELED, errno.EIO, None}
    ssd.flush()


@pytest.mark.parametrize(
    ("opcode", "call", "left", "remedy"),
    [
        (READ, lambda ssd, buffer: ssd.read(buffer), "nothing more is written to the buffer", "repeat the request"),
        (WRITE, lambda ssd, buffer: ssd.write(buffer), "as before or as written", "write it again"),
        (DISCARD, lambda ssd, buffer: ssd.discard(0, 4096), "deallocated", "only what was not written since"),
    ],
)
def test_what_a_reset_has_left_of_a_request_is_said_of_each_kind(
    open_ssd: OpenSsd,
    buffer: ugds.Registration,
    opcode: int,
    call: Callable[[ugds.Device, ugds.Registration], object],
    left: str,
    remedy: str,
) -> None:
    ssd = open_ssd(URI, queues=1)
    ugds.testing.emulator(ssd).inject("fatal", opcode=opcode)
    with pytest.raises(ugds.Error) as caught:
        call(ssd, buffer)
    assert caught.value.errno == errno.ECANCELED
    assert left in caught.value.cause
    assert remedy in caught.value.hint


def test_an_error_tells_of_the_attempts_before_it_and_of_a_device_that_has_failed(buffer: ugds.Registration) -> None:
    with ugds.open(URI, deadline=0.2, queues=1, retry=2) as ssd:
        emulator = ugds.testing.emulator(ssd)
        emulator.inject("hang", opcode=READ, abortable=False, count=100)
        with pytest.raises(ugds.Error) as caught:
            ssd.read(buffer)
        assert caught.value.errno == errno.ETIMEDOUT
        assert "2 attempts before" in caught.value.cause
        assert "merely slow" in caught.value.hint
        emulator.inject("never_ready", count=100)
        with pytest.raises(ugds.Error) as caught:
            ssd.read(buffer)
        assert ssd.state == "failed"
        assert "merely slow" not in caught.value.hint
        assert "open it again" in caught.value.hint
        emulator.clear_faults()
