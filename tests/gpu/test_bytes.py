# SPDX-License-Identifier: Apache-2.0
"""Every way to move bytes between a device and GPU memory: the right ones arrive, and no other byte changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ugds
from gpu_support import (
    BLOCK,
    FAKE,
    GUARD,
    KIB,
    MIB,
    WAYS,
    Move,
    Room,
    by_unaligned,
    expected,
    fill,
    room,
    store,
    stored_wrong,
    wrong,
)
from ugds.bench import cuda

STORED, WRITTEN = 5, 77  # kinds of rows
LARGEST = (16 if FAKE else 256) * MIB
#: Of the memory, from a page of 64 KiB: every class of alignment that a command's addresses know.
PLACES = (0, 4, 508, 512, 2052, BLOCK - 4, BLOCK, BLOCK + 4, 60 * KIB, 64 * KIB - 4)
SMALL = (BLOCK, 3 * BLOCK)
LARGE = (128 * KIB + BLOCK, MIB + BLOCK, 4 * MIB if FAKE else 16 * MIB + BLOCK)
DIRECTIONS = ("read", "write")


def right(ssd: Any, place: Room, way: Callable[..., int], stream: cuda.Stream, move: Move) -> None:
    """Moves, and looks at every byte of both sides."""
    gpu, start, end = place.gpu, move.offset, move.offset + move.size
    place.watch()
    if move.direction == "write":
        fill(gpu, place.memory.address + move.at, 0, move.size, WRITTEN)
        gpu.synchronize()
    assert way(ssd, place.buffer, move, stream) == move.size, move
    assert place.overwritten(move.at, move.size) == 0, move
    if move.direction == "read":
        assert wrong(gpu, place.memory.address + move.at, start, end, STORED) == 0, move
        return
    assert wrong(gpu, place.memory.address + move.at, 0, move.size, WRITTEN) == 0, move
    assert stored_wrong(ssd, start, end, 0, WRITTEN) == 0, move
    low, high = max(0, start - BLOCK), min(ssd.capacity, end + BLOCK)
    assert stored_wrong(ssd, low, start, low, STORED) == 0, move
    assert stored_wrong(ssd, end, high, end, STORED) == 0, move
    first, last = start // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK
    store(ssd, first, last, STORED)


def moves(direction: str) -> list[Move]:
    made = [Move(direction, 7 * BLOCK, size, GUARD + at) for size in SMALL for at in PLACES]
    return made + [Move(direction, 5 * BLOCK, size, GUARD + at) for size in LARGE for at in (0, 4, 64 * KIB - 4)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_moves_the_right_bytes_and_no_others(
    gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str, way: str, direction: str
) -> None:
    if (way, route) == ("batch", "staged"):
        pytest.skip("batches go the direct route")
    store(ssd, 0, max(LARGE) + 8 * BLOCK, STORED)
    with room(gpu, max(LARGE) + 64 * KIB, route) as place:
        for move in moves(direction):
            right(ssd, place, WAYS[way], stream, move)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_any_bytes_can_be_moved_synchronously(
    gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str, direction: str
) -> None:
    store(ssd, 0, 2 * MIB, STORED)
    chosen = random.Random(1)
    sizes = (1, 2, 3, 5, 511, 513, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3, 128 * KIB - 1, MIB + 1)
    offsets = (0, 1, 511, 512, BLOCK - 1, BLOCK, 3 * BLOCK + 7)
    with room(gpu, 2 * MIB, route) as place:
        for size in sizes:
            for offset in offsets:
                at = GUARD + chosen.choice([0, 1, 3, 4, 511, 512, BLOCK - 1, BLOCK, 64 * KIB - 1])
                right(ssd, place, by_unaligned, stream, Move(direction, offset, size, at))


@pytest.mark.parametrize("way", WAYS)
def test_chosen_at_random_ranges_are_right_as_well(
    gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str, way: str
) -> None:
    if (way, route) == ("batch", "staged"):
        pytest.skip("batches go the direct route")
    store(ssd, 0, MIB, STORED)
    chosen = random.Random(2)
    with room(gpu, MIB, route) as place:
        for _ in range(30):
            size = BLOCK * chosen.randrange(1, 100)
            offset = BLOCK * chosen.randrange(0, (MIB - size) // BLOCK)
            at = GUARD + 4 * chosen.randrange(0, (MIB - size) // 4)
            right(ssd, place, WAYS[way], stream, Move(chosen.choice(DIRECTIONS), offset, size, at))


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("way", ["sync", "stream"])
def test_the_largest_requests_are_right(
    gpu: cuda.Gpu, open_ssd: Callable[..., Any], stream: cuda.Stream, route: str, way: str, direction: str
) -> None:
    ssd = open_ssd("emulated:512MiB")
    if direction == "read":
        store(ssd, 0, LARGEST, STORED)
    with room(gpu, LARGEST, route) as place:
        address = place.memory.address + GUARD
        place.watch()
        if direction == "write":
            fill(gpu, address, 0, LARGEST, STORED)
            gpu.synchronize()
        assert WAYS[way](ssd, place.buffer, Move(direction, 0, LARGEST, GUARD), stream) == LARGEST
        assert place.overwritten(GUARD, LARGEST) == 0
        if direction == "read":
            assert wrong(gpu, address, 0, LARGEST, STORED) == 0
        else:
            assert stored_wrong(ssd, 0, LARGEST, 0, STORED) == 0


def test_blocks_of_512_bytes_are_moved_alone(
    gpu: cuda.Gpu, open_ssd: Callable[..., Any], stream: cuda.Stream, route: str
) -> None:
    ssd = open_ssd("emulated:16MiB?lba=512")
    store(ssd, 0, MIB, STORED)
    with room(gpu, MIB, route) as place:
        for way in ("sync", "stream"):
            for size in (512, 1024, 3584, 5 * 512):
                for offset in (0, 512, 4096 + 512):
                    place.watch()
                    move = Move("read", offset, size, GUARD + 4)
                    assert WAYS[way](ssd, place.buffer, move, stream) == size
                    assert place.overwritten(move.at, size) == 0
                    assert wrong(gpu, place.memory.address + move.at, offset, offset + size, STORED) == 0


def test_a_batch_of_staged_memory_is_refused(gpu: cuda.Gpu, ssd: Any) -> None:
    with room(gpu, MIB, "staged") as place:
        place.watch()

        def submit() -> None:
            with ssd.batch() as batch:
                batch.read(place.buffer, [0], [BLOCK], [GUARD])
                batch.wait()

        with pytest.raises(ugds.Error):
            submit()
        assert place.overwritten(0, 0) == 0


def test_what_lies_beyond_the_memory_is_refused_by_every_way(
    gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str
) -> None:
    with room(gpu, MIB, route) as place:
        place.watch()
        end = place.memory.nbytes
        for way in ("sync", "stream", "group"):
            with pytest.raises(ugds.Error):
                WAYS[way](ssd, place.buffer, Move("read", 0, 2 * BLOCK, end - BLOCK), stream)
        assert place.overwritten(0, 0) == 0


def test_two_registrations_of_one_allocation_are_apart(
    gpu: cuda.Gpu, ssd: Any, stream: cuda.Stream, route: str
) -> None:
    """As caching allocators hand memory out: tensors lie side by side, and nobody asks where pages begin."""

    class Part:
        def __init__(self, address: int, nbytes: int) -> None:
            self.__cuda_array_interface__ = {
                "shape": (nbytes,),
                "typestr": "|u1",
                "data": (address, False),
                "strides": None,
                "version": 3,
            }

    store(ssd, 0, MIB, STORED)
    with gpu.memory(MIB) as memory:
        fill(gpu, memory.address, 0, MIB, WRITTEN)
        gpu.synchronize()
        parts = [(512, 3 * BLOCK), (512 + 3 * BLOCK, BLOCK), (200 * KIB + 4, 5 * BLOCK)]
        registered = [ugds.register(Part(memory.address + at, size), require=route) for at, size in parts]
        for (at, size), buffer in zip(parts, registered, strict=True):
            assert (buffer.address, buffer.nbytes) == (memory.address + at, size)
            operation = ssd.read_async(buffer, BLOCK, stream=stream.handle)  # to its end
            stream.synchronize()
            assert operation.result() == size
        for buffer in registered:
            buffer.close()
        ends = [0, *(edge for at, size in parts for edge in (at, at + size)), MIB]
        for before, after in zip(ends[::2], ends[1::2], strict=True):
            assert wrong(gpu, memory.address + before, before, after, WRITTEN) == 0
        for at, size in parts:
            assert wrong(gpu, memory.address + at, BLOCK, BLOCK + size, STORED) == 0


def test_threads_read_into_the_same_unregistered_memory_at_once(gpu: cuda.Gpu, ssd: Any) -> None:
    store(ssd, 0, MIB, STORED)
    with gpu.memory(2 * MIB) as memory:
        with ThreadPoolExecutor(4) as threads:
            read = list(threads.map(lambda _: ssd.read(memory, 0, MIB), range(100)))
        assert read == [MIB] * 100
        assert wrong(gpu, memory.address, 0, MIB, STORED) == 0
        with ugds.register(memory):
            pass


def test_contents_are_what_numpy_says(gpu: cuda.Gpu) -> None:
    """The tests' own tool: a check that finds nothing would let everything pass."""
    with gpu.memory(3 * MIB) as memory:
        fill(gpu, memory.address, 1000, 1000 + 3 * MIB, 9)
        gpu.synchronize()
        assert (gpu.read(memory.address, 3 * MIB) == expected(1000, 1000 + 3 * MIB, 9)).all()
        assert wrong(gpu, memory.address, 1000, 1000 + 3 * MIB, 9) == 0
        assert wrong(gpu, memory.address, 1000, 1000 + 3 * MIB, 10) > 2 * MIB
        gpu.write(memory.address + 2 * MIB, gpu.read(memory.address + 2 * MIB, 5) ^ 1)
        gpu.synchronize()
        assert wrong(gpu, memory.address, 1000, 1000 + 3 * MIB, 9) == 5
