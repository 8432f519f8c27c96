# SPDX-License-Identifier: Apache-2.0
"""Errors on streams, memory that goes away, captures, and what may be closed or dropped while requests are pending."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ugds
import ugds.testing
from gpu_support import BLOCK, KIB, MIB, fill, run_alone, store, wrong
from ugds.bench import cuda

STORED = 5
MILLISECOND = 1_000_000
UNRECOVERED = 0x281  # a status of NVMe: unrecovered read error
READ = 2
PROGRAM = Path(__file__).with_name("dropped.py")


def test_memory_that_was_freed_is_refused(gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str) -> None:
    memory = gpu.memory(4 * MIB)
    buffer = ugds.register(memory, require=route)
    assert ssd.read(buffer, 0, BLOCK) == BLOCK
    memory.close()
    with gpu.memory(4 * MIB):  # which may well lie at the same address
        for request in (
            lambda: ssd.read(buffer, 0, BLOCK),
            lambda: ssd.write(buffer, 0, BLOCK),
            lambda: ssd.read_async(buffer, 0, BLOCK, stream=stream.handle).result(timeout=10),
        ):
            with pytest.raises(ugds.Error) as raised:
                request()
            assert raised.value.errno == errno.ESTALE
    buffer.close()


def test_an_error_on_a_stream_is_raised_by_its_result(gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str) -> None:
    with gpu.memory(64 * KIB) as memory, gpu.memory(8) as words, ugds.register(memory, require=route) as buffer:
        ugds.testing.emulator(ssd).inject("status", opcode=READ, status=UNRECOVERED)
        failed = ssd.read_async(buffer, stream=stream.handle, status=words.address)
        after = ssd.read_async(buffer, stream=stream.handle)
        with pytest.raises(ugds.Error) as raised:
            failed.result(timeout=10)
        assert raised.value.status == UNRECOVERED
        assert (raised.value.offset, raised.value.length) == (0, 64 * KIB)
        assert after.result(timeout=10) == 64 * KIB
        stream.synchronize()
        assert int(gpu.read(words.address, 4).view(np.int32)[0]) == raised.value.errno
        ugds.synchronize(stream.handle)  # somebody looked at it


def test_an_error_that_nobody_looked_at_is_raised_by_synchronize(
    gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str
) -> None:
    with gpu.memory(64 * KIB) as memory, ugds.register(memory, require=route) as buffer:
        ugds.testing.emulator(ssd).inject("status", opcode=READ, status=UNRECOVERED)
        for offset in (0, 64 * KIB):
            ssd.read_async(buffer, offset, stream=stream.handle)
        with pytest.raises(ugds.Error) as raised:
            ugds.synchronize(stream.handle)
        assert raised.value.status == UNRECOVERED
        ugds.synchronize(stream.handle)  # told once


def test_an_error_of_a_group_is_raised_by_its_result(gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str) -> None:
    with gpu.memory(8 * BLOCK) as memory, ugds.register(memory, require=route) as buffer:
        lba, blocks = 3 * BLOCK // ssd.block_size, BLOCK // ssd.block_size
        ugds.testing.emulator(ssd).inject("status", opcode=READ, status=UNRECOVERED, lba=lba, blocks=blocks)
        with ssd.group(stream.handle) as group:
            offsets = [block * BLOCK for block in range(8)]
            group.read(buffer, offsets, BLOCK, offsets)
        with pytest.raises(ugds.Error) as raised:
            group.result(timeout=10)
        assert raised.value.status == UNRECOVERED
        assert ssd.read_async(buffer, 0, BLOCK, stream=stream.handle).result(timeout=10) == BLOCK


def test_a_capture_is_refused_and_leaves_nothing(gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str) -> None:
    store(ssd, 0, 64 * KIB, STORED)
    with gpu.memory(64 * KIB) as memory, ugds.register(memory, require=route) as buffer:
        gpu.fill(memory.address, 64 * KIB, 0)
        gpu.synchronize()
        before = dict(ssd.stats().streams)

        def group() -> None:
            with ssd.group(stream.handle) as made:
                made.read(buffer, [0], [BLOCK], [0])

        for request in (
            lambda: ssd.read_async(buffer, stream=stream.handle),
            lambda: ssd.write_async(buffer, stream=stream.handle),
            group,
        ):
            stream.begin_capture()
            try:
                with pytest.raises(ugds.Error) as raised:
                    request()
                assert raised.value.errno == errno.EOPNOTSUPP
            finally:
                stream.end_capture()  # which fails where the capture was broken
        assert ssd.stats().streams == before
        assert (gpu.read(memory.address, 64 * KIB) == cuda.pattern(64 * KIB, 0)).all()
        assert ssd.read_async(buffer, stream=stream.handle).result(timeout=10) == 64 * KIB
        assert wrong(gpu, memory.address, 0, 64 * KIB, STORED) == 0


def test_a_registration_with_a_pending_request_is_not_closed(
    gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str
) -> None:
    with gpu.memory(64 * KIB) as memory:
        buffer = ugds.register(memory, require=route)
        ssd.read_async(buffer, stream=stream.handle).result(timeout=10)
        gpu.spin(100 * MILLISECOND, stream)
        pending = ssd.read_async(buffer, stream=stream.handle)
        with pytest.raises(ugds.Error) as raised:
            buffer.close()
        assert raised.value.errno == errno.EBUSY
        assert not buffer.closed
        assert pending.result(timeout=10) == 64 * KIB
        stream.synchronize()
        buffer.close()
        assert buffer.closed


def test_bytes_arrive_where_every_object_was_dropped(gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str) -> None:
    store(ssd, 0, MIB, STORED)
    with gpu.memory(MIB) as memory:
        gpu.fill(memory.address, MIB, 0xAB << 16, stream)
        gpu.spin(50 * MILLISECOND, stream)
        ssd.read_async(ugds.register(memory, require=route), stream=stream.handle)
        ugds.synchronize(stream.handle)
        assert wrong(gpu, memory.address, 0, MIB, STORED) == 0


@pytest.mark.parametrize("what", ["objects", "exit", "device", "thread"])
def test_a_process_ends_in_order_with_requests_in_flight(route: str, what: str) -> None:
    assert "ended" in run_alone(PROGRAM, what, route, bound=60)


def test_registering_says_why_a_route_was_taken(gpu: cuda.Gpu, ssd: Any) -> None:
    with gpu.memory(MIB) as memory, ugds.register(memory) as buffer:
        assert buffer.memory == "cuda"
        assert buffer.route in ("direct", "staged")
        assert isinstance(buffer.why, str)
        assert (buffer.gpu, buffer.address, buffer.nbytes) == (gpu.ordinal, memory.address, MIB)
        with pytest.raises(ugds.Error) as raised:
            ugds.register(memory)
        assert raised.value.errno == errno.EEXIST


def test_a_later_device_reaches_memory_that_was_registered_before(
    gpu: cuda.Gpu, open_ssd: Any, stream: cuda.Stream, route: str
) -> None:
    open_ssd("emulated:16MiB")
    with gpu.memory(MIB) as memory, ugds.register(memory, require=route) as buffer:
        later = open_ssd("emulated:16MiB")
        fill(gpu, memory.address, 0, MIB, STORED, stream)
        later.write_async(buffer, stream=stream.handle)
        gpu.fill(memory.address, MIB, 0, stream)
        assert later.read_async(buffer, stream=stream.handle).result(timeout=10) == MIB
        assert wrong(gpu, memory.address, 0, MIB, STORED) == 0
