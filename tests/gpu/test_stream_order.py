# SPDX-License-Identifier: Apache-2.0
"""What a stream-ordered request promises: it happens after what was enqueued before it, and before what comes behind,
with the values that its parameters have by then."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ugds
from gpu_support import BLOCK, FAKE, KIB, MIB, expected, fill, store, stored_wrong, streams, wrong
from ugds.bench import cuda

#: Requests of the long tests, the longest that one of these may take, and how many requests are looked at together.
REPEATS, SECONDS, TOGETHER = (400 if FAKE else 10_000), 60.0, 200
LANES = 4  # streams, fewer than a GPU has connections
STORED = 5
JUNK = 0xAB << 16
MILLISECOND = 1_000_000


def seed_of(turn: int) -> int:
    return (turn % 251) << 16


def delays(seed: int) -> Callable[[], int]:
    """Nanoseconds, often none, so that requests meet streams that are empty and streams that are busy."""
    chosen = random.Random(seed)
    return lambda: chosen.choice([0, 0, 0, chosen.randrange(30_000), chosen.randrange(100_000)])


@pytest.mark.slow
def test_a_kernel_behind_a_write_never_changes_what_is_written(gpu: cuda.Gpu, ssd: Any, route: str) -> None:
    delay, deadline = delays(1), time.monotonic() + SECONDS
    with (
        gpu.memory(LANES * BLOCK) as memory,
        ugds.register(memory, require=route) as buffer,
        streams(gpu, LANES) as all_,
    ):
        for first in range(0, REPEATS, TOGETHER):
            for turn in range(first, first + TOGETHER):
                lane = turn % LANES
                stream, address = all_[lane], memory.address + lane * BLOCK
                gpu.fill(address, BLOCK, seed_of(turn), stream)
                if pause := delay():
                    gpu.spin(pause, stream)
                ssd.write_async(buffer, turn % TOGETHER * BLOCK, BLOCK, lane * BLOCK, stream=stream.handle)
                gpu.fill(address, BLOCK, JUNK, stream)
            for stream in all_:
                ugds.synchronize(stream.handle)
            with ugds.empty(TOGETHER * BLOCK) as host:
                ssd.read(host)
                got = np.frombuffer(bytes(host), np.uint8).reshape(TOGETHER, BLOCK)
                stale = [t for t in range(TOGETHER) if (got[t] != cuda.pattern(BLOCK, seed_of(first + t))).any()]
                assert stale == [], f"of the {TOGETHER} requests from the {first}-th"
            assert time.monotonic() < deadline, f"{first} requests took all the time there is"


@pytest.mark.slow
def test_a_kernel_behind_a_read_never_sees_what_was_there_before(gpu: cuda.Gpu, ssd: Any, route: str) -> None:
    delay, deadline = delays(2), time.monotonic() + SECONDS
    with ugds.empty(251 * BLOCK) as host:
        np.frombuffer(memoryview(host), np.uint8)[:] = np.concatenate(
            [cuda.pattern(BLOCK, seed_of(turn)) for turn in range(251)]
        )
        ssd.write(host)
    with (
        gpu.memory(LANES * BLOCK) as memory,
        gpu.memory(8 * LANES) as wrongs,
        ugds.register(memory, require=route) as buffer,
        streams(gpu, LANES) as all_,
    ):
        gpu.clear(wrongs.address, wrongs.nbytes)
        gpu.synchronize()
        for first in range(0, REPEATS, TOGETHER):
            for turn in range(first, first + TOGETHER):
                lane = turn % LANES
                stream, address = all_[lane], memory.address + lane * BLOCK
                gpu.fill(address, BLOCK, JUNK, stream)
                if pause := delay():
                    gpu.spin(pause, stream)
                ssd.read_async(buffer, turn % 251 * BLOCK, BLOCK, lane * BLOCK, stream=stream.handle)
                gpu.check(address, BLOCK, seed_of(turn), wrongs.address + 8 * lane, stream)
            for stream in all_:
                ugds.synchronize(stream.handle)
                stream.synchronize()
            found = gpu.read(wrongs.address, wrongs.nbytes).view(np.uint64)
            assert found.tolist() == [0] * LANES, f"stale bytes by stream, up to the {first + TOGETHER}-th request"
            assert time.monotonic() < deadline, f"{first} requests took all the time there is"


def test_requests_of_one_stream_happen_in_their_order(gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str) -> None:
    """Each reads what the one before it wrote."""
    steps = 20
    with gpu.memory(2 * 64 * KIB) as memory, ugds.register(memory, require=route) as buffer:
        fill(gpu, memory.address, 0, 64 * KIB, 1, stream)
        for step in range(steps):
            here, there = step % 2 * 64 * KIB, (step + 1) % 2 * 64 * KIB
            ssd.write_async(buffer, step * 64 * KIB, 64 * KIB, here, stream=stream.handle)
            ssd.read_async(buffer, step * 64 * KIB, 64 * KIB, there, stream=stream.handle)
            gpu.fill(memory.address + here, 64 * KIB, JUNK, stream)
        ugds.synchronize(stream.handle)
        stream.synchronize()
        assert wrong(gpu, memory.address + steps % 2 * 64 * KIB, 0, 64 * KIB, 1) == 0
        for step in range(steps):
            assert stored_wrong(ssd, step * 64 * KIB, (step + 1) * 64 * KIB, 0, 1) == 0


def test_a_call_returns_before_its_stream_is_there(gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str) -> None:
    with gpu.memory(BLOCK) as memory, ugds.register(memory, require=route) as buffer:
        ssd.read_async(buffer, stream=stream.handle).result(timeout=10)
        gpu.spin(200 * MILLISECOND, stream)
        start = time.monotonic()
        operation = ssd.read_async(buffer, stream=stream.handle)
        assert time.monotonic() - start < 0.1
        assert not operation.done()
        with pytest.raises(TimeoutError):
            operation.result(timeout=0.01)
        assert operation.result(timeout=10) == BLOCK
        assert operation.done()


def test_late_bound_parameters_have_the_values_of_when_the_stream_is_there(
    gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str
) -> None:
    store(ssd, 0, MIB, STORED)
    with gpu.memory(MIB) as memory, ugds.register(memory, require=route) as buffer:
        gpu.fill(memory.address, MIB, JUNK, stream)
        offset, size, at = (np.array([value], np.int64) for value in (0, 64 * KIB, 0))
        gpu.spin(100 * MILLISECOND, stream)
        operation = ssd.read_async(buffer, offset, size, at, stream=stream.handle)
        offset[0], size[0], at[0] = 12 * BLOCK, 3 * BLOCK, 512
        assert operation.result(timeout=10) == 3 * BLOCK
        stream.synchronize()
        assert wrong(gpu, memory.address + 512, 12 * BLOCK, 15 * BLOCK, STORED) == 0
        around = gpu.read(memory.address, MIB)
        junk = cuda.pattern(MIB, JUNK)
        assert (around[:512] == junk[:512]).all()
        assert (around[512 + 3 * BLOCK :] == junk[512 + 3 * BLOCK :]).all()


def test_a_late_bound_size_is_never_more_than_at_the_call(
    gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str
) -> None:
    store(ssd, 0, MIB, STORED)
    with gpu.memory(MIB) as memory, ugds.register(memory, require=route) as buffer:
        gpu.fill(memory.address, MIB, JUNK, stream)
        size = np.array([2 * BLOCK], np.int64)
        gpu.spin(100 * MILLISECOND, stream)
        operation = ssd.read_async(buffer, 0, size, 0, stream=stream.handle)
        size[0] = 8 * BLOCK
        try:  # refused, or cut: never more
            assert operation.result(timeout=10) <= 2 * BLOCK
        except ugds.Error:
            with pytest.raises(ugds.Error):
                ugds.synchronize(stream.handle)
                raise
        stream.synchronize()
        assert (gpu.read(memory.address, MIB) == cuda.pattern(MIB, JUNK))[2 * BLOCK :].all()


def test_a_group_is_one_unit_of_its_stream(gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str) -> None:
    store(ssd, 0, MIB, STORED)
    count = 64
    order = np.random.default_rng(1).permutation(count)
    with gpu.memory(count * BLOCK) as memory, ugds.register(memory, require=route) as buffer:
        for _ in range(20):
            gpu.fill(memory.address, count * BLOCK, JUNK, stream)
            with ssd.group(stream.handle) as group:
                group.read(buffer, order * BLOCK, BLOCK, order * BLOCK)
            assert wrong(gpu, memory.address, 0, count * BLOCK, STORED, stream) == 0
            assert group.result(timeout=10) == count * BLOCK


def test_a_status_word_is_there_before_the_stream_goes_on(
    gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str
) -> None:
    with gpu.memory(BLOCK) as memory, gpu.memory(8) as words, ugds.register(memory, require=route) as buffer:
        gpu.write(words.address, np.full(8, 0xFF, np.uint8))
        ssd.read_async(buffer, stream=stream.handle, status=words.address).result(timeout=10)
        stream.synchronize()
        # Four bytes, and not the next.
        assert gpu.read(words.address, 8).view(np.int32).tolist() == [0, -1]


@pytest.mark.parametrize("blocking", [False, True])
def test_the_default_stream_is_a_stream_as_any(gpu: cuda.Gpu, ssd: Any, route: str, blocking: bool) -> None:
    """The legacy one, beside streams that wait for it and that do not."""
    store(ssd, 0, MIB, STORED)
    with gpu.memory(MIB) as memory, ugds.register(memory, require=route) as buffer, gpu.stream(blocking) as other:
        for number in (None, 0, cuda.LEGACY, cuda.PER_THREAD):
            gpu.fill(memory.address, MIB, JUNK, number)
            gpu.spin(MILLISECOND, other)
            operation = ssd.read_async(buffer, stream=number)
            ugds.synchronize(number)
            assert operation.result(timeout=10) == MIB
            assert wrong(gpu, memory.address, 0, MIB, STORED) == 0


def test_two_devices_take_turns_on_one_stream(
    gpu: cuda.Gpu, open_ssd: Callable[..., Any], stream: cuda.Stream, route: str
) -> None:
    one, other = open_ssd("emulated:16MiB"), open_ssd("emulated:16MiB")
    store(one, 0, MIB, STORED)
    with gpu.memory(MIB) as memory, ugds.register(memory, require=route) as buffer:
        one.read_async(buffer, stream=stream.handle)
        other.write_async(buffer, stream=stream.handle)
        ugds.synchronize(stream.handle)
    assert stored_wrong(other, 0, MIB, 0, STORED) == 0


def test_statistics_say_how_streams_were_held(gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str) -> None:
    with gpu.memory(64 * KIB) as memory, ugds.register(memory, require=route) as buffer:
        before = dict(ssd.stats().streams)
        for _ in range(10):
            ssd.read_async(buffer, stream=stream.handle)
        ugds.synchronize(stream.handle)
        made = {name: value - before[name] for name, value in ssd.stats().streams.items()}
    assert set(made) >= {"requests", "bytes", "held_by_wait", "held_by_kernel", "held_by_call", "staged", "direct"}
    assert (made["requests"], made["bytes"]) == (10, 10 * 64 * KIB)
    assert made["held_by_wait"] + made["held_by_kernel"] + made["held_by_call"] == 10
    assert (made[route], made["staged" if route == "direct" else "direct"]) == (10, 0)


def test_a_durable_write_survives_a_power_cut(gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str) -> None:
    with gpu.memory(64 * KIB) as memory, ugds.register(memory, require=route) as buffer:
        for durable, kind in ((True, 1), (False, 2)):
            fill(gpu, memory.address, 0, 64 * KIB, kind, stream)
            ssd.write_async(buffer, 0, stream=stream.handle, durable=durable).result(timeout=10)
        ugds.testing.emulator(ssd).power_cut(survive=0.0)
        with pytest.raises(ugds.Error), ugds.empty(BLOCK) as host:
            ssd.read(host)
        assert stored_wrong(ssd, 0, 64 * KIB, 0, 1) == 0


def test_many_sizes_and_places_follow_one_another(gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str) -> None:
    """A staged request's slots are used again and again, by requests of other sizes."""
    store(ssd, 0, 4 * MIB, STORED)
    sizes = itertools.cycle([BLOCK, MIB, 3 * BLOCK, 256 * KIB, 2 * MIB + BLOCK, 20 * BLOCK])
    with gpu.memory(4 * MIB) as memory, ugds.register(memory, require=route) as buffer:
        for turn in range(60):
            size = next(sizes)
            offset = turn * 7 * BLOCK % (4 * MIB - size)
            ssd.read_async(buffer, offset // BLOCK * BLOCK, size, offset // BLOCK * BLOCK, stream=stream.handle)
        for offset in range(0, 4 * MIB, MIB):
            ssd.read_async(buffer, offset, MIB, offset, stream=stream.handle)
        ugds.synchronize(stream.handle)
        assert (gpu.read(memory.address, 4 * MIB) == expected(0, 4 * MIB, STORED)).all()
