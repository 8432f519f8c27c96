# SPDX-License-Identifier: Apache-2.0
"""Files and GPU memory: what POSIX would read and write, by way of pinned memory, in a call and in stream order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ugds
from gpu_support import KIB, MIB
from ugds.bench import cuda

SIZE = 6 * MIB + 123
QUERIES = {"direct": "", "buffered": "?direct=off", "threads": "?io=threads"}


@pytest.fixture(params=QUERIES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ugds.Device, Path]]:
    path = tmp_path / "store"
    path.write_bytes(np.random.default_rng(1).bytes(SIZE))
    with ugds.open(f"file:{path}{QUERIES[request.param]}") as device:
        yield device, path


def ranges(seed: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Offset, size, place in the memory."""
    chosen = random.Random(seed)
    for _ in range(count):
        offset = chosen.choice([chosen.randrange(SIZE), chosen.randrange(SIZE // 4096) * 4096, SIZE - 5])
        size = chosen.choice([1, 511, 4096, 70_001, MIB, 3 * MIB + 1])
        yield offset, size, chosen.choice([0, 1, 4, 4096, 12_345])


def test_reads_of_any_range_end_where_the_file_does(gpu: cuda.Gpu, store: tuple[ugds.Device, Path]) -> None:
    device, path = store
    data = np.frombuffer(path.read_bytes(), np.uint8)
    with gpu.memory(4 * MIB) as memory, ugds.register(memory) as buffer:
        assert buffer.route == "staged"
        for offset, size, place in ranges(1, 60):
            gpu.fill(memory.address, memory.nbytes, 77)
            gpu.synchronize()
            before = gpu.read(memory.address, memory.nbytes)
            expected = data[offset : offset + size]
            assert device.read(buffer, offset, size, place) == len(expected)
            got = gpu.read(memory.address, memory.nbytes)
            end = place + len(expected)
            assert (got[place:end] == expected).all(), (offset, size, place)
            assert (got[:place] == before[:place]).all()
            assert (got[end:] == before[end:]).all(), (offset, size, place)


def test_writes_of_any_range_touch_no_other_byte(gpu: cuda.Gpu, store: tuple[ugds.Device, Path]) -> None:
    device, path = store
    model = bytearray(path.read_bytes())
    with gpu.memory(4 * MIB) as memory, ugds.register(memory) as buffer:
        for turn, (offset, size, place) in enumerate(ranges(2, 40)):
            gpu.fill(memory.address, memory.nbytes, turn << 16)
            gpu.synchronize()
            assert device.write(buffer, offset, size, place, unaligned=True) == size
            model.extend(bytes(max(0, offset + size - len(model))))
            model[offset : offset + size] = bytes(gpu.read(memory.address + place, size))
        assert path.read_bytes() == model


def test_stream_order_holds_for_files(gpu: cuda.Gpu, stream: cuda.Stream, store: tuple[ugds.Device, Path]) -> None:
    """Written, read back and written on, one behind the other on a stream, each with what came before it."""
    device, path = store
    block = 64 * KIB + 8
    with gpu.memory(2 * block) as memory, ugds.register(memory) as buffer:
        for turn in range(60):
            gpu.fill(memory.address, block, turn << 16, stream)
            device.write_async(buffer, turn * block, block, 0, stream=stream.handle)
            gpu.fill(memory.address, block, 0xAB << 16, stream)
            device.read_async(buffer, turn * block, block, block, stream=stream.handle)
            device.write_async(buffer, (60 + turn) * block, block, block, stream=stream.handle)
        ugds.synchronize(stream.handle)
    data = np.frombuffer(path.read_bytes(), np.uint8)
    for turn in range(60):
        expected = cuda.pattern(block, turn << 16)
        assert (data[turn * block : (turn + 1) * block] == expected).all(), turn
        assert (data[(60 + turn) * block : (61 + turn) * block] == expected).all(), turn


def test_a_stream_ordered_read_says_where_the_file_ended(
    gpu: cuda.Gpu, stream: cuda.Stream, store: tuple[ugds.Device, Path]
) -> None:
    device, path = store
    data = np.frombuffer(path.read_bytes(), np.uint8)
    with gpu.memory(4 * MIB) as memory, ugds.register(memory) as buffer:
        for offset, size in ((SIZE - 1000, 4096), (SIZE - 2 * MIB - 7, 4 * MIB), (SIZE, 4096), (SIZE + 5000, MIB)):
            gpu.fill(memory.address, memory.nbytes, 77 << 16, stream)
            op = device.read_async(buffer, offset, size, stream=stream.handle)
            ugds.synchronize(stream.handle)
            there = max(0, min(size, SIZE - offset))
            assert op.result() == there
            got = gpu.read(memory.address, memory.nbytes)
            assert (got[:there] == data[offset : offset + there]).all()
            # Beyond: zeros, or what was there; never anybody else's bytes.
            rest, old = got[there:size], cuda.pattern(memory.nbytes, 77 << 16)[there:size]
            assert ((rest == 0) | (rest == old)).all()
            assert (got[size:] == cuda.pattern(memory.nbytes, 77 << 16)[size:]).all()
