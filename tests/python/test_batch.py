# SPDX-License-Identifier: Apache-2.0
"""Batches: arguments of every kind, results that nobody can miss, threads, faults, and lifetimes."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import ugds
import ugds.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ugds import _core

BLOCK, KIB, MIB = 4096, 1 << 10, 1 << 20
UNRECOVERED = 0x281
OpenSsd = Callable[..., ugds.Device]
Array = np.ndarray[Any, Any]


def noise(size: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, 256, size, "u1")


def filled(ssd: ugds.Device, size: int, seed: int = 1) -> Array:
    """What the device's first bytes are then."""
    content = noise(size, seed)
    ugds.testing.emulator(ssd).poke(0, content.tobytes())
    return content


def test_thousands_of_requests_arrive_where_they_belong(open_ssd: OpenSsd) -> None:
    for depth in (1, 2, 7, 128, 1024):
        ssd = open_ssd("emulated:16MiB?lba=512")
        content = filled(ssd, 16 * MIB)
        order = np.random.default_rng(depth).permutation(4096)
        memory = np.zeros(16 * MIB, "u1")
        with ugds.register(memory) as buffer, ssd.batch(depth) as batch:
            cookies = batch.read(buffer, order * BLOCK, BLOCK, np.arange(4096) * BLOCK)
            assert cookies == range(4096)
            assert batch.outstanding == 4096
            done = batch.wait()
            assert sorted(done.cookies.tolist()) == list(cookies)
            assert (done.results == BLOCK).all() and done.errors == []
            assert batch.outstanding == 0
            assert np.array_equal(memory.reshape(4096, BLOCK), content.reshape(4096, BLOCK)[order])
            memory[:] = noise(16 * MIB, depth)
            batch.write(buffer, order * BLOCK, BLOCK)
            batch.wait()
            written = np.frombuffer(ugds.testing.emulator(ssd).peek(0, 16 * MIB), "u1").reshape(4096, BLOCK)
            assert np.array_equal(written[order], memory.reshape(4096, BLOCK))


@pytest.mark.parametrize("kind", ["int64", "uint64", "int32", "uint16", ">i8", "strided", "list", "tuple", "range"])
def test_every_kind_of_integer_array_is_taken(ssd: ugds.Device, kind: str) -> None:
    content = filled(ssd, 64 * KIB)
    blocks = [3, 1, 7, 0]
    offsets: Any = [512 * block for block in blocks]
    if kind == "strided":
        offsets = np.repeat(np.array(offsets), 3)[::3]
    elif kind == "tuple":
        offsets = tuple(offsets)
    elif kind == "range":
        offsets, blocks = range(0, 2048, 512), [0, 1, 2, 3]
    elif kind != "list":
        offsets = np.array(offsets, kind)
    memory = np.zeros(2048, "u1")
    with ugds.register(memory) as buffer, ssd.batch() as batch:
        batch.read(buffer, offsets, 512)
        assert batch.wait().results.tolist() == [512] * 4
    assert np.array_equal(memory.reshape(4, 512), content[: 64 * KIB].reshape(-1, 512)[blocks])


@pytest.fixture
def ssd(open_ssd: OpenSsd) -> ugds.Device:
    return open_ssd("emulated:64MiB?lba=512")


def test_arguments_are_broadcast_and_texts_are_sizes(ssd: ugds.Device) -> None:
    content = filled(ssd, MIB)
    memory = np.zeros(64 * KIB, "u1")
    with ugds.register(memory) as buffer, ssd.batch() as batch:
        assert batch.read(buffer, "64KiB", "4KiB", "8KiB") == range(1)
        batch.wait()
        assert np.array_equal(memory[8 * KIB : 12 * KIB], content[64 * KIB : 68 * KIB])
        # Different sizes from one place, packed.
        assert batch.read(buffer, 0, np.array([512, 4096, 1024])) == range(1, 4)
        batch.wait()
        for at, size in ((0, 512), (512, 4096), (4608, 1024)):
            assert np.array_equal(memory[at : at + size], content[:size])
        # An array of one is for all; the rest of the buffer without a size.
        batch.read(buffer, [512, 1024], [512], np.array([0, 512]), cookies=[7, 8])
        assert sorted(batch.wait().cookies.tolist()) == [7, 8]
        assert np.array_equal(memory[:1024], content[512:1536])
        batch.read(buffer, 4096, buffer_offsets="60KiB")
        assert batch.wait().results.tolist() == [4096]
        assert np.array_equal(memory[60 * KIB :], content[4096:8192])
        assert batch.read(buffer, []) == range(5, 5)
        assert batch.read(buffer, np.array([], "i8"), 512, cookies=np.array([], "i8")).tolist() == []
        assert batch.outstanding == 0 and len(batch.completed()) == 0


def test_cookies_come_back_as_they_were_given(ssd: ugds.Device) -> None:
    with ugds.empty(BLOCK) as buffer, ssd.batch() as batch:
        given = np.array([5, 2**63 - 1, 0], "u8")
        assert batch.read(buffer, [0, 512, 1024], 512, 0, given) is given
        assert sorted(batch.wait().cookies.tolist()) == [0, 5, 2**63 - 1]
        assert batch.read(buffer, [0, 512], 512, 0, 9).tolist() == [9, 9]
        assert batch.wait().cookies.tolist() == [9, 9]
        assert batch.read(buffer, 0, 512, cookies=9) == range(9, 10)
        batch.wait()
        assert batch.read(buffer, 0, 512) == range(1)
        batch.wait()


def test_a_list_has_a_buffer_for_each_request(ssd: ugds.Device) -> None:
    content = filled(ssd, MIB)
    memory = np.zeros(64 * KIB, "u1")
    with ugds.register(memory) as whole, ugds.empty(8 * KIB) as other, ssd.batch() as batch:
        parts = [memory[4096:8192], other, memory[8192:8704], other, whole]
        batch.read(parts, [0, 4096, 8192, 16384, 0], [4096, 1024, 512, 512, 512], [0, 0, 0, 4096, 32768])
        batch.wait()
        assert np.array_equal(memory[4096:8192], content[:4096])
        assert np.array_equal(memory[8192:8704], content[8192:8704])
        assert np.array_equal(memory[32768:33280], content[:512])
        assert bytes(other)[:1024] == content[4096:5120].tobytes()
        assert bytes(other)[4096:4608] == content[16384:16896].tobytes()
        # The whole of each.
        batch.write([memory[:512], other], [MIB, 2 * MIB])
        assert sorted(batch.wait().results.tolist()) == [512, 8192]
        assert ugds.testing.emulator(ssd).peek(2 * MIB, 8192) == bytes(other)
        with pytest.raises(ugds.Error, match="for 2 requests and offsets for 3"):
            batch.read([whole, other], [0, 512, 1024], 512)
        assert batch.read([], []) == range(7, 7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([0, -512], 512), r"offsets\[1\] is negative"),
        ((-1, 512), "offsets is -1"),
        ((np.array([2**63], "u8"), 512), r"offsets\[0\] is negative, or above"),
        ((2**63, 512), "offsets is negative, or above"),
        ((2**64, 512), "offsets is 18446744073709551616"),
        (([0, 512], [512, -512]), r"sizes\[1\]"),
        (([0, 512], 512, [0, -4]), r"buffer_offsets\[1\]"),
        (([0, 512], 512, 0, [0, -4]), r"cookies\[1\]"),
        (([0, 512], [1, 2, 3]), "offsets is for 2 requests and sizes for 3"),
        (([0, 512], 512, None, np.arange(3)), "offsets is for 2 requests and cookies for 3"),
        (([[0, 512]], 512), "2 dimensions"),
        (([0, 512], BLOCK), r"request 1, \[4096, \+4096\), reaches beyond its buffer"),
        (([0, 512], 512, [0, BLOCK]), r"request 1, \[4096, \+512\)"),
        ((0, 2**63 - 1, 2**62), "reaches beyond its buffer"),
        ((0, 512, 2**63 - 1), "reaches beyond its buffer"),
        ((0, None, 2 * BLOCK), "lies beyond the buffer"),
    ],
)
def test_wrong_numbers_are_refused_before_anything_is_submitted(
    ssd: ugds.Device, arguments: Sequence[Any], words: str
) -> None:
    before = ssd.stats().commands
    with ugds.empty(BLOCK) as buffer, ssd.batch() as batch:
        with pytest.raises(ugds.Error, match=words) as caught:
            batch.read(buffer, *arguments)
        assert caught.value.errno == errno.EINVAL
        assert batch.outstanding == 0
    assert ssd.stats().commands == before


def test_wrong_types_are_refused(ssd: ugds.Device) -> None:
    with ugds.empty(BLOCK) as buffer, ssd.batch() as batch:
        for arguments in (([0.5], 512), (["x"], 512), (None, 512), ([True], 512), (0, 512, 0, [None]), ([0, 512],)):
            with pytest.raises(TypeError):
                batch.read(buffer, *arguments)  # type: ignore[arg-type]
        for call in (
            lambda: batch.read(buffer, 0, durable=True),
            lambda: batch.read(buffer),
            lambda: batch.read(buffer, 0, offsets=0),
            lambda: batch.read(bytearray(BLOCK), 0, nonsense=1),
            lambda: batch.completed(1, 2, 3, 4),
            lambda: batch.completed(timeout="soon"),
        ):
            with pytest.raises(TypeError):
                call()
        for call, code in (
            (lambda: batch.read(bytearray(BLOCK), 0), errno.EINVAL),
            (lambda: batch.completed(timeout=-1), errno.EINVAL),
            (lambda: batch.completed(min=-1), errno.EINVAL),
            (lambda: ssd.batch(0), errno.EINVAL),
            (lambda: ssd.batch(1 << 21), errno.EINVAL),
        ):
            with pytest.raises(ugds.Error) as caught:
                call()
            assert caught.value.errno == code
            assert caught.value.device == ssd.uri
        closed = ugds.empty(BLOCK)
        closed.close()
        with pytest.raises(ugds.Error) as caught:
            batch.read(closed, 0)
        assert caught.value.errno == errno.ESTALE
        assert batch.outstanding == 0
    for kind in (_core.Batch, _core.Completions):
        with pytest.raises(TypeError):
            kind()


def test_requests_that_fail_are_told_apart_exactly(ssd: ugds.Device) -> None:
    """By range, by rule, by the device, and in the middle of a large one."""
    emulator = ugds.testing.emulator(ssd)
    emulator.inject("status", opcode=2, status=UNRECOVERED, lba=100, blocks=1)
    emulator.inject("status", opcode=2, status=UNRECOVERED, lba=16384 + 5000, blocks=1)
    big = 8 * MIB
    memory = np.zeros(big + 64 * KIB, "u1")
    with ugds.register(memory) as buffer, ssd.batch(8) as batch:
        offsets = [0, 100 * 512, 64 * MIB - 512, 64 * MIB, 513, 4096, 16384 * 512]
        sizes = [512, 512, 512, 512, 512, 0, big]
        places = [0, 512, 1024, 1536, 2048, 2560, 64 * KIB]
        batch.read(buffer, offsets, sizes, places)
        done = batch.completed(min=7)
        by_cookie = {one.cookie: one for one in done}
    assert {cookie: one.size for cookie, one in by_cookie.items() if one.error is None} == {0: 512, 2: 512, 5: 0}
    codes = {cookie: one.error.errno for cookie, one in by_cookie.items() if one.error is not None}
    assert codes == {1: errno.EIO, 3: errno.ERANGE, 4: errno.EINVAL, 6: errno.EIO}
    failed = by_cookie[6].error
    assert failed is not None
    assert (failed.offset, failed.length, failed.status) == (16384 * 512, big, UNRECOVERED)
    assert by_cookie[6].size == failed.completed == 5000 * 512 // (128 * KIB) * (128 * KIB)
    with pytest.raises(ugds.Error):
        by_cookie[6].result()
    assert by_cookie[0].result() == 512
    results = dict(zip(done.cookies.tolist(), done.results.tolist(), strict=True))
    assert results == {0: 512, 1: -errno.EIO, 2: 512, 3: -errno.ERANGE, 4: -errno.EINVAL, 5: 0, 6: -errno.EIO}
    assert {one.cookie for one in done.errors} == {1, 3, 4, 6}


def test_completions_are_a_sequence(ssd: ugds.Device) -> None:
    with ugds.empty(BLOCK) as buffer, ssd.batch() as batch:
        batch.read(buffer, [0, 512, 1 << 40, 1024], 512, 0)
        done = batch.completed(4)
        assert isinstance(done, Sequence) and len(done) == 4
        assert [one.cookie for one in done] == [done[i].cookie for i in range(4)] == done.cookies.tolist()
        assert done[-1].cookie == done.cookies[-1] and len(done[1:3]) == 2
        assert [one.cookie for one in done if one.error] == [2]
        cookie, size, error = done[0]
        assert cookie == done.cookies[0] and size == (0 if error else 512)
        for beyond in (4, -5):
            with pytest.raises(IndexError):
                done[beyond]
        with pytest.raises(ValueError):
            done.results[0] = 1
        assert "4 requests, 1 failed" in repr(done)
        results = done.results
    del done
    assert results[results > 0].tolist() == [512] * 3


def test_completed_gives_what_there_is_and_never_waits_for_what_cannot_come(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?lba=512&latency=100ms")
    with ugds.empty(BLOCK) as buffer, ssd.batch() as batch:
        assert len(batch.completed()) == len(batch.completed(min=100)) == 0
        batch.read(buffer, [0] * 10, BLOCK, 0)
        assert len(batch.completed(0)) == len(batch.completed(timeout=0)) == 0
        start = time.monotonic()
        assert len(batch.completed(timeout=0.02)) == 0
        assert 0.02 <= time.monotonic() - start < 0.09
        assert batch.outstanding == 10
        with pytest.raises(ugds.Error, match="10 requests have not ended") as caught:
            batch.wait(0.01)
        assert caught.value.errno == errno.ETIMEDOUT
        assert len(batch.completed(min=3, max=3)) == 3
        assert len(batch.completed(min=100, max=5)) == 5
        assert len(batch.completed(max=0)) == 0
        assert len(batch.completed(min=100)) == 2
        assert batch.outstanding == len(batch.wait()) == 0


def test_a_wait_that_ran_out_of_time_loses_nothing(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?lba=512")
    ugds.testing.emulator(ssd).inject("late", skip=2, delay_ns=300_000_000)
    with ugds.empty(BLOCK) as buffer, ssd.batch() as batch:
        batch.read(buffer, [0, 1 << 40, 4096, 8192], BLOCK, 0)
        with pytest.raises(ugds.Error) as caught:
            batch.wait(0.05)
        assert caught.value.errno == errno.ETIMEDOUT
        assert batch.outstanding == 4
        with pytest.raises(ugds.Error) as caught:
            batch.wait()
        assert caught.value.errno == errno.ERANGE
        assert [one.cookie for one in caught.value.failures] == [1]
        assert sorted(caught.value.completions.cookies.tolist()) == [0, 1, 2, 3]


def looked_at(how: str, batch: ugds.Batch) -> None:
    done = batch.completed(3)
    if how == "iterated":
        assert sum(one.error is not None for one in done) == 2
    elif how == "errors":
        assert len(done.errors) == 2
    elif how == "results":
        assert (done.results < 0).sum() == 2
    elif how == "half":
        assert next(one for one in done if one.error).cookie in (1, 2)
        assert done.errors
    elif how == "index":
        for i in range(3):
            done[i]


@pytest.mark.parametrize("how", ["iterated", "errors", "results", "half", "index"])
def test_an_error_that_was_looked_at_is_not_raised_again(ssd: ugds.Device, how: str) -> None:
    with ugds.empty(BLOCK) as buffer, ssd.batch() as batch:
        batch.read(buffer, [0, 1 << 40, 1 << 41], 512, 0)
        looked_at(how, batch)


@pytest.mark.parametrize("how", ["uncollected", "collected", "cookies", "first only", "waiting inside"])
def test_an_error_that_nobody_looked_at_is_raised_in_the_end(ssd: ugds.Device, how: str) -> None:
    count = 2
    with (
        ugds.empty(BLOCK) as buffer,
        pytest.raises(ugds.Error, match="looked at") as caught,
        ssd.batch(2 if how == "waiting inside" else 16) as batch,
    ):
        batch.read(buffer, [0, 1 << 40, 1 << 41], 512, 0)
        if how == "collected":
            batch.completed(3)
        elif how == "cookies":
            assert len(batch.completed(3).cookies) == 3
        elif how == "first only":
            done = batch.completed(3)
            assert [i for i in range(3) if done.cookies[i] == 1 and done[i].error]
            count = 1
    assert caught.value.errno == errno.ERANGE
    assert f"{count} request" in str(caught.value) and len(caught.value.failures) == count
    assert caught.value.offset in (1 << 40, 1 << 41) and caught.value.operation == "read"


def test_unseen_errors_are_counted_however_many(ssd: ugds.Device) -> None:
    with (
        ugds.empty(BLOCK) as buffer,
        pytest.raises(ugds.Error, match="1000 requests") as caught,
        ssd.batch(16) as batch,
    ):
        for _ in range(10):
            batch.read(buffer, [1 << 40] * 100, 512, 0)
            batch.completed(100)
    assert 0 < len(caught.value.failures) <= 100


def test_an_exception_that_leaves_the_block_is_not_replaced(ssd: ugds.Device) -> None:
    with ugds.empty(BLOCK) as buffer, pytest.raises(ZeroDivisionError), ssd.batch() as batch:
        batch.read(buffer, 1 << 40, 512)
        raise ZeroDivisionError
    assert batch.closed


def test_leaving_the_block_waits_for_what_is_in_flight(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?lba=512&latency=50ms")
    filled(ssd, BLOCK)
    memory = np.zeros(BLOCK, "u1")
    with ugds.register(memory) as buffer:
        with ssd.batch() as batch:
            batch.read(buffer, 0)
        assert np.array_equal(memory, noise(BLOCK))
        assert batch.closed and batch.outstanding == 0
        batch.close()
        for call in (lambda: batch.read(buffer, 0), batch.completed, batch.wait, batch.cancel):
            with pytest.raises(ugds.Error, match="closed") as caught:
                call()
            assert caught.value.errno == errno.EBADF


def test_cancel_takes_back_what_the_device_was_not_given(open_ssd: OpenSsd) -> None:
    """What the device has runs on."""
    ssd = open_ssd("emulated:1MiB?lba=512&depth=8&latency=200ms", queues=2)
    with ugds.empty(BLOCK) as buffer, ssd.batch(64) as batch:
        submitting = threading.Thread(target=lambda: batch.read(buffer, [0] * 20, 512, 0))
        submitting.start()
        while batch.outstanding < 20 or ssd.stats().in_flight < 7:
            time.sleep(0.001)
        assert batch.cancel() == 13
        submitting.join()
        done = batch.completed(20)
        assert sorted(done.results.tolist()) == [-errno.ECANCELED] * 13 + [512] * 7
        assert batch.cancel() == 0


def test_closing_in_the_middle_leaves_nothing(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:16MiB?lba=512&latency=5ms")
    for _ in range(20):
        with ugds.empty(MIB) as buffer:
            batch = ssd.batch(256)
            batch.read(buffer, np.arange(256) * BLOCK, BLOCK)
            batch.close()
    assert ssd.stats().in_flight == 0


def test_a_batch_that_is_dropped_frees_its_place_later(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?lba=512&latency=2ms")
    with ugds.empty(BLOCK) as buffer:
        for _ in range(400):  # of which 256 may be open
            ssd.batch(4).read(buffer, 0)
            time.sleep(0.0005)
        with pytest.raises(ugds.Error) as caught:
            kept = [ssd.batch(1) for _ in range(300)]
            del kept
        assert caught.value.errno == errno.EMFILE
        while ssd.stats().in_flight:
            ssd.read(buffer)
            with ssd.batch(1):
                pass


def test_memory_that_is_dropped_in_flight_is_kept_until_the_device_is_done(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?lba=512&latency=100ms")
    content = filled(ssd, 2 * BLOCK)
    before = _core.open_registrations()
    memory = np.zeros(2 * BLOCK, "u1")
    with ssd.batch() as batch:
        batch.read(ugds.register(memory), [0, BLOCK], BLOCK)
        ours = ugds.empty(BLOCK)
        batch.read(ours, 0)
        view = np.frombuffer(ours, "u1")
        del ours
        gc.collect()
        assert _core.open_registrations() == before + 2
        assert batch.wait().results.tolist() == [BLOCK] * 3
        assert np.array_equal(memory, content) and np.array_equal(view, content[:BLOCK])
    del view
    ugds.empty(BLOCK).close()  # collects what was left
    assert _core.open_registrations() == before


def test_memory_in_flight_cannot_be_closed(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?lba=512&latency=100ms")
    buffer = ugds.empty(BLOCK)
    with ssd.batch() as batch:
        batch.read(buffer, 0)
        with pytest.raises(ugds.Error) as caught:
            buffer.close()
        assert caught.value.errno == errno.EBUSY
        batch.wait()
        buffer.close()
        batch.read([ugds.empty(BLOCK)] * 3, [0, 512, 1024], 512)


@pytest.mark.parametrize("event", ["power", "remove", "hang", "fatal", "close"])
def test_what_happens_to_the_device_in_the_middle_is_told(event: str) -> None:
    ssd = ugds.open("emulated:16MiB?lba=512&latency=5ms&vwc=1", deadline=0.3)
    emulator = ugds.testing.emulator(ssd)
    with ugds.empty(MIB) as buffer:
        batch = ssd.batch(512)
        batch.read(buffer, np.arange(256) * BLOCK, BLOCK)
        if event == "hang":
            batch.wait()
            emulator.inject("hang", skip=100, count=3)
            batch.read(buffer, np.arange(256) * BLOCK, BLOCK)
        elif event == "fatal":
            emulator.inject("fatal")
            batch.read(buffer, 0, BLOCK)
        elif event == "power":
            emulator.power_cut()
        elif event == "remove":
            emulator.remove()
        else:
            ssd.close()
            with pytest.raises(ugds.Error) as caught:
                batch.completed()
            assert caught.value.errno == errno.EBADF
            with pytest.raises(ugds.Error, match="256 requests"), batch:
                pass
            return
        done = batch.completed(10_000, timeout=20)
        assert batch.outstanding == 0
        codes = {one.error.errno for one in done.errors if one.error}
        if event == "hang":
            assert len(done) == 256 and codes == {errno.ETIMEDOUT} and len(done.errors) == 3
        else:
            assert len(done) in (256, 257)
            assert codes == {errno.ENODEV if event == "remove" else errno.ECANCELED}
        if event == "remove":
            with pytest.raises(ugds.Error) as caught, batch:
                batch.read(buffer, [0, BLOCK], BLOCK, 0)
            assert caught.value.errno == errno.ENODEV and len(caught.value.failures) == 2
        else:
            with batch:
                batch.read(buffer, [0, BLOCK], BLOCK, 0)
                assert batch.wait().results.tolist() == [BLOCK] * 2
        ssd.close()
    assert emulator_quiet(emulator)


def emulator_quiet(emulator: ugds.testing.Emulator) -> bool:
    try:
        return emulator.violations() == []
    except ugds.Error:
        return True  # closed with its device


def test_polling_alone_recovers_a_hung_request() -> None:
    """Also where no call waits long enough to look at the device by itself."""
    with ugds.open("emulated:1MiB?lba=512", deadline=0.2) as ssd, ugds.empty(BLOCK) as buffer, ssd.batch() as batch:
        ugds.testing.emulator(ssd).inject("hang")
        batch.read(buffer, 0)
        until = time.monotonic() + 10
        while not (done := batch.completed(timeout=0)) and time.monotonic() < until:
            pass
        assert [one.error.errno for one in done if one.error] == [errno.ETIMEDOUT]


def test_several_batches_and_threads_share_one_queue(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:64MiB?lba=512&depth=32", queues=1)
    content = filled(ssd, 16 * MIB)
    wrong: list[object] = []

    def batches(seed: int) -> None:
        random = np.random.default_rng(seed)
        with ugds.empty(MIB) as buffer, ssd.batch(int(random.integers(2, 300))) as batch:
            memory = np.frombuffer(buffer, "u1")
            for _ in range(15):
                blocks = random.integers(0, 4096, 256)
                memory[:] = 0
                batch.read(buffer, blocks * BLOCK, BLOCK)
                batch.wait()
                if not np.array_equal(memory.reshape(256, BLOCK), content.reshape(4096, BLOCK)[blocks]):
                    wrong.append(seed)
            del memory

    def reads(seed: int) -> None:
        random = np.random.default_rng(seed)
        with ugds.empty(MIB) as buffer:
            for _ in range(150):
                at = int(random.integers(0, 3840)) * BLOCK
                size = int(random.integers(1, 256)) * BLOCK
                ssd.read(buffer, at, size)
                if bytes(memoryview(buffer)[:size]) != content[at : at + size].tobytes():
                    wrong.append(seed)

    threads = [threading.Thread(target=kind, args=(i,)) for i, kind in enumerate([batches, batches, reads, reads])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_of_one_batch_get_each_result_once(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:64MiB?lba=512")
    total, seen, lock = 6 * 3000, [], threading.Lock()
    with ugds.empty(BLOCK) as buffer, ssd.batch(64) as batch:

        def submit(first: int) -> None:
            for i in range(0, 3000, 500):
                batch.read(buffer, np.zeros(500, "i8"), 512, 0, np.arange(first + i, first + i + 500))

        def collect() -> None:
            while True:
                done = batch.completed(min=10, timeout=0.05)
                with lock:
                    seen.extend(done.cookies.tolist())
                    if len(seen) == total:
                        return

        threads = [threading.Thread(target=submit, args=(i * 3000,)) for i in range(6)]
        threads += [threading.Thread(target=collect) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(seen) == list(range(total))
        assert batch.outstanding == 0


def test_other_threads_run_while_a_batch_waits(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?lba=512&latency=400ms")
    counted = 0
    with ugds.empty(BLOCK) as buffer, ssd.batch() as batch:
        batch.read(buffer, 0)
        thread = threading.Thread(target=batch.completed)
        thread.start()
        while thread.is_alive():
            counted += 1
            time.sleep(0.001)
        thread.join()
    assert counted > 40


def test_a_batch_cannot_be_pickled(ssd: ugds.Device) -> None:
    with ssd.batch() as batch:
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(batch)
        assert repr(batch) == f"<ugds.Batch of depth 128 on {ssd.uri}>" and batch.depth == 128
        assert batch.device is ssd


@pytest.mark.parametrize("uri", ["emulated:2MiB?lba=512&mdts=1&depth=5", "emulated:2MiB?lba=512&order=random"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(data=st.data())
def test_a_batch_behaves_as_plain_bytes(uri: str, data: st.DataObject) -> None:
    """Reads and writes of every size, written blocks apart from each other, and requests that break the rules."""
    capacity, lba = 2 * MIB, 512
    model = bytearray(noise(capacity, 3).tobytes())
    memory = noise(512 * KIB, 4)
    expected = memory.copy()
    query = "&pump=caller" if data.draw(st.booleans()) else ""
    with (
        ugds.open(uri + query, queues=data.draw(st.integers(1, 3))) as ssd,
        ugds.testing.strict(ssd) as emulator,
        ugds.register(memory) as buffer,
        ssd.batch(data.draw(st.sampled_from([1, 2, 3, 16, 1000]))) as batch,
    ):
        emulator.poke(0, bytes(model))
        for _ in range(data.draw(st.integers(1, 4))):
            write = data.draw(st.booleans())
            # Neither the device's ranges nor the buffer's overlap within one round: their order is open.
            sizes = np.array(data.draw(st.lists(st.integers(0, 24), min_size=0, max_size=20))) * lba
            sizes = sizes.astype("i8")
            gaps = data.draw(st.lists(st.integers(0, 8), min_size=len(sizes), max_size=len(sizes)))
            offsets = np.cumsum(sizes + np.array(gaps, "i8") * lba) - sizes if len(sizes) else sizes
            places = np.cumsum(sizes) - sizes if len(sizes) else sizes
            bad = {i for i in range(len(sizes)) if data.draw(st.integers(0, 15)) == 0}
            for i in bad:
                offsets[i] = data.draw(st.sampled_from([capacity, capacity - lba + 1, 2**62]))
                sizes[i] = max(lba, sizes[i])
            if len(sizes) and places[-1] + sizes[-1] > len(memory):
                continue
            places = np.cumsum(sizes) - sizes
            order = np.array(data.draw(st.permutations(range(len(sizes)))), "i8")
            call = batch.write if write else batch.read
            cookies = call(buffer, offsets[order], sizes[order], places[order], cookies=order)
            assert len(cookies) == len(sizes)
            done = batch.completed(len(sizes))
            assert sorted(done.cookies.tolist()) == list(range(len(sizes)))
            for one in done:
                i = one.cookie
                assert (one.error is not None) == (i in bad), (one, offsets[i], sizes[i])
                if i in bad:
                    continue
                assert one.size == sizes[i]
                device = slice(int(offsets[i]), int(offsets[i] + sizes[i]))
                host = slice(int(places[i]), int(places[i] + sizes[i]))
                if write:
                    model[device] = memory[host].tobytes()
                else:
                    expected[host] = np.frombuffer(bytes(model[device]), "u1")
            assert np.array_equal(memory, expected)
            assert emulator.peek(0, capacity) == model


PRELUDE = """
import errno, gc, os, signal, sys, threading, time
import numpy as np, ugds, ugds.testing
"""


def run(code: str) -> str:
    """In a process of its own, which must end well and silently."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", PRELUDE + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.parametrize("call", ["batch.wait()", "batch.completed(4)", "batch.read(buffer, [0] * 8, 512, 0)"])
def test_an_interrupt_ends_a_wait_and_loses_nothing(call: str) -> None:
    printed = run(f"""
ssd = ugds.open("emulated:1MiB?lba=512&latency=1s", queues=1)
buffer = ugds.empty("4KiB")
with ssd.batch(4) as batch:
    batch.read(buffer, [0, 512, 1024, 1 << 40], 512)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        {call}
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - start < 0.8)
    count = batch.outstanding
    done = batch.completed(count)
    print(4 <= count == len(done), (done.results < 0).sum())
print(ugds.testing.emulator(ssd).violations())
buffer.close()
ssd.close()
""")
    assert printed.split("\n") == ["interrupted True", "True 1", "[]", ""]


def test_an_interrupt_ends_the_wait_at_a_blocks_end_and_the_rest_is_freed_later() -> None:
    printed = run("""
ssd = ugds.open("emulated:1MiB?lba=512&latency=1s", queues=1)
buffer = ugds.empty("4KiB")
start = time.monotonic()
try:
    with ssd.batch(4) as batch:
        batch.read(buffer, [0, 512], 512)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - start < 0.8, batch.closed)
time.sleep(1)
buffer.close()
print(ugds.testing.emulator(ssd).violations())
ssd.close()
""")
    assert printed.split("\n") == ["interrupted True True", "[]", ""]


def test_a_forked_child_is_told_so() -> None:
    printed = run("""
ssd = ugds.open("emulated:1MiB?lba=512&latency=50ms")
buffer = ugds.empty("4KiB")
batch = ssd.batch()
batch.read(buffer, [0, 512], 512)
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    code = 1
    try:
        said = []
        for call in (lambda: batch.read(buffer, 0), batch.completed, batch.wait, batch.cancel, ssd.batch):
            try:
                call()
                said.append("worked")
            except ugds.Error as error:
                said.append(errno.errorcode[error.errno] + ("" if "fork" in str(error) else " without a reason"))
        batch.close()
        del batch
        gc.collect()
        code = 0 if said == ["EBADF"] * 5 else 2
        if code: print(said, flush=True)
    finally:
        os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), batch.wait().results.tolist())
batch.close()
buffer.close()
ssd.close()
""")
    assert printed == "0 [512, 512]\n"


@pytest.mark.parametrize(
    "end",
    [
        "",
        "del batch, ssd",
        "del buffer",
        "batch.read(buffer, [0] * 3000, 512, 0)",
        "sys.modules['keep'] = (ssd, batch, buffer)",
        "threading.Thread(target=lambda: batch.completed(10), daemon=True).start(); time.sleep(0.02)",
        "ssd.close()",
        "ugds.testing.emulator(ssd).remove()",
    ],
)
def test_the_interpreter_ends_silently_with_requests_in_flight(end: str) -> None:
    run(f"""
ssd = ugds.open("emulated:1MiB?lba=512&latency=20ms")
buffer = ugds.empty("4KiB")
batch = ssd.batch()
batch.read(buffer, [0] * 16, 512, 0)
{end}
""")


def test_nothing_is_left_of_many_batches(open_ssd: OpenSsd) -> None:
    ssd = open_ssd()
    with ugds.empty(BLOCK) as buffer:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(1000):
            with ssd.batch(16) as batch:
                batch.read(buffer, [0] * 4, 512, 0)
                with contextlib.suppress(ugds.Error):
                    batch.wait()
        assert len(os.listdir("/proc/self/fd")) == before
