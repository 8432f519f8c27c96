# SPDX-License-Identifier: Apache-2.0
"""Every bad input has its own clear error and changes nothing; every NVMe status is told exactly."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import ugds
import ugds.testing
from ugds import _core

KIB, MIB = 1 << 10, 1 << 20
URI = "emulated:1MiB?lba=512&mdts=1&vwc=1"
OpenSsd = Callable[..., ugds.Device]


def registrations() -> int:
    return int(_core.open_registrations())  # type: ignore[attr-defined]


class Scene:
    """A device, a registered buffer with a pattern, and a way to see that nothing of either changed."""

    def __init__(self, device: ugds.Device) -> None:
        self.device = device
        self.emulator = ugds.testing.emulator(device)
        self.emulator.poke(0, bytes(range(256)) * 4096)
        self.memory = np.full(64 * KIB, 0xC3, "u1")
        self.buffer = ugds.register(self.memory)

    def state(self) -> tuple[object, ...]:
        counters = self.emulator.counters()
        return (
            self.emulator.peek(0, MIB),
            self.memory.tobytes(),
            registrations(),
            counters["mapped_ranges"],
            counters["mapped_bytes"],
            counters["commands"],
        )

    @contextmanager
    def refuses(self, code: int, *words: str, operation: str | None = None, device: bool = True) -> Iterator[None]:
        """The block raises ugds.Error with this errno and these words, names its operation, and changes nothing."""
        before = self.state()
        with pytest.raises(ugds.Error) as caught:
            yield
        error = caught.value
        assert error.errno == code, f"{errno.errorcode.get(error.errno or 0)}: {error}"
        if operation is not None:
            assert error.operation == operation
            assert operation in str(error)
        if device:
            assert error.device == self.device.uri
            assert self.device.uri in str(error)
        for word in words:
            assert word in str(error), str(error)
        assert error.completed == 0
        assert error.status is None
        assert error.status_text == ""
        assert error.cause and error.cause in str(error)
        assert self.state() == before


@pytest.fixture
def scene(open_ssd: OpenSsd) -> Iterator[Scene]:
    scene = Scene(open_ssd(URI))
    yield scene
    scene.buffer.close()


# --- Ranges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (MIB, 512),
        (MIB - 512, 1024),
        (MIB + 1, 1),
        (2**63, 512),
        (2**64 - 512, 512),
        (2**64 - 1, 1),
        (2**64 - 512, 1024),
    ],
)
def test_a_range_beyond_the_device_is_refused(scene: Scene, operation: str, offset: int, size: int) -> None:
    with scene.refuses(errno.ERANGE, "beyond the device", operation=operation):
        getattr(scene.device, operation)(scene.buffer, offset, size)


def test_a_range_error_names_the_range(scene: Scene) -> None:
    with pytest.raises(ugds.Error) as caught:
        scene.device.read(scene.buffer, MIB - 512, 1024)
    assert (caught.value.offset, caught.value.length) == (MIB - 512, 1024)
    assert "[1048064, +1024)" in str(caught.value)


@pytest.mark.parametrize(("offset", "size"), [(MIB, 512), (0, MIB + 512), (2**64 - 512, 1024)])
def test_a_discard_beyond_the_device_is_refused(scene: Scene, offset: int, size: int) -> None:
    with scene.refuses(errno.ERANGE, "beyond the device", operation="discard"):
        scene.device.discard(offset, size)


@pytest.mark.parametrize(("offset", "size"), [(1, 512), (0, 513), (256, 256)])
def test_a_discard_of_parts_of_blocks_is_refused(scene: Scene, offset: int, size: int) -> None:
    with scene.refuses(errno.EINVAL, "multiples of the block size, 512 bytes", operation="discard"):
        scene.device.discard(offset, size)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize(
    ("size", "buffer_offset"),
    [
        (64 * KIB + 512, 0),
        (512, 64 * KIB),
        (1024, 64 * KIB - 512),
        (512, 2**64 - 512),
        (2**64 - 512, 1024),
        (1, 64 * KIB),
    ],
)
def test_a_range_beyond_the_buffer_is_refused(scene: Scene, operation: str, size: int, buffer_offset: int) -> None:
    arguments = {"unaligned": True} if operation == "write" else {}
    with scene.refuses(errno.EINVAL if size < MIB else errno.ERANGE, "beyond", operation=operation):
        getattr(scene.device, operation)(scene.buffer, 0, size, buffer_offset, **arguments)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("buffer_offset", [64 * KIB + 512, 64 * KIB + 4, 2**64 - 4])
def test_a_buffer_offset_beyond_the_buffer_is_refused_as_such(scene: Scene, operation: str, buffer_offset: int) -> None:
    """Also without a size, where "the rest of the buffer" would be negative."""
    with scene.refuses(errno.EINVAL, "buffer", operation=operation):
        getattr(scene.device, operation)(scene.buffer, 0, buffer_offset=buffer_offset)


# --- Types --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("name", ["offset", "size", "buffer_offset"])
@pytest.mark.parametrize("value", [1.0, True, False, b"512", [], np.float64(512), object()], ids=repr)
def test_what_is_no_size_is_a_type_error(scene: Scene, operation: str, name: str, value: Any) -> None:
    before = scene.state()
    with pytest.raises(TypeError, match=rf"{name} must be an int or text"):
        getattr(scene.device, operation)(scene.buffer, **{name: value})
    assert scene.state() == before


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("name", ["offset", "buffer_offset"])
def test_none_is_no_offset(scene: Scene, operation: str, name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be an int or text"):
        getattr(scene.device, operation)(scene.buffer, **{name: None})


@pytest.mark.parametrize("value", [None, 1.5, True])
def test_a_discard_takes_sizes_alone(scene: Scene, value: Any) -> None:
    before = scene.state()
    with pytest.raises(TypeError, match="offset"):
        scene.device.discard(value, 512)
    with pytest.raises(TypeError, match="size"):
        scene.device.discard(0, value)
    assert scene.state() == before


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("name", ["offset", "size", "buffer_offset"])
@pytest.mark.parametrize("value", [-1, -512, 2**64, 10**30, "-1", "12 potatoes", ""])
def test_what_is_no_number_of_bytes_is_refused(scene: Scene, operation: str, name: str, value: Any) -> None:
    with scene.refuses(errno.EINVAL, name, operation=operation, device=False):
        getattr(scene.device, operation)(scene.buffer, **{name: value})


@pytest.mark.parametrize("value", [None, 1, 1.0, "text", object(), [1, 2]], ids=repr)
@pytest.mark.parametrize("operation", ["read", "write"])
def test_what_has_no_memory_is_a_type_error(scene: Scene, operation: str, value: Any) -> None:
    before = scene.state()
    with pytest.raises(TypeError, match="cannot take memory from"):
        getattr(scene.device, operation)(value)
    with pytest.raises(TypeError):
        ugds.register(value)
    assert scene.state() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda d, b: d.read(b, 0, 512, 0, 0),
        lambda d, b: d.read(),
        lambda d, b: d.read(b, durable=True),
        lambda d, b: d.read(b, unaligned=True),
        lambda d, b: d.read(b, 0, offset=0),
        lambda d, b: d.write(b, 0, 512, 0, True),
        lambda d, b: d.write(b, ofset=0),
        lambda d, b: d.write(b, **{"dur" + "abel": True}),
        lambda d, b: d.flush(1),
        lambda d, b: d.discard(0),
        lambda d, b: ugds.open("emulated:1MiB", 1),
        lambda d, b: ugds.open("emulated:1MiB", dept=4),
        lambda d, b: ugds.open(1),
        lambda d, b: ugds.open("emulated:1MiB", queues="2"),
        lambda d, b: ugds.open("emulated:1MiB", depth=-1),
        lambda d, b: ugds.open("emulated:1MiB", deadline=[]),
        lambda d, b: ugds.open("emulated:1MiB", retry="2"),
        lambda d, b: ugds.register(bytearray(512), device=d),
        lambda d, b: ugds.register(bytearray(512), devices=d),
        lambda d, b: ugds.register(bytearray(512), devices=[1]),
        lambda d, b: ugds.register(bytearray(512), require=1),
        lambda d, b: ugds.empty(),
        lambda d, b: ugds.empty(1.5),
        lambda d, b: ugds.empty(None),
        lambda d, b: ugds.empty(True),
        lambda d, b: ugds.Device(),
        lambda d, b: ugds.Registration(),
    ],
)
def test_a_wrong_call_is_a_type_error(scene: Scene, call: Callable[[ugds.Device, ugds.Registration], Any]) -> None:
    before = scene.state()
    with pytest.raises(TypeError):
        call(scene.device, scene.buffer)
    assert scene.state() == before


class NoTruth:
    def __bool__(self) -> bool:
        raise ArithmeticError("no truth value")


@pytest.mark.parametrize("name", ["durable", "unaligned"])
def test_a_flag_without_a_truth_value_raises_its_own_error(scene: Scene, name: str) -> None:
    """Not a write that is less durable than was asked for, nor a SystemError."""
    before = scene.state()
    with pytest.raises(ArithmeticError, match="no truth value"):
        scene.device.write(scene.buffer, 0, 512, **{name: NoTruth()})
    assert scene.state() == before


# --- Buffers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "size", "where"), [(1, 512, 0), (0, 513, 0), (0, 512, 1), (0, 512, 2), (511, 1, 0)])
def test_an_unaligned_write_needs_leave(scene: Scene, offset: int, size: int, where: int) -> None:
    with scene.refuses(errno.EINVAL, "unaligned=True", operation="write"):
        scene.device.write(scene.buffer, offset, size, where)
    with scene.refuses(errno.EINVAL, "unaligned=True", operation="write"):
        scene.device.write(scene.buffer, offset, size, where, unaligned=False)


def readonly_array() -> np.ndarray[Any, Any]:
    array = np.zeros(4096, "u1")
    array.setflags(write=False)
    return array


@pytest.mark.parametrize(
    "make", [lambda: b"\7" * 4096, readonly_array, lambda: memoryview(bytearray(4096)).toreadonly()]
)
@pytest.mark.parametrize("size", [512, 5])
def test_a_read_into_read_only_memory_is_refused(scene: Scene, make: Callable[[], Any], size: int) -> None:
    memory = make()
    with ugds.register(memory) as buffer:
        assert buffer.readonly
        with scene.refuses(errno.EACCES, "read-only", operation="read"):
            scene.device.read(buffer, 0, size)
        with scene.refuses(errno.EACCES, "read-only", operation="read"):
            scene.device.read(memory, 0, size)
        assert scene.device.write(buffer, 0, 512) == 512
        assert scene.emulator.peek(0, 512) == bytes(memory)[:512]


def test_a_read_only_view_of_a_writable_buffer_is_refused(scene: Scene) -> None:
    view = scene.memory[:512].view()
    view.setflags(write=False)
    with scene.refuses(errno.EACCES, "read-only", operation="read"):
        scene.device.read(view)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_closed_registration_is_refused(scene: Scene, operation: str) -> None:
    memory = np.zeros(4096, "u1")
    buffer = ugds.register(memory)
    buffer.close()
    with scene.refuses(errno.ESTALE, "the registration is closed", operation=operation, device=False):
        getattr(scene.device, operation)(buffer)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("size", [512, 3, None])
def test_memory_that_is_not_registered_is_refused(scene: Scene, operation: str, size: int | None) -> None:
    """xNVMe 663: a failed look-up must never become a transfer."""
    with scene.refuses(errno.EINVAL, "not registered", "ugds.register", operation=operation, device=False):
        getattr(scene.device, operation)(np.zeros(4096, "u1"), 0, size)


def test_memory_that_is_registered_in_part_is_refused(scene: Scene) -> None:
    memory = np.zeros(8192, "u1")
    with ugds.register(memory[1024:4096]):
        for part in (memory, memory[:2048], memory[2048:], memory[:1024], memory[4096:]):
            with scene.refuses(errno.EINVAL, "not registered", operation="read", device=False):
                scene.device.read(part)


def test_a_buffer_that_is_mapped_to_another_device_is_refused(scene: Scene, open_ssd: OpenSsd) -> None:
    """LMCache 2991: the registration carries its device."""
    other = open_ssd("emulated:1MiB")
    memory = np.zeros(4096, "u1")
    with ugds.register(memory, devices=[other]) as buffer:
        for call in (scene.device.read, scene.device.write):
            with scene.refuses(errno.ENXIO, "not mapped to this device"):
                call(buffer, 0, 512)
        assert other.read(buffer) == 4096


@pytest.mark.parametrize("size", [1, 7])
def test_an_unaligned_request_on_a_buffer_of_another_device_is_refused(
    scene: Scene, open_ssd: OpenSsd, size: int
) -> None:
    other = open_ssd("emulated:1MiB")
    memory = np.full(4096, 9, "u1")
    with ugds.register(memory, devices=[other]) as buffer:
        with scene.refuses(errno.ENXIO, "not mapped to this device"):
            scene.device.read(buffer, 1, size)
        with scene.refuses(errno.ENXIO, "not mapped to this device"):
            scene.device.write(buffer, 1, size, unaligned=True)
    assert (memory == 9).all()


def test_memory_with_holes_is_refused(scene: Scene) -> None:
    for memory in (np.zeros((64, 64), "u1")[:, :32], np.zeros(64, "u1")[::2], np.zeros(64, "u1")[::-1]):
        with scene.refuses(errno.EINVAL, "not contiguous", operation="register", device=False):
            ugds.register(memory)
        with scene.refuses(errno.EINVAL, "not contiguous", device=False):
            scene.device.read(memory)


@pytest.mark.parametrize("memory", [bytearray(), b"", np.zeros(0, "u1"), np.zeros((3, 0), "f8")], ids=repr)
def test_empty_memory_is_refused(scene: Scene, memory: Any) -> None:
    with scene.refuses(errno.EINVAL, "empty", operation="register", device=False):
        ugds.register(memory)


def test_an_empty_size_is_refused(scene: Scene) -> None:
    for size in (0, "0"):
        with scene.refuses(errno.EINVAL, "at least one", operation="empty", device=False):
            ugds.empty(size)


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, "8000PiB", 2**47 + 1, 2**47])
def test_more_memory_than_there_is_is_refused(scene: Scene, size: int | str) -> None:
    before = scene.state()
    with pytest.raises(ugds.Error) as caught:
        ugds.empty(size)
    assert caught.value.errno in (errno.ENOMEM, errno.EINVAL)
    assert scene.state() == before


@pytest.mark.parametrize(("begin", "end"), [(0, 64), (0, 4096), (63, 65), (1000, 2001), (2000, 3000), (0, 1001)])
def test_overlapping_registrations_are_refused(scene: Scene, begin: int, end: int) -> None:
    memory = np.zeros(4096, "u1")
    with ugds.register(memory[1000:2001]), ugds.register(memory[60:64]):
        with scene.refuses(errno.EEXIST, "overlaps", operation="register", device=False):
            ugds.register(memory[begin:end])
        with ugds.register(memory[64:1000]), ugds.register(memory[2001:]):
            pass


def test_an_object_in_gpu_memory_is_refused_in_words_where_there_is_no_gpu(scene: Scene) -> None:
    class Cuda:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"shape": (4,), "typestr": "|u1", "data": (0x7F0000000000, False), "version": 3}

    with scene.refuses(errno.EOPNOTSUPP, "no GPU's driver", operation="register", device=False):
        ugds.register(Cuda())
    with scene.refuses(errno.EOPNOTSUPP, "no GPU's driver", device=False):
        scene.device.read(Cuda())


@pytest.mark.parametrize("route", ["staged", "buffered"])
def test_a_route_that_cannot_be_had_is_refused(scene: Scene, route: str) -> None:
    with scene.refuses(errno.EOPNOTSUPP, route, operation="register", device=False):
        ugds.register(bytearray(512), require=route)


def test_a_route_that_does_not_exist_is_refused(scene: Scene) -> None:
    with scene.refuses(errno.EINVAL, '"direkt" is no route', "direct", operation="register", device=False):
        ugds.register(bytearray(512), require="direkt")
    with scene.refuses(errno.EINVAL, "empty list of devices", operation="register", device=False):
        ugds.register(bytearray(512), devices=[])


# --- Opening ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "code", "words"),
    [
        ("emulatde:1MiB", errno.EINVAL, ["emulatde", "did you mean emulated"]),
        ("nvme+tcp://host/x", errno.EINVAL, ["names no transport"]),
        ("", errno.EINVAL, []),
        ("emulated", errno.EINVAL, []),
        ("emulated:", errno.EINVAL, ["no size"]),
        ("emulated:0", errno.EINVAL, []),
        ("emulated:12 potatoes", errno.EINVAL, ["neither a size nor a path"]),
        ("emulated:-1MiB", errno.EINVAL, []),
        ("emulated:1MiB?lbas=512", errno.EINVAL, ["lbas", 'did you mean "lba"']),
        ("emulated:1MiB?lba", errno.EINVAL, []),
        ("emulated:1MiB?lba=513", errno.EINVAL, ["lba=513", "512 to"]),
        ("emulated:1MiB?lba=256", errno.EINVAL, ["lba=256"]),
        ("emulated:1MiB?depth=1", errno.EINVAL, ["depth"]),
        ("emulated:1MiB?queues=65535", errno.EINVAL, ["queues"]),
        ("emulated:1MiB?mdts=x", errno.EINVAL, ["mdts"]),
        ("emulated:1MiB?order=sideways", errno.EINVAL, ["fifo, reverse or random"]),
        ("emulated:1MiB?mpsmin=2&mpsmax=1", errno.EINVAL, ["mpsmin"]),
        ("emulated:1000?lba=512", errno.EINVAL, ["multiple of the block size"]),
        ("emulated:/no/such/folder/image?size=1MiB", errno.ENOENT, []),
    ],
)
def test_a_uri_that_is_not_understood_says_why(scene: Scene, uri: str, code: int, words: list[str]) -> None:
    with scene.refuses(code, *words, operation="open", device=False):
        ugds.open(uri)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deadline": 0}, ["deadline"]),
        ({"deadline": -1}, ["deadline"]),
        ({"deadline": float("nan")}, ["deadline"]),
        ({"depth": 1}, ["queue depth of 1", "2 to 65536"]),
        ({"depth": 65537}, ["queue depth"]),
        ({"queues": 65535}, ["65535 queue pairs"]),
        ({"namespace": 2}, ["no namespace 2"]),
        ({"namespace": 2**32 - 1}, ["no namespace"]),
    ],
)
def test_options_out_of_range_are_refused(scene: Scene, options: dict[str, Any], words: list[str]) -> None:
    with scene.refuses(errno.EINVAL, *words, operation="open", device=False):
        ugds.open("emulated:1MiB", **options)


def test_a_deadline_is_never_rounded_to_none(scene: Scene) -> None:
    """A deadline below a nanosecond is positive, and becomes zero as nanoseconds."""
    with scene.refuses(errno.EINVAL, "deadline", operation="open", device=False):
        ugds.open("emulated:1MiB", deadline=1e-10)
    with ugds.open("emulated:1MiB", deadline=float("inf")) as ssd:
        assert ssd.state == "ready"


@pytest.mark.parametrize(("lba", "metadata"), [(512, 8), (4096, 8), (4096, 64)])
@pytest.mark.parametrize("interleaved", [0, 1])
def test_a_format_with_metadata_is_refused_by_name(scene: Scene, lba: int, metadata: int, interleaved: int) -> None:
    """nvme-cli 2016: 512+8."""
    kind = "extended LBA" if interleaved else "separate metadata"
    with scene.refuses(errno.EOPNOTSUPP, f"{lba}+{metadata} byte blocks", kind, operation="open", device=False):
        ugds.open(f"emulated:1MiB?lba={lba}&metadata={metadata}&interleaved={interleaved}")


def test_a_transfer_limit_below_one_block_is_refused(scene: Scene) -> None:
    with scene.refuses(errno.EOPNOTSUPP, "smaller than one block", operation="open", device=False):
        ugds.open("emulated:1MiB?lba=65536&mdts=1")


def test_a_device_that_grants_no_queue_is_refused(scene: Scene) -> None:
    before = scene.state()
    with pytest.raises(ugds.Error) as caught:
        ugds.open("emulated:1MiB?queues=0")
    assert caught.value.operation == "open"
    assert "queue" in str(caught.value)
    assert caught.value.errno not in (0, None)
    assert scene.state() == before


def test_an_image_that_is_open_is_refused(scene: Scene, tmp_path: Any) -> None:
    uri = f"emulated:{tmp_path}/image?size=1MiB"
    with ugds.open(uri), scene.refuses(errno.EBUSY, operation="open", device=False):
        ugds.open(uri)
    with ugds.open(uri):
        pass


# --- Closed devices -----------------------------------------------------------------------------------------------


def test_everything_on_a_closed_device_says_so(scene: Scene) -> None:
    device = ugds.open("emulated:1MiB?serial=closed")
    emulator = ugds.testing.emulator(device)
    device.close()
    device.close()
    assert device.closed
    assert device.state == "closed"
    assert "closed" in repr(device)
    calls: list[Callable[[], Any]] = [
        lambda: device.read(scene.buffer),
        lambda: device.write(scene.buffer),
        lambda: device.write(scene.buffer, 1, unaligned=True),
        lambda: device.flush(),
        lambda: device.discard(0, 512),
        lambda: device.capacity,
        lambda: device.block_size,
        lambda: device.max_transfer,
        lambda: device.info,
        lambda: device.stats(),
        lambda: ugds.testing.emulator(device),
        lambda: emulator.violations(),
        lambda: emulator.inject("hang"),
        lambda: ugds.register(bytearray(512), devices=[device]),
    ]
    for call in calls:
        with scene.refuses(errno.EBADF, "the device is closed", "open it again", device=False):
            call()


# --- The error itself ---------------------------------------------------------------------------------------------


def test_an_error_is_an_oserror_with_everything_that_is_known(scene: Scene) -> None:
    scene.emulator.inject("status", opcode=2, status=0x281, lba=40, blocks=1)
    with pytest.raises(OSError) as caught:
        scene.device.read(scene.buffer, 0, 32 * KIB)
    error = caught.value
    assert isinstance(error, ugds.Error)
    assert error.errno == errno.EIO
    assert (error.operation, error.device) == ("read", URI)
    assert (error.offset, error.length, error.completed) == (0, 32 * KIB, 16 * KIB)
    assert error.status == 0x281
    assert "unrecovered read error" in error.status_text
    assert "0x281" in error.status_text
    assert "a command of 8192 bytes at byte 16384" in error.cause
    assert "restore" in error.hint
    text = str(error)
    for part in ("read", URI, "[0, +32768)", error.cause, error.status_text, "16384 bytes were completed", error.hint):
        assert part in text


# mdts=1 is 8 KiB: 64 KiB are eight commands.
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("order", ["fifo", "reverse", "random"])
@pytest.mark.parametrize("piece", [0, 1, 5, 7])
def test_completed_is_the_exact_prefix_in_whatever_order_commands_end(
    open_ssd: OpenSsd, operation: str, order: str, piece: int
) -> None:
    scene = Scene(open_ssd(f"{URI}&order={order}&pump=caller&latency=5us&clock=virtual", queues=1))
    start = 3 * 512
    scene.emulator.inject(
        "status", opcode=1 if operation == "write" else 2, status=0x281, lba=3 + 16 * piece + 15, blocks=1
    )
    stored = scene.emulator.peek(start, 64 * KIB)
    with pytest.raises(ugds.Error) as caught:
        getattr(scene.device, operation)(scene.buffer, start)
    done = piece * 8 * KIB
    assert caught.value.completed == done
    assert caught.value.status == 0x281
    if operation == "read":
        assert scene.memory[:done].tobytes() == stored[:done]
        assert (scene.memory[done : done + 8 * KIB] == 0xC3).all()
    else:
        assert scene.emulator.peek(start, done) == b"\xc3" * done
        assert scene.emulator.peek(start + done, 8 * KIB) == stored[done : done + 8 * KIB]
    assert scene.device.stats().in_flight == 0
    # And the same request is right when nothing fails.
    assert getattr(scene.device, operation)(scene.buffer, start) == 64 * KIB
    assert scene.emulator.peek(start, 64 * KIB) == scene.memory.tobytes()
    scene.buffer.close()


def test_of_two_failures_the_earlier_is_told(open_ssd: OpenSsd) -> None:
    scene = Scene(open_ssd(f"{URI}&order=reverse&pump=caller&latency=5us&clock=virtual", queues=1))
    scene.emulator.inject("status", opcode=2, status=0x281, lba=16 * 6, blocks=1)
    scene.emulator.inject("status", opcode=2, status=0x286, lba=16 * 2, blocks=1)
    with pytest.raises(ugds.Error) as caught:
        scene.device.read(scene.buffer)
    assert (caught.value.completed, caught.value.status) == (2 * 8 * KIB, 0x286)
    scene.buffer.close()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (0x002, errno.EINVAL, "invalid field"),
        (0x004, errno.EIO, "data transfer error"),
        (0x006, errno.EIO, "internal error"),
        (0x020, errno.EROFS, "write protected"),
        (0x080, errno.ERANGE, "LBA out of range"),
        (0x081, errno.ENOSPC, "capacity exceeded"),
        (0x083, errno.EBUSY, "reservation conflict"),
        (0x182, errno.EROFS, "read only range"),
        (0x183, errno.EINVAL, "command size limit exceeded"),
        (0x280, errno.EIO, "write fault"),
        (0x281, errno.EIO, "unrecovered read error"),
        (0x282, errno.EILSEQ, "guard check"),
        (0x286, errno.EACCES, "access denied"),
        (0x303, errno.EAGAIN, "transition"),
        (0x370, errno.EIO, "host pathing error"),
        (0x2F5, errno.EIO, "media error: code 0xf5 (0x2f5)"),
        (0x7C1, errno.EIO, "vendor specific: code 0xc1 (0x7c1)"),
        (0x4AA, errno.EIO, "reserved status type: code 0xaa (0x4aa)"),
    ],
)
def test_a_status_is_told_in_words_and_as_an_errno(scene: Scene, status: int, code: int, words: str) -> None:
    for call, operation in (
        (lambda: scene.device.read(scene.buffer, 0, 512), "read"),
        (lambda: scene.device.read(scene.buffer, 1, 5), "read"),
        (lambda: scene.device.write(scene.buffer, 0, 512), "write"),
        (lambda: scene.device.write(scene.buffer, 0, 512, durable=True), "write"),
        (lambda: scene.device.flush(), "flush"),
        (lambda: scene.device.discard(0, 512), "discard"),
    ):
        before = scene.state()
        scene.emulator.inject("status", status=status)
        with pytest.raises(ugds.Error) as caught:
            call()
        error = caught.value
        assert error.errno == code, operation
        assert (error.operation, error.status, error.completed) == (operation, status, 0)
        assert words.lower() in error.status_text.lower()
        assert scene.state()[:5] == before[:5]


@pytest.mark.parametrize(("operation", "opcode"), [("read", 2), ("write", 1)])
@pytest.mark.parametrize("bad", [0, 1, 40, 63])
def test_completed_of_an_unaligned_request_is_right(scene: Scene, operation: str, opcode: int, bad: int) -> None:
    """The whole's range is told, not a part's; the prefix that it names is right, and what follows untouched or new."""
    start, size, where = 100, 64 * 512 - 200, 4
    stored = scene.emulator.peek(0, 64 * 512)
    sent = np.random.default_rng(bad).integers(0, 256, 64 * KIB, "u1")
    scene.memory[:] = sent
    scene.emulator.inject("status", opcode=opcode, status=0x281, lba=bad, blocks=1)
    arguments = {"unaligned": True} if operation == "write" else {}
    with pytest.raises(ugds.Error) as caught:
        getattr(scene.device, operation)(scene.buffer, start, size, where, **arguments)
    error = caught.value
    assert (error.operation, error.offset, error.length, error.status) == (operation, start, size, 0x281)
    done = error.completed
    assert done <= max(0, bad * 512 - start)
    assert done >= max(0, bad * 512 - start - scene.device.max_transfer)
    if operation == "read":
        assert scene.memory[where : where + done].tobytes() == stored[start : start + done]
        assert (scene.memory[:where] == sent[:where]).all()
        assert (scene.memory[where + size :] == sent[where + size :]).all()
    else:
        now = scene.emulator.peek(0, 64 * 512)
        assert now[start : start + done] == sent[where : where + done].tobytes()
        assert now[:start] == stored[:start]
        assert now[start + size :] == stored[start + size :]


def test_corruption_by_the_device_is_not_hidden(scene: Scene) -> None:
    """What the medium does silently reaches the caller: no checksum is invented here, but nothing is cached either."""
    scene.emulator.inject("corrupt", opcode=2)
    scene.device.read(scene.buffer, 0, 512)
    assert scene.memory[:512].tobytes() != scene.emulator.peek(0, 512)
    scene.device.read(scene.buffer, 0, 512)
    assert scene.memory[:512].tobytes() == scene.emulator.peek(0, 512)


def test_a_device_without_discard_says_so(open_ssd: OpenSsd) -> None:
    scene = Scene(open_ssd("emulated:1MiB?dsm=0&lba=512"))
    with scene.refuses(errno.EOPNOTSUPP, "Dataset Management", operation="discard"):
        scene.device.discard(0, 512)
    scene.buffer.close()


def test_a_fault_that_does_not_exist_is_refused(scene: Scene) -> None:
    with scene.refuses(errno.EINVAL, "gremlin", "ugds.testing.FAULTS", operation="inject", device=False):
        scene.emulator.inject("gremlin")
    with pytest.raises((ugds.Error, OverflowError)):
        scene.emulator.peek(MIB, 1)
    with pytest.raises(ugds.Error):
        scene.emulator.poke(MIB - 1, b"xx")


def test_memory_that_is_not_there_cannot_be_registered(scene: Scene) -> None:
    """A pointer to nothing is an error of the call, never a crash at the first I/O."""
    import mmap

    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    page = (ctypes.c_char * mmap.PAGESIZE).from_address(address + mmap.PAGESIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    with scene.refuses(errno.EFAULT, operation="register", device=False):
        ugds.register(page)
    assert libc.mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 3) == 0
