# SPDX-License-Identifier: Apache-2.0
"""Requests that a reset ended and that are submitted again: as often as was allowed, told once, and right."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ugds
import ugds.testing

KIB, MIB = 1 << 10, 1 << 20
READ, WRITE = 2, 1
#: Two commands of 4 KiB and more, 64 KiB in eight.
URI = "emulated:4MiB?lba=512&mdts=1&timeout=1"
OpenSsd = Callable[..., ugds.Device]


def sync(device: ugds.Device, buffer: ugds.Registration, count: int) -> list[int | None]:
    """As many reads as are asked for, each by a thread; what became of them."""
    results: list[int | None] = [None] * count

    def one(number: int) -> None:
        try:
            results[number] = device.read(buffer, number * 64 * KIB, 64 * KIB, number * 64 * KIB)
        except ugds.Error as error:
            results[number] = -(error.errno or 0)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def batch(device: ugds.Device, buffer: ugds.Registration, count: int) -> list[int | None]:
    """Large ones by even numbers, small ones by odd ones, which all the same bring every byte."""
    results: list[int | None] = []
    with device.batch(1024) as made:
        for number in range(count):
            at = number * 64 * KIB
            if number % 2 == 0:
                made.read(buffer, at, 64 * KIB, at)
            else:
                made.read(buffer, np.arange(at, at + 64 * KIB, 4 * KIB), 4 * KIB, np.arange(at, at + 64 * KIB, 4 * KIB))
        while made.outstanding:
            results += made.completed(1024, timeout=5).results.tolist()
        assert len(results) == (count + 1) // 2 + count // 2 * 16
    return results


def awaited(device: ugds.Device, buffer: ugds.Registration, count: int) -> list[int | None]:
    async def all_of_them() -> list[Any]:
        some = (device.aread(buffer, n * 64 * KIB, 64 * KIB, n * 64 * KIB) for n in range(count))
        return await asyncio.gather(*some, return_exceptions=True)

    return [-(one.errno or 0) if isinstance(one, ugds.Error) else one for one in asyncio.run(all_of_them())]


WAYS = {"sync": sync, "batch": batch, "await": awaited}


def filled(device: ugds.Device, count: int) -> np.ndarray[Any, Any]:
    data = np.random.default_rng(7).integers(0, 256, count * 64 * KIB, "u1")
    ugds.testing.emulator(device).poke(0, data.tobytes())
    return data


@pytest.mark.parametrize("kind", ["hang", "late_write", "fatal"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_reset_ended_is_submitted_again_and_right(open_ssd: OpenSsd, way: str, kind: str) -> None:
    """The command that hangs is the third of its request: of that, two are right before."""
    device = open_ssd(URI, deadline=0.3, queues=2, retry=1)
    data = filled(device, 8)
    emulator = ugds.testing.emulator(device)
    resets = emulator.counters()["resets"]
    emulator.inject(kind, opcode=READ, skip=10, abortable=False)
    with ugds.empty(len(data)) as buffer:
        results = WAYS[way](device, buffer, 8)
        assert all(result is not None and result > 0 for result in results), results
        view = np.frombuffer(buffer, "u1")
        assert np.array_equal(view, data)
        del view
    assert emulator.counters()["resets"] == resets + 1
    stats = device.stats()
    assert 0 < stats.retries <= len(results)
    assert (stats.in_flight, device.state) == (0, "ready")


@pytest.mark.parametrize("way", WAYS)
def test_without_being_asked_for_nothing_is_submitted_again(open_ssd: OpenSsd, way: str) -> None:
    device = open_ssd(URI, deadline=0.3, queues=2)
    filled(device, 8)
    ugds.testing.emulator(device).inject("hang", opcode=READ, skip=10, abortable=False)
    with ugds.empty(512 * KIB) as buffer:
        results = WAYS[way](device, buffer, 8)
    assert {result for result in results if result and result < 0} <= {-errno.ETIMEDOUT, -errno.ECANCELED}
    assert -errno.ETIMEDOUT in results
    assert (device.stats().retries, device.info.retry) == (0, 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_request_that_is_ended_each_time_fails_when_its_retries_are_spent(open_ssd: OpenSsd, way: str) -> None:
    device = open_ssd(URI + "&retry=2", deadline=0.2, queues=2)
    assert device.info.retry == 2
    filled(device, 1)
    emulator = ugds.testing.emulator(device)
    resets = emulator.counters()["resets"]
    emulator.inject("hang", opcode=READ, lba=40, blocks=1, abortable=False, count=100)
    with ugds.empty(64 * KIB) as buffer:
        assert WAYS[way](device, buffer, 1) == [-errno.ETIMEDOUT]
        assert emulator.counters()["resets"] == resets + 3
        assert device.stats().retries == 2
        emulator.clear_faults()
        assert WAYS[way](device, buffer, 1) == [64 * KIB]


@pytest.mark.parametrize("way", ["sync", "batch"])
def test_the_prefix_that_is_right_is_told_and_not_moved_again(open_ssd: OpenSsd, way: str) -> None:
    """Of eight commands the third hangs twice: two are right, and are read once."""
    device = open_ssd(URI, deadline=0.2, queues=1, depth=2, retry=1)  # one command at a time
    data = filled(device, 1)
    emulator = ugds.testing.emulator(device)
    emulator.inject("hang", opcode=READ, lba=32, blocks=16, abortable=False, count=2)
    with ugds.empty(64 * KIB) as buffer:
        with pytest.raises(ugds.Error) as caught, device.batch(4) as made:
            if way == "sync":
                device.read(buffer)
            else:
                made.read(buffer, 0, 64 * KIB)
                made.wait()
        assert (caught.value.errno, caught.value.completed) == (errno.ETIMEDOUT, 16 * KIB)
        view = np.frombuffer(buffer, "u1")
        assert np.array_equal(view[: 16 * KIB], data[: 16 * KIB])
        del view
    stats = device.stats()
    assert (stats.commands, stats.errors, stats.read_bytes) == (2 + 2, 2, 16 * KIB)  # the third was given twice


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("way", ["sync", "batch"])
def test_writes_are_the_same_bytes_again(open_ssd: OpenSsd, way: str, durable: bool) -> None:
    device = open_ssd(URI + "&vwc=1", deadline=0.3, queues=2, retry=1)
    emulator = ugds.testing.emulator(device)
    data = np.random.default_rng(8).integers(0, 256, 64 * KIB, "u1")
    emulator.inject("hang", opcode=WRITE, skip=2, abortable=False)
    with ugds.empty(64 * KIB) as buffer:  # on pages, as most requests are
        memoryview(buffer)[:] = data.tobytes()
        if way == "sync":
            assert device.write(buffer, durable=durable) == 64 * KIB
        else:
            with device.batch(64) as made:
                made.write(buffer, np.arange(16) * 4 * KIB, 4 * KIB, np.arange(16) * 4 * KIB, durable=durable)
                made.wait()
    assert device.stats().retries > 0
    if durable:
        emulator.power_cut()
    assert emulator.peek(0, 64 * KIB) == data.tobytes()


@pytest.mark.parametrize("kind", ["fatal", "hang"])
def test_closing_waits_for_what_is_submitted_again(kind: str) -> None:
    """Also where nobody is in a call of the batch when the reset comes."""
    uri = URI + f"&name=closing-{kind}"
    data = np.random.default_rng(3).integers(0, 256, 64 * KIB, "u1")
    ssd = ugds.open(uri, deadline=0.2, retry=2)
    try:
        with ugds.register(data) as buffer:
            ugds.testing.emulator(ssd).inject(kind, opcode=WRITE, skip=3, abortable=False)
            made = ssd.batch(16)
            at = np.arange(0, 64 * KIB, 4 * KIB)
            made.write(buffer, at, 4 * KIB, at)
            ssd.close(drain=20)
        with ugds.open(uri) as again:
            assert ugds.testing.emulator(again).peek(0, 64 * KIB) == data.tobytes()
    finally:
        ugds.testing.forget_subsystem(f"closing-{kind}")


@pytest.mark.parametrize("call", ["flush", "discard"])
def test_what_is_not_idempotent_is_not_submitted_again(open_ssd: OpenSsd, call: str) -> None:
    device = open_ssd(URI, deadline=0.2, retry=3)
    ugds.testing.emulator(device).inject("hang", abortable=False)
    with pytest.raises(ugds.Error) as caught:
        device.flush() if call == "flush" else device.discard(0, 512)
    assert caught.value.errno == errno.ETIMEDOUT
    assert device.stats().retries == 0


def test_partial_blocks_are_submitted_again(open_ssd: OpenSsd) -> None:
    device = open_ssd(URI, deadline=0.2, retry=1)
    emulator = ugds.testing.emulator(device)
    emulator.poke(0, b"\x11" * 8 * KIB)
    emulator.inject("hang", opcode=WRITE, abortable=False)
    with ugds.register(np.full(1000, 0x22, "u1")) as buffer:
        assert device.write(buffer, 100, unaligned=True) == 1000
    assert emulator.peek(0, 8 * KIB) == b"\x11" * 100 + b"\x22" * 1000 + b"\x11" * (8 * KIB - 1100)


@pytest.mark.parametrize("way", WAYS)
def test_the_devices_own_answer_is_final(open_ssd: OpenSsd, way: str) -> None:
    device = open_ssd(URI, deadline=5, retry=3)
    filled(device, 1)
    ugds.testing.emulator(device).inject("status", opcode=READ, status=0x281, count=1)
    with ugds.empty(64 * KIB) as buffer:
        assert WAYS[way](device, buffer, 1) == [-errno.EIO]
    assert device.stats().retries == 0


def test_a_device_that_does_not_start_again_fails_what_would_be_submitted() -> None:
    device = ugds.open(URI, deadline=0.2, retry=3)
    emulator = ugds.testing.emulator(device)
    emulator.inject("hang", opcode=READ, abortable=False)
    emulator.inject("never_ready", count=100)
    with ugds.empty(64 * KIB) as buffer, device.batch(8) as made:
        made.read(buffer, 0, 4 * KIB)
        done = made.completed(timeout=20)
        assert [one.error.errno for one in done.errors if one.error] in ([errno.ETIMEDOUT], [errno.ECANCELED])
        assert device.state == "failed"
        with pytest.raises(ugds.Error):
            device.read(buffer)
    emulator.clear_faults()
    device.close()


STREAM = """
import numpy as np, ugds, ugds.testing
from ugds.bench import cuda
gpu = cuda.gpu(0)
stream, memory = gpu.stream(), gpu.memory(1 << 20)
ssd = ugds.open("emulated:4MiB?lba=512&mdts=1&timeout=1", deadline=0.3, queues=2, retry=1)
emulator = ugds.testing.emulator(ssd)
data = np.random.default_rng(9).integers(0, 256, 1 << 20, "u1")
emulator.poke(0, data.tobytes())
buffer = ugds.register(memory, require=ROUTE)
emulator.inject("hang", opcode=2, skip=20, abortable=False)
print(ssd.read_async(buffer, 0, stream=stream.handle).result(30), (gpu.read(memory.address, 1 << 20) == data).all())
emulator.inject("hang", opcode=1, skip=3, abortable=False)
print(ssd.write_async(buffer, 1 << 20, stream=stream.handle).result(30))
print(emulator.peek(1 << 20, 1 << 20) == data.tobytes(), ssd.stats().retries > 1, emulator.violations())
buffer.close()
ssd.close()
"""


@pytest.mark.parametrize("route", ["direct", "staged"])
def test_requests_on_streams_are_submitted_again(route: str) -> None:
    fake = os.environ.get("FAKE_CUDA_LIBRARY")
    if not fake:
        pytest.skip("FAKE_CUDA_LIBRARY does not name the driver without a GPU")
    done = subprocess.run(
        [sys.executable, "-c", STREAM.replace("ROUTE", repr(route))],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "UGDS_CUDA_LIBRARY": fake},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["1048576 True", "1048576", "True True []"]


@pytest.mark.parametrize("retry", [-1, 17])
def test_retries_out_of_range_are_refused(retry: int) -> None:
    with pytest.raises((ugds.Error, TypeError)):
        ugds.open("emulated:1MiB", retry=retry)
    with pytest.raises(ugds.Error, match="retry"):
        ugds.open(f"emulated:1MiB?retry={retry}")
