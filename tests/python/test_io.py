# SPDX-License-Identifier: Apache-2.0
"""Reads, writes, flushes and discards against a plain bytearray, over devices of every shape."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ugds
import ugds.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
GUARD = 4096
OpenSsd = Callable[..., ugds.Device]


def noise(size: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, size, "u1")


@dataclass
class Shape:
    """A device, and how it is opened."""

    uri: str
    options: dict[str, Any]
    capacity: int
    lba: int


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    lba = 512 << draw(st.integers(0, 7))
    mpsmin = draw(st.sampled_from([0, 0, 0, 1, 2, 4]))
    mpsmax = draw(st.integers(mpsmin, 4))
    # 0 is no limit; of the others those that let one block pass.
    mdts = draw(st.sampled_from([0] + [m for m in range(1, 9) if 4096 << mpsmin << m >= lba]))
    capacity = lba * draw(st.integers(20, 90)) + (MIB if draw(st.booleans()) else 0)
    depth = draw(st.sampled_from([2, 3, 4, 5, 7, 16, 17, 100, 1024]))
    query: dict[str, Any] = {
        "lba": lba,
        "mdts": mdts,
        "mpsmin": mpsmin,
        "mpsmax": mpsmax,
        "queues": draw(st.integers(1, 5)),
        "depth": draw(st.sampled_from([depth, 1024])),
        "stride": draw(st.sampled_from([0, 0, 1, 3, 10])),
        "shadow": draw(st.integers(0, 1)),
        "doorbells": draw(st.sampled_from(["mapped", "trapped"])),
        "order": draw(st.sampled_from(["fifo", "reverse", "random"])),
        "seed": draw(st.integers(0, 1000)),
        "vwc": draw(st.integers(0, 1)),
        "enabled": draw(st.integers(0, 1)),
        "contiguous": draw(st.integers(0, 1)),
    }
    if draw(st.booleans()):
        query |= {"pump": "caller"} | ({"clock": "virtual", "latency": "3us"} if draw(st.booleans()) else {})
    elif draw(st.booleans()):
        query["latency"] = "5us"
    uri = f"emulated:{capacity}?" + "&".join(f"{name}={value}" for name, value in query.items())
    return Shape(uri, {"queues": draw(st.integers(0, 3)), "depth": depth}, capacity, lba)


@st.composite
def ranges(draw: st.DrawFn, total: int, unit: int, aligned: bool, most: int) -> tuple[int, int]:
    """An offset and a size inside of `total` bytes, often just beside a multiple of `unit`."""
    beside = st.just(0) if aligned else st.sampled_from([0, 0, 1, 3, 4, unit // 2, unit - 1])
    offset = min(draw(st.integers(0, total // unit - 1)) * unit + draw(beside), total - 1)
    size = draw(st.integers(0, max(1, most // unit))) * unit + draw(beside)
    return offset, min(size, total - offset)


@dataclass
class Buffer:
    """Memory between guards, registered, and what every byte of it must be."""

    memory: np.ndarray[Any, Any]
    expected: np.ndarray[Any, Any]
    begin: int
    registration: ugds.Registration

    @classmethod
    def of(cls, size: int, phase: int, seed: int) -> Buffer:
        memory = noise(size + 2 * GUARD + phase, seed)
        begin = GUARD + phase
        return cls(memory, memory.copy(), begin, ugds.register(memory[begin : begin + size]))

    def check(self) -> None:
        if not np.array_equal(self.memory, self.expected):
            at = np.flatnonzero(self.memory != self.expected)
            raise AssertionError(
                f"{at.size} bytes of a buffer differ, from {at[0] - self.begin} to {at[-1] - self.begin} "
                f"of {len(self.registration)}"
            )


def play(data: st.DataObject, shape: Shape, steps: int) -> None:
    """Random operations on one device and three buffers; every byte of all is compared after each."""
    model = bytearray(shape.capacity)
    device = ugds.open(shape.uri, **shape.options)
    buffers = [
        Buffer.of(data.draw(st.integers(shape.lba, 600 * KIB)), data.draw(st.sampled_from([0, 1, 2, 4, 64, 508])), seed)
        for seed in range(3)
    ]
    with device, ugds.testing.strict(device) as emulator:
        for _ in range(data.draw(st.integers(1, steps))):
            kind = data.draw(st.sampled_from(["read", "read", "write", "write", "flush", "discard"]))
            buffer = data.draw(st.sampled_from(buffers))
            reg, total = buffer.registration, len(buffer.registration)
            aligned = data.draw(st.booleans())
            if kind == "flush":
                assert device.flush() is None
                continue
            offset, size = data.draw(ranges(shape.capacity, shape.lba, aligned or kind == "discard", total))
            if kind == "discard":
                old = bytes(model[offset : offset + size])
                assert device.discard(offset, size) is None
                new = emulator.peek(offset, size)
                for at in range(0, size, shape.lba):
                    block = new[at : at + shape.lba]
                    assert block in (old[at : at + shape.lba], bytes(shape.lba)), f"block at {offset + at}"
                model[offset : offset + size] = new
                continue
            where = data.draw(st.sampled_from([0, 4, 1, 512, max(0, total - size)]))
            size = min(size, total - where)
            at = buffer.begin + where
            if kind == "read":
                assert device.read(reg, offset, size, where) == size
                buffer.expected[at : at + size] = np.frombuffer(model, "u1", size, offset)
                buffer.check()
            else:
                durable = data.draw(st.booleans())
                moved = device.write(reg, offset, size, where, durable=durable, unaligned=True)
                assert moved == size
                model[offset : offset + size] = buffer.memory[at : at + size].tobytes()
                buffer.check()
        assert emulator.peek(0, shape.capacity) == model
        for buffer in buffers:
            buffer.registration.close()
    assert device.closed


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(shape=shapes(), data=st.data())
def test_a_device_of_any_shape_behaves_as_a_bytearray(shape: Shape, data: st.DataObject) -> None:
    play(data, shape, 12)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(shape=shapes(), data=st.data())
def test_a_device_of_any_shape_behaves_as_a_bytearray_at_length(shape: Shape, data: st.DataObject) -> None:
    play(data, shape, 30)


def test_every_alignment_of_offset_size_and_memory_reads_the_right_bytes(open_ssd: OpenSsd) -> None:
    """cuCIM 1107: the tail of an unaligned read."""
    ssd = open_ssd("emulated:64KiB?lba=512&mdts=1&pump=caller")
    content = noise(64 * KIB, 5)
    ugds.testing.emulator(ssd).poke(0, content.tobytes())
    memory = np.zeros(16 * KIB, "u1")
    with ugds.register(memory) as buffer:
        for offset in (0, 1, 3, 4, 511, 512, 513, 4095, 4097):
            for size in (1, 2, 3, 4, 511, 512, 513, 1024, 4096, 5000, 8192, 8193):
                for where in (0, 1, 2, 3, 4, 511, 4095):
                    memory.fill(0xEE)
                    assert ssd.read(buffer, offset, size, where) == size
                    expected = np.full_like(memory, 0xEE)
                    expected[where : where + size] = content[offset : offset + size]
                    assert np.array_equal(memory, expected), (offset, size, where)


def test_every_alignment_of_an_unaligned_write_leaves_its_neighbours(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:64KiB?lba=512&mdts=1&pump=caller")
    emulator = ugds.testing.emulator(ssd)
    old, source = noise(64 * KIB, 6), noise(16 * KIB, 7)
    with ugds.register(source) as buffer:
        for offset in (0, 1, 511, 512, 4097):
            for size in (1, 3, 4, 511, 512, 513, 5000, 8193):
                for where in (0, 1, 2, 4, 511):
                    emulator.poke(0, old.tobytes())
                    assert ssd.write(buffer, offset, size, where, unaligned=True) == size
                    expected = old.copy()
                    expected[offset : offset + size] = source[where : where + size]
                    assert emulator.peek(0, 64 * KIB) == expected.tobytes(), (offset, size, where)


@pytest.mark.parametrize("mdts", [0, 1, 5, 9])
@pytest.mark.parametrize("page_offset", [0, 4, 512, 4092])
def test_requests_are_split_exactly_whatever_the_page_offset(open_ssd: OpenSsd, mdts: int, page_offset: int) -> None:
    """SPDK 2692, rocm-xio 133: lists of 512 and 513 entries, and the offset in the first page."""
    # Mode throughput cuts large requests by nothing but the device, whatever came before.
    ssd = open_ssd(f"emulated:16MiB?mdts={mdts}&pump=caller&lba=512", mode="throughput", interrupts=False)
    emulator = ugds.testing.emulator(ssd)
    memory = ugds.empty(5 * MIB)
    view = np.frombuffer(memory, "u1")
    content = noise(5 * MIB, mdts)
    for pages in (1, 2, 3, 511, 512, 513, 514, 1023, 1024, 1025):
        for size in {pages * 4096, pages * 4096 - 512}:
            view[:] = 0x5A
            view[page_offset : page_offset + size] = content[:size]
            before = emulator.counters()["commands"]
            assert ssd.write(memory, 512, size, page_offset) == size
            assert emulator.counters()["commands"] - before == -(-size // ssd.max_transfer)
            assert emulator.peek(512, size) == content[:size].tobytes()
            view[:] = 0x5A
            assert ssd.read(memory, 512, size, page_offset) == size
            expected = np.full(5 * MIB, 0x5A, "u1")
            expected[page_offset : page_offset + size] = content[:size]
            assert np.array_equal(view, expected)
    del view
    memory.close()


@pytest.mark.parametrize("depth", [2, 64])
def test_a_request_larger_than_the_queue_is_windowed(open_ssd: OpenSsd, depth: int) -> None:
    """SPDK 2403: 64 MiB and more by one call."""
    size = 20 * MIB + 512
    ssd = open_ssd("emulated:32MiB?lba=512&mdts=2", depth=depth, queues=1)
    source, target = noise(size, 1), np.zeros(size, "u1")
    with ugds.register(source) as a, ugds.register(target) as b:
        assert ssd.write(a, 512) == size
        assert ssd.read(b, 512) == size
    assert np.array_equal(source, target)
    assert ssd.stats().read_bytes == ssd.stats().write_bytes == size
    assert ssd.stats().requests == 2


@pytest.mark.parametrize(
    ("capacity", "lba", "places"),
    [
        (64 * GIB, 4096, [4 * GIB - 8192, 4 * GIB, 8 * GIB - 4096, 64 * GIB - 32768]),
        (1024 * TIB, 512, [(512 << 32) - 8192, 512 << 32, (512 << 33) - 512, 1024 * TIB - 32768]),
        (1024 * TIB, 65536, [(65536 << 32) - 65536, 65536 << 32, 4 * GIB - 65536]),
    ],
)
def test_offsets_beyond_32_bits_of_bytes_and_of_blocks_stay_apart(
    open_ssd: OpenSsd, capacity: int, lba: int, places: list[int]
) -> None:
    """gds-nvidia-fs 2.28.4: corruption at and above 4 GiB."""
    ssd = open_ssd(f"emulated:{capacity}?lba={lba}&mdts=5", queues=1)
    emulator = ugds.testing.emulator(ssd)
    assert ssd.capacity == capacity
    size = max(32768, 2 * lba)
    content: dict[int, bytes] = {}
    memory = np.zeros(size, "u1")
    with ugds.register(memory) as buffer:
        for seed, place in enumerate(places):
            memory[:] = noise(size, seed)
            assert ssd.write(buffer, place) == size
            content[place] = memory.tobytes()
            for earlier in content:
                if earlier != place and earlier < place + size and place < earlier + size:
                    content[earlier] = emulator.peek(earlier, size)
        for place, expected in content.items():
            assert emulator.peek(place, size) == expected
            memory.fill(0)
            assert ssd.read(buffer, place) == size
            assert memory.tobytes() == expected
            # Where an offset or a block number cut to 32 bits would have gone.
            for wrong in {place % (1 << 32), place % (lba << 32)} - {place}:
                if not any(wrong < p + size and p < wrong + size for p in content):
                    assert emulator.peek(wrong, size) == bytes(size)
        odd = places[1] + 1
        assert ssd.read(buffer, odd, 4095) == 4095
        assert memory[:4095].tobytes() == emulator.peek(odd, 4095)
    assert emulator.stored_bytes() < 64 * MIB


def test_a_discard_of_more_blocks_than_one_range_holds_reaches_them_all(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:4TiB?lba=512")
    emulator = ugds.testing.emulator(ssd)
    for place in (0, (1 << 32) * 512 - 4096, (1 << 32) * 512, 4 * TIB - 4096):
        emulator.poke(place, b"\xaa" * 4096)
    ssd.discard(0, 4 * TIB)
    for place in (0, (1 << 32) * 512 - 4096, (1 << 32) * 512, 4 * TIB - 4096):
        assert emulator.peek(place, 4096) == bytes(4096)


def test_what_was_never_written_reads_as_zeroes_over_stale_memory(ssd: ugds.Device) -> None:
    memory = np.full(64 * KIB, 0xAB, "u1")
    with ugds.register(memory) as buffer:
        assert ssd.read(buffer, "1MiB") == 64 * KIB
    assert not memory.any()


def test_sizes_of_zero_move_nothing(ssd: ugds.Device) -> None:
    memory = np.full(4096, 7, "u1")
    with ugds.register(memory) as buffer:
        before = ugds.testing.emulator(ssd).counters()["commands"]
        assert ssd.read(buffer, 0, 0) == 0
        assert ssd.write(buffer, 0, 0) == 0
        assert ssd.read(buffer, 0, buffer_offset=4096) == 0
        assert ssd.read(buffer, ssd.capacity, 0) == 0
        ssd.discard(0, 0)
        assert ugds.testing.emulator(ssd).counters()["commands"] == before
    assert (memory == 7).all()


def test_sizes_are_taken_as_text_and_as_numpy_integers(ssd: ugds.Device) -> None:
    source = noise(MIB, 9)
    with ugds.register(source) as buffer:
        assert ssd.write(buffer, "2MiB", "64KiB", "4KiB") == 64 * KIB
        assert ssd.write(buffer, np.int64(4 * MIB), np.uint32(4096), np.int8(64)) == 4096
    emulator = ugds.testing.emulator(ssd)
    assert emulator.peek(2 * MIB, 64 * KIB) == source[4096 : 4096 + 64 * KIB].tobytes()
    assert emulator.peek(4 * MIB, 4096) == source[64 : 64 + 4096].tobytes()


def test_namespaces_are_apart_and_shared_between_openings() -> None:
    name = "namespaces-are-apart"
    uri = f"emulated:1MiB?namespaces=3&name={name}"
    try:
        with ugds.open(uri, namespace=1) as one, ugds.open(uri, namespace=3) as three, ugds.open(uri) as first:
            assert (one.info.namespace, three.info.namespace, first.info.namespace) == (1, 3, 1)
            devices = (one, three, first)
            memory = np.zeros(4096, "u1")
            with ugds.register(memory) as buffer:
                memory.fill(1)
                one.write(buffer, 4096)
                memory.fill(3)
                three.write(buffer, 4096)
                first.read(buffer, 4096)
                assert (memory == 1).all()
                three.read(buffer, 4096)
                assert (memory == 3).all()
            emulator = ugds.testing.emulator(one)
            assert emulator.peek(4096, 4096, namespace=1) == b"\1" * 4096
            assert emulator.peek(4096, 4096, namespace=2) == bytes(4096)
            assert emulator.peek(4096, 4096, namespace=3) == b"\3" * 4096
            for device in devices:
                assert ugds.testing.emulator(device).violations() == []
        with ugds.open(uri, namespace=3) as again, ugds.register(memory) as buffer:
            again.read(buffer, 4096)
            assert (memory == 3).all()
    finally:
        assert ugds.testing.forget_subsystem(name)


def test_an_image_file_keeps_its_bytes_over_openings(tmp_path: Any) -> None:
    uri = f"emulated:{tmp_path}/image?size=1MiB&lba=512"
    source = noise(MIB, 3)
    with ugds.open(uri) as ssd, ugds.register(source) as buffer:
        ssd.write(buffer, durable=True)
    assert (tmp_path / "image").read_bytes() == source.tobytes()
    target = np.zeros_like(source)
    with ugds.open(uri) as ssd, ugds.register(target) as buffer:
        ssd.read(buffer)
    assert np.array_equal(source, target)


@pytest.mark.parametrize("pump", ["thread", "caller"])
@pytest.mark.parametrize("depth", [2, 8])
def test_threads_share_one_queue_pair(open_ssd: OpenSsd, pump: str, depth: int) -> None:
    """uGDS 46: out-of-order completions on one queue; every thread has its own region and compares it."""
    ssd = open_ssd(f"emulated:8MiB?lba=512&mdts=1&order=random&queues=1&pump={pump}", depth=depth)
    assert ssd.info.queues == 1
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        try:
            rng, region = random.Random(number), MIB
            model = bytearray(region)
            memory = np.zeros(128 * KIB, "u1")
            with ugds.register(memory) as buffer:
                for step in range(40):
                    at, size = rng.randrange(region - 64 * KIB), rng.randrange(1, 24 * KIB)
                    if step % 3:
                        at, size = at & ~511, (size | 511) + 1
                    if rng.random() < 0.5:
                        memory[:size] = np.frombuffer(rng.randbytes(size), "u1")
                        # Edges of a region are whole blocks, so that no two threads rewrite the same block.
                        assert ssd.write(buffer, number * region + at, size, unaligned=True) == size
                        model[at : at + size] = memory[:size].tobytes()
                    else:
                        assert ssd.read(buffer, number * region + at, size) == size
                        assert memory[:size].tobytes() == model[at : at + size]
            assert ugds.testing.emulator(ssd).peek(number * region, region) == model
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
    assert ssd.stats().in_flight == 0
    assert ssd.stats().errors == 0


def test_statistics_count_what_moved(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:16MiB?mdts=5&pump=caller", queues=1)
    before = ssd.stats()
    with ugds.empty("1MiB") as buffer:
        ssd.write(buffer)
        ssd.read(buffer, size="4KiB")
        ssd.flush()
    made = ssd.stats() - before
    assert (made.requests, made.commands, made.errors, made.in_flight) == (3, 10, 0, 0)
    assert (made.read_bytes, made.write_bytes, made.route) == (4096, MIB, "direct")
    assert sum(made.histogram) == 10
