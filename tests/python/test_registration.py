# SPDX-License-Identifier: Apache-2.0
"""Registered memory of every kind: who may have it, how long it is kept, and what closing it means."""

from __future__ import annotations

import array
import errno
import gc
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ugds
import ugds.testing
from ugds import _core

KIB, MIB = 1 << 10, 1 << 20
OpenSsd = Callable[..., ugds.Device]


def registrations() -> int:
    gc.collect()
    return int(_core.open_registrations())  # type: ignore[attr-defined]


class Tensor:
    """Memory by DLPack alone, as a framework's tensor has it."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = data

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.data.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


SIZE = 8192


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(SIZE, "u1"),
        lambda: np.zeros((32, 64), "f4"),
        lambda: np.asfortranarray(np.zeros((32, 64), "f4")),
        lambda: bytearray(SIZE),
        lambda: memoryview(bytearray(SIZE)),
        lambda: memoryview(bytearray(SIZE + 2000))[1000 : 1000 + SIZE],
        lambda: mmap.mmap(-1, SIZE),
        lambda: array.array("i", [0] * (SIZE // 4)),
        lambda: Tensor(np.zeros((2, SIZE // 8), "f4")),
    ],
    ids=["numpy", "2d", "fortran", "bytearray", "memoryview", "part", "mmap", "array", "dlpack"],
)
def test_memory_of_every_kind_is_read_and_written(ssd: ugds.Device, make: Callable[[], Any]) -> None:
    memory = make()
    content = np.random.default_rng(4).integers(0, 256, SIZE, "u1").tobytes()
    emulator = ugds.testing.emulator(ssd)
    emulator.poke(0, content)
    with ugds.register(memory, require="direct") as buffer:
        assert (len(buffer), buffer.nbytes, buffer.memory, buffer.route) == (SIZE, SIZE, "host", "direct")
        assert buffer.owner is memory
        assert not buffer.readonly
        assert not buffer.closed
        assert ssd.read(buffer) == SIZE
        assert bytes(buffer) == content
        # The object itself is as good as its registration.
        assert ssd.write(memory, MIB) == SIZE
        assert emulator.peek(MIB, SIZE) == content
    assert buffer.closed
    if isinstance(memory, Tensor):
        memory = memory.data
    view = memoryview(memory)
    assert view.tobytes("A") == content
    view.release()


class ReadOnlyTensor(Tensor):
    """NumPy says so in a versioned capsule, and refuses another kind."""

    def __init__(self) -> None:
        super().__init__(np.full(SIZE, 7, "u1"))
        self.data.flags.writeable = False


def test_a_read_only_tensor_is_written_to_a_device_only(ssd: ugds.Device) -> None:
    with ugds.register(ReadOnlyTensor()) as buffer:
        assert buffer.readonly
        assert ssd.write(buffer) == SIZE
        with pytest.raises(ugds.Error):
            ssd.read(buffer)


@pytest.mark.parametrize(
    ("capsule", "device", "error"),
    [
        (lambda: 1 / 0, (1, 0), ZeroDivisionError),
        (lambda: 42, (1, 0), TypeError),
        (lambda: None, (1, 0), TypeError),
        (lambda: np.zeros(4).__dlpack__(), ("cpu", 0), TypeError),
        (lambda: np.zeros(4).__dlpack__(), 1, TypeError),
    ],
)
def test_what_is_wrong_with_a_tensor_is_said(capsule: Callable[[], Any], device: Any, error: type[Exception]) -> None:
    class Bad:
        def __dlpack__(self, **arguments: Any) -> Any:
            return capsule()

        def __dlpack_device__(self) -> Any:
            return device

    with pytest.raises(error):
        ugds.register(Bad())


def test_a_registration_is_made_by_register_alone() -> None:
    for make in (lambda: ugds.Registration.__new__(ugds.Registration), lambda: ugds.Registration()):
        with pytest.raises(TypeError, match=r"ugds\.register"):
            make()


def test_a_cycle_through_a_registration_is_collected() -> None:
    class Array(np.ndarray[Any, Any]):
        registration: ugds.Registration

    before = registrations()
    memory = np.zeros(4096, "u1").view(Array)
    memory.registration = ugds.register(memory)
    alive = weakref.ref(memory)
    gc.collect()
    assert registrations() == before + 1
    del memory
    gc.collect()
    assert alive() is None
    assert registrations() == before


def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    with pytest.raises(ugds.Error, match="are available in") as caught:
        ugds.empty("100TiB")
    assert caught.value.errno == errno.ENOMEM


def test_views_share_the_registration_of_their_parent(ssd: ugds.Device) -> None:
    memory = np.arange(65536, dtype="u4")
    emulator = ugds.testing.emulator(ssd)
    before = registrations()
    with ugds.register(memory):
        assert registrations() == before + 1
        ssd.write(memory[1024:2048], 0)
        assert emulator.peek(0, 4096) == memory[1024:2048].tobytes()
        ssd.write(memory[1024:], 0, 4096, 4096)
        assert emulator.peek(0, 4096) == memory[2048:3072].tobytes()
        emulator.poke(0, bytes(1000))
        assert ssd.read(memory[3:253], 0) == 1000
        assert not memory[3:253].any()
        assert (memory[2], memory[253]) == (2, 253)
        with pytest.raises(ugds.Error) as caught:
            ssd.read(memory[:128], 0, 1024)
        assert caught.value.errno == errno.EINVAL
        assert registrations() == before + 1


def test_ragged_registrations_in_one_page_are_apart(ssd: ugds.Device) -> None:
    """gdrcopy 52/244/299: the page is shared, the bytes are not."""
    memory = np.full(8192, 0xEE, "u1")
    emulator = ugds.testing.emulator(ssd)
    emulator.poke(0, bytes(range(256)) * 32)
    mapped = emulator.counters()["mapped_ranges"]
    bounds = [(0, 4), (4, 517), (517, 1000), (1000, 1001), (1001, 5000), (5000, 8192)]
    buffers = [ugds.register(memory[a:b]) for a, b in bounds]
    for (a, b), buffer in zip(bounds, buffers, strict=True):
        memory[:] = 0xEE
        assert ssd.read(buffer, 1) == b - a
        expected = np.full(8192, 0xEE, "u1")
        expected[a:b] = np.frombuffer(emulator.peek(1, b - a), "u1")
        assert np.array_equal(memory, expected)
    for buffer in buffers[::2]:
        buffer.close()
    for (a, b), buffer in list(zip(bounds, buffers, strict=True))[1::2]:
        assert ssd.read(buffer) == b - a
        assert memory[a:b].tobytes() == emulator.peek(0, b - a)
        buffer.close()
    assert emulator.counters()["mapped_ranges"] == mapped


def test_buffers_are_mapped_to_devices_opened_before_and_after(open_ssd: OpenSsd) -> None:
    first = open_ssd()
    memory = np.full(4096, 5, "u1")
    with ugds.register(memory) as everywhere, ugds.empty("4KiB") as mine:
        with ugds.register(np.zeros(4096, "u1"), devices=[first]) as narrow:
            second = open_ssd()
            for ssd in (first, second):
                assert ssd.write(everywhere) == ssd.read(everywhere) == ssd.read(mine) == 4096
            assert first.read(narrow) == 4096
            with pytest.raises(ugds.Error) as caught:
                second.read(narrow)
            assert caught.value.errno == errno.ENXIO
        assert first.read(everywhere) == 4096


def test_generations_increase_for_ever() -> None:
    memory = bytearray(64)
    seen = []
    for _ in range(50):
        with ugds.register(memory) as buffer:
            seen.append(buffer.generation)
    with ugds.empty(1) as buffer:
        seen.append(buffer.generation)
    assert seen == sorted(set(seen))


def test_a_stale_registration_never_means_a_new_one(ssd: ugds.Device) -> None:
    memory = np.full(4096, 1, "u1")
    old = ugds.register(memory)
    old.close()
    with ugds.register(memory):
        with pytest.raises(ugds.Error) as caught:
            ssd.read(old)
        assert caught.value.errno == errno.ESTALE
        old.close()  # the second time it does nothing, to the new one neither
        assert ssd.read(memory) == 4096


def test_closing_is_refused_while_a_command_is_in_flight(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?latency=400ms")
    memory = np.full(4096, 0xC3, "u1")
    buffer = ugds.register(memory)
    thread = threading.Thread(target=ssd.read, args=(buffer,))
    thread.start()
    while ssd.stats().in_flight == 0:
        pass
    with pytest.raises(ugds.Error) as caught:
        buffer.close()
    assert caught.value.errno == errno.EBUSY
    assert "in flight on the buffer: 1 command on queue " in str(caught.value)
    assert not buffer.closed
    thread.join()
    assert not memory.any()
    buffer.close()
    buffer.close()
    assert buffer.closed


def test_closing_and_reading_race_to_one_of_two_outcomes(ssd: ugds.Device) -> None:
    """Each read is done, or refused as stale; each close is done, or refused as busy."""
    for _ in range(60):
        memory = np.full(64 * KIB, 0xC3, "u1")
        buffer = ugds.register(memory)
        codes: list[int] = []

        def read(buffer: ugds.Registration = buffer, codes: list[int] = codes) -> None:
            try:
                while True:
                    ssd.read(buffer)
            except ugds.Error as error:
                codes.append(error.errno or 0)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        while True:
            try:
                buffer.close()
                break
            except ugds.Error as error:
                assert error.errno == errno.EBUSY
        memory[:] = 0x77
        for thread in threads:
            thread.join()
        assert codes == [errno.ESTALE] * 2
        assert (memory == 0x77).all()


def test_a_registration_keeps_its_memory_and_lets_go_of_it_when_closed() -> None:
    class Array(np.ndarray[Any, Any]):
        pass

    memory = np.zeros(4096, "u1").view(Array)
    alive = weakref.ref(memory)
    buffer = ugds.register(memory)
    del memory
    gc.collect()
    assert alive() is not None
    buffer.close()
    gc.collect()
    assert alive() is None
    assert buffer.owner is None


def test_a_registration_that_is_dropped_is_closed(ssd: ugds.Device) -> None:
    before, mapped = registrations(), ugds.testing.emulator(ssd).counters()["mapped_bytes"]
    for _ in range(10):
        ugds.register(bytearray(5000))
        ugds.empty("1MiB")
    assert registrations() == before
    assert ugds.testing.emulator(ssd).counters()["mapped_bytes"] == mapped


def test_a_buffer_cannot_be_resized_while_it_is_registered() -> None:
    memory = bytearray(4096)
    with ugds.register(memory), pytest.raises(BufferError):
        memory.extend(b"x")
    memory.extend(b"x")


@pytest.mark.parametrize("size", [1, 4095, 4096, "64KiB", "2MiB", 3 * MIB + 5])
def test_new_memory_is_zeroed_aligned_and_a_buffer(ssd: ugds.Device, size: int | str) -> None:
    with ugds.empty(size) as buffer:
        assert len(buffer) == ugds.sizes.parse(size)
        assert buffer.address % 4096 == 0
        assert buffer.owner is None
        view = np.frombuffer(buffer, "u1")
        assert not view.any()
        view[:] = 7
        assert ssd.write(buffer, unaligned=True) == len(buffer)
        assert ugds.testing.emulator(ssd).peek(0, len(buffer)) == b"\7" * len(buffer)
        del view


def test_a_view_of_new_memory_outlives_its_registration() -> None:
    buffer = ugds.empty("1MiB")
    view = np.frombuffer(buffer, "u1")
    view[:] = 9
    buffer.close()
    assert (view == 9).all()
    with pytest.raises(BufferError, match="closed"):
        memoryview(buffer)
    del buffer
    gc.collect()
    assert (view == 9).all()


def test_memory_cannot_move_while_a_view_of_its_registration_is_left() -> None:
    memory = bytearray(b"\5" * 4096)
    buffer = ugds.register(memory)
    view = memoryview(buffer)
    buffer.close()
    with pytest.raises(BufferError):
        memory.extend(bytes(1 << 20))
    assert view == memory
    view.release()
    memory.extend(bytes(1 << 20))
