# SPDX-License-Identifier: Apache-2.0
"""Files and block devices: every read and write is what plain POSIX would make of it, whichever way it goes."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ugds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KIB, MIB = 1 << 10, 1 << 20
WAYS = {
    "direct": "",
    "buffered": "?direct=off",
    "threads": "?io=threads",
    "interrupts": "?interrupts=1",
    "latency": "?mode=latency",
}
BOUND = 20.0


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return WAYS[request.param]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a file"


def uri(path: Path, query: str = "") -> str:
    return f"file:{str(path).replace(' ', '%20')}{query}"


@contextmanager
def fails(code: int, words: str = "") -> Iterator[None]:
    with pytest.raises(ugds.Error, match=words or None) as caught:
        yield
    assert caught.value.errno == code, caught.value


# --- The oracle ------------------------------------------------------------------------------------------------------

#: Near the borders of blocks, pages and commands.
EDGES = st.one_of(
    st.integers(0, 3),
    st.integers(0, 700_000),
    st.builds(
        lambda unit, count, off: max(0, unit * count + off),
        st.sampled_from([512, 4096, 65536, MIB]),
        st.integers(0, 3),
        st.integers(-2, 2),
    ),
)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "write", "durable", "batch", "truncate"]),
        EDGES,
        EDGES,
        EDGES,
        st.integers(0, 1 << 32),
    ),
    min_size=1,
    max_size=12,
)
ROOM = 8 * MIB


class Posix:
    """The same file, as bytes."""

    def __init__(self) -> None:
        self.bytes = bytearray()

    def write(self, offset: int, data: bytes) -> None:
        if offset > len(self.bytes):
            self.bytes.extend(bytes(offset - len(self.bytes)))
        self.bytes[offset : offset + len(data)] = data

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self.bytes[offset : offset + size])


def play(device: ugds.Device, path: Path, operations: list[Any]) -> None:
    model = Posix()
    with ugds.empty(ROOM) as buffer:
        view = np.frombuffer(memoryview(buffer), np.uint8)
        view[:] = np.arange(ROOM, dtype=np.uint64).astype(np.uint8) ^ 0x5A
        for kind, offset, size, place, seed in operations:
            size, place = max(size, 1), place % MIB
            if kind in ("write", "durable"):
                data = random.Random(seed).randbytes(min(size, 70_000)) * (-(-size // 70_000))
                view[place : place + size] = np.frombuffer(data[:size], np.uint8)
                assert device.write(buffer, offset, size, place, durable=kind == "durable") == size
                model.write(offset, data[:size])
            elif kind == "truncate":
                os.truncate(path, offset)
                model.write(offset, b"")
                del model.bytes[offset:]
            else:
                before = view.copy()
                expected = model.read(offset, size)
                if kind == "read":
                    assert device.read(buffer, offset, size, place) == len(expected)
                else:
                    with device.batch(8) as batch:
                        batch.read(buffer, offset, size, place)
                        (done,) = batch.wait()
                        assert (done.size, done.error) == (len(expected), None)
                end = place + len(expected)
                assert bytes(view[place:end]) == expected
                assert (view[:place] == before[:place]).all()
                assert (view[end:] == before[end:]).all()
            assert device.capacity == len(model.bytes)
        del view
    assert path.read_bytes() == model.bytes


@pytest.mark.parametrize("query", WAYS.values(), ids=WAYS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_every_request_is_what_posix_would_make_of_it(tmp_path: Path, query: str, operations: list[Any]) -> None:
    path = tmp_path / "oracle"
    path.unlink(missing_ok=True)
    with ugds.open(uri(path, query + ("&" if query else "?") + "create=1")) as device:
        play(device, path, operations)


@settings(max_examples=25, deadline=None)
@given(operations=OPERATIONS)
def test_a_file_in_memory_is_buffered_and_right(operations: list[Any]) -> None:
    path = Path(f"/dev/shm/ugds-test-{os.getpid()}")
    try:
        with ugds.open(uri(path, "?create=1")) as device:
            play(device, path, operations)
            stats = device.stats()
            assert device.info.why_buffered == "tmpfs has no direct I/O"
            assert stats.buffered_bytes == stats.read_bytes + stats.write_bytes
    finally:
        path.unlink(missing_ok=True)


def test_neighbours_that_write_at_once_lose_nothing(path: Path, way: str) -> None:
    """Ranges that share blocks and pages, each with a writer of its own: none may undo another's bytes."""
    path.write_bytes(bytes(MIB))
    size, writers, rounds = 1_777, 8, 40
    wrong: list[str] = []
    with ugds.open(uri(path, way)) as device:

        def write(which: int) -> None:
            with ugds.empty(size) as mine:
                view = np.frombuffer(memoryview(mine), np.uint8)
                for turn in range(rounds):
                    view[:] = which * rounds + turn & 0xFF
                    offset = (turn * writers + which) * size
                    if device.write(mine, offset) != size:
                        wrong.append(f"{which}: {turn}")
                del view

        threads = [threading.Thread(target=write, args=(which,)) for which in range(writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    data = np.frombuffer(path.read_bytes(), np.uint8)
    for turn in range(rounds):
        for which in range(writers):
            at = (turn * writers + which) * size
            assert (data[at : at + size] == (which * rounds + turn & 0xFF)).all(), (turn, which)


# --- Every way in ----------------------------------------------------------------------------------------------------


def test_awaits_and_batches_end_where_the_file_does(path: Path, way: str) -> None:
    data = os.urandom(3 * MIB + 17)
    path.write_bytes(data)
    step, count = 65_537, 60
    with ugds.open(uri(path, way)) as device, ugds.empty(count * step) as buffer:
        view = np.frombuffer(memoryview(buffer), np.uint8)
        sizes = [max(0, min(step, len(data) - i * step)) for i in range(count)]

        async def read_all() -> list[int]:
            return list(
                await asyncio.gather(
                    *[device.aread(buffer, i * step, step, i * step) for i in range(count)]  # type: ignore[attr-defined]
                )
            )

        assert asyncio.run(read_all()) == sizes
        assert bytes(view[: len(data)]) == data
        view[:] = 0
        with device.batch(count) as batch:
            offsets = np.arange(count) * step
            batch.read(buffer, offsets, step, offsets)
            got = {done.cookie: done.size for done in batch.wait()}
        assert sorted(got.values()) == sorted(sizes)
        assert bytes(view[: len(data)]) == data
        del view


def test_a_path_a_pathlib_path_and_a_descriptor_open_the_same_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"x" * 5000)
    monkeypatch.chdir(path.parent)
    descriptor = os.open(path, os.O_RDWR)
    for place in (path, str(path), Path(path.name), f"./{path.name}", f"file:?fd={descriptor}"):
        with ugds.open(place) as device, ugds.empty(5000) as buffer:
            assert device.transport == "file"
            assert device.read(buffer) == 5000
            assert bytes(buffer) == b"x" * 5000
            assert str(path) in device.info.uri or path.name in device.info.uri
    os.fstat(descriptor)  # it is still ours
    os.close(descriptor)


def test_c_programs_register_descriptors_of_files(path: Path) -> None:
    path.write_bytes(b"abc" * 1000)
    script = f"""
import ctypes, os, sys
lib = ctypes.CDLL({ugds._core.library_path()!r})
class Error(ctypes.Structure): _fields_ = [("err", ctypes.c_int), ("cu_err", ctypes.c_int)]
class Descr(ctypes.Structure): _fields_ = [("type", ctypes.c_int), ("gap", ctypes.c_int), ("fd", ctypes.c_long)]
for name in ("uGDSDriverOpen", "uGDSHandleRegister", "uGDSBufRegister", "uGDSGetDeviceCapacity"):
    getattr(lib, name).restype = Error
lib.uGDSRead.restype = ctypes.c_ssize_t
lib.uGDSRead.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long, ctypes.c_long]
lib.uGDSDriverOpen()
fh, descr = ctypes.c_void_p(), Descr(1, 0, os.open({str(path)!r}, os.O_RDWR))
assert lib.uGDSHandleRegister(ctypes.byref(fh), ctypes.byref(descr)).err == 0
memory = ctypes.create_string_buffer(8192)
assert lib.uGDSBufRegister(memory, ctypes.c_size_t(8192), 0).err == 0
size = ctypes.c_uint64()
assert lib.uGDSGetDeviceCapacity(fh, ctypes.byref(size)).err == 0
print(size.value, lib.uGDSRead(fh, memory, 8000, 1, 3), memory.raw[3:9])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "3000 2999 b'bcabca'\n"), done.stderr


# --- What is said of it ----------------------------------------------------------------------------------------------


def test_info_and_statistics_say_which_way_the_bytes_went(path: Path) -> None:
    path.write_bytes(bytes(MIB))
    with ugds.open(uri(path, "?direct=off")) as device, ugds.empty("64KiB") as buffer:
        device.read(buffer)
        assert device.info.why_buffered == "it was opened with direct=off"
        assert (buffer.route, device.stats().route) == ("buffered", "buffered")
        assert device.stats().buffered_bytes == 65536
        assert "buffered: it was opened with direct=off" in str(device.info)
    with ugds.open(path) as device, ugds.empty("64KiB") as buffer:
        if device.info.why_buffered:
            pytest.skip(f"the temporary files' {device.info.medium} has no direct I/O")
        device.read(buffer)
        assert (buffer.route, device.stats().route, device.stats().buffered_bytes) == ("direct", "direct", 0)
        assert device.info.mode == "throughput"
        assert device.info.io in ("io_uring", "threads") or device.info.io.startswith("threads: ")


def test_statistics_count_what_alignment_had_copied(path: Path) -> None:
    path.write_bytes(bytes(2 * MIB))
    with ugds.open(path) as device, ugds.empty("1MiB") as buffer:
        if device.info.why_buffered:
            pytest.skip(f"the temporary files' {device.info.medium} has no direct I/O")
        device.read(buffer)
        before = device.stats()
        assert before.bounced_bytes == 0
        device.read(buffer, 3)
        assert (device.stats() - before).bounced_bytes == MIB


def test_statistics_count_what_was_read_at_the_end_of_a_file(path: Path) -> None:
    path.write_bytes(bytes(1000))
    with ugds.open(path) as device, ugds.empty("64KiB") as buffer:
        assert device.read(buffer) == 1000
        stats = device.stats()
        assert (stats.read_bytes, stats.errors) == (1000, 0)


# --- Refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with fails(errno.ENOENT, "create=1"):
        ugds.open(tmp_path / "none")
    with fails(errno.EISDIR, "directory"):
        ugds.open(tmp_path)
    with fails(errno.EINVAL, "neither a regular file nor a block device"):
        ugds.open("/dev/null")
    with fails(errno.EINVAL, "did you mean direct"):
        ugds.open(uri(tmp_path / "none", "?dirct=on"))
    with fails(errno.EINVAL, "use auto, on or off"):
        ugds.open(uri(tmp_path / "none", "?direct=perhaps"))
    with fails(errno.EBADF, "not open"):
        ugds.open("file:?fd=999999")
    with fails(errno.EINVAL, "names no file"):
        ugds.open("file:")


@pytest.mark.parametrize("query", ["", "?readonly=1", "?create=1"])
def test_opening_a_pipe_waits_for_nobody(tmp_path: Path, query: str) -> None:
    """Nor does a descriptor that only names it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_PATH)
    program = (
        "import sys, ugds\n"
        "for name in sys.argv[1:]:\n"
        "    try: ugds.open(name)\n"
        "    except ugds.Error as error: assert error.errno == 22 and 'neither a regular file' in str(error), error\n"
        "    else: raise AssertionError(name)\n"
    )
    names = [uri(pipe, query), f"file:?fd={descriptor}"]
    try:
        subprocess.run([sys.executable, "-c", program, *names], check=True, timeout=60, pass_fds=[descriptor])
    finally:
        os.close(descriptor)


def test_the_remedy_of_an_opening_fits(tmp_path: Path) -> None:
    with fails(errno.ENOENT, "make its folder first"):
        ugds.open(uri(tmp_path / "none" / "file", "?create=1"))
    with fails(errno.ENOTDIR, "name a file"):
        (tmp_path / "file").write_bytes(b"")
        ugds.open(tmp_path / "file" / "x")
    path = Path(f"/dev/shm/ugds-demanded-{os.getpid()}")
    with fails(errno.EOPNOTSUPP, "tmpfs has no direct I/O"):
        ugds.open(uri(path, "?direct=on&create=1"))
    assert not path.exists()


def test_a_file_is_made_by_a_keyword_whatever_its_name(path: Path) -> None:
    odd = path.parent / "50% of ü?&"
    with ugds.open(odd, create=True, direct="off") as device, ugds.empty(4096) as buffer:
        assert device.write(buffer) == 4096
        assert device.info.why_buffered == "it was opened with direct=off"
    assert odd.read_bytes() == bytes(4096)
    with ugds.open(uri(path, "?io=threads"), create=True) as device:
        assert device.info.io == "threads"
    assert path.exists()
    with fails(errno.EINVAL, "is no file, and create and direct are said of files"):
        ugds.open("emulated:1MiB", create=True)


def in_a_process(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives its rights up")
def test_a_direct_descriptor_that_cannot_be_opened_again_takes_whole_blocks_alone(path: Path) -> None:
    path.write_bytes(b"z" * (4 * MIB))
    path.chmod(0o600)
    out = in_a_process(
        "import errno, os, sys, numpy, ugds\n"
        "descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_DIRECT)\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "def refused(write):\n"
        "    try:\n"
        "        write()\n"
        "    except ugds.Error as error:\n"
        "        assert (error.errno, error.completed) == (errno.EINVAL, 0), error\n"
        "        assert 'whole blocks of' in str(error) and 'Permission denied' in str(error), error\n"
        "        return\n"
        "    raise AssertionError('it was written')\n"
        "with ugds.open(f'file:?fd={descriptor}') as device, ugds.empty('3MiB') as buffer:\n"
        "    assert 'whole blocks of' in device.info.access, device.info\n"
        "    assert device.read(buffer, 1000, 100_000) == 100_000\n"
        "    numpy.frombuffer(buffer, 'u1')[:] = 0\n"
        "    for offset, size in ((1000, 3000), (1000, 100_000), (1000, 2 << 20), (4096, (2 << 20) + 1)):\n"
        "        refused(lambda: device.write(buffer, offset, size))\n"
        "    with device.batch(4) as batch:\n"
        "        batch.write(buffer, numpy.array([1000, 4096]), 8192, numpy.array([0, 0]))\n"
        "        done = batch.completed(2, timeout=20)\n"
        "        assert sorted(len(str(one)) > 0 for one in done.errors) == [True]\n"
        "    assert device.write(buffer, 8192, 1 << 20) == 1 << 20\n"
        "print('done')\n",
        path,
    )
    assert out == "done\n"
    data = path.read_bytes()
    assert data[:4096] == b"z" * 4096
    assert data[8192 + MIB : 8192 + MIB + 100] == b"z" * 100
    assert data[4096 : 8192 + MIB] == bytes(4096 + MIB)


def test_direct_may_be_demanded() -> None:
    path = Path(f"/dev/shm/ugds-demanded-{os.getpid()}")
    path.write_bytes(bytes(4096))
    try:
        with fails(errno.EOPNOTSUPP, "tmpfs has no direct I/O"):
            ugds.open(uri(path, "?direct=on"))
    finally:
        path.unlink()


def test_a_file_that_may_not_be_written_is_read(path: Path) -> None:
    path.write_bytes(b"y" * 4096)
    with ugds.open(uri(path, "?readonly=1")) as device, ugds.empty(4096) as buffer:
        assert device.read(buffer) == 4096
        assert device.info.access == "it was opened with readonly=1"
        with fails(errno.EBADF, "write on file:.*not open for this: it was opened with readonly=1"):
            device.write(buffer)
        assert device.read(buffer) == 4096
    assert path.read_bytes() == b"y" * 4096


@pytest.mark.parametrize("size", [1, 511, 5000, 8191, 100_001])
def test_memory_beyond_the_end_of_the_file_stays_as_it_was(path: Path, way: str, size: int) -> None:
    """Also where all is aligned, and a disk would give whole blocks."""
    path.write_bytes(bytes(size))
    with ugds.open(uri(path, way)) as device, ugds.empty("128KiB") as buffer:
        view = np.frombuffer(memoryview(buffer), np.uint8)
        view[:] = 0xAA
        assert device.read(buffer) == size
        assert (view[:size] == 0).all()
        assert (view[size:] == 0xAA).all()
        del view


def dirty_pages(path: Path) -> int:
    """Of a file, that are not on the disk, or not yet (cachestat, Linux 6.5)."""
    found = (ctypes.c_uint64 * 5)()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syscall(451, descriptor, (ctypes.c_uint64 * 2)(), found, 0) != 0:
            pytest.skip("this kernel does not tell which pages of a file are dirty")
    finally:
        os.close(descriptor)
    return found[1] + found[2]


@pytest.mark.parametrize("io", ["uring", "threads"])
def test_what_is_durable_or_flushed_is_on_the_disk(path: Path, io: str) -> None:
    path.write_bytes(b"")
    try:
        device = ugds.open(uri(path, f"?direct=off&io={io}"))
    except ugds.Error as error:
        pytest.skip(str(error))
    with device, ugds.empty("64KiB") as buffer:
        device.write(buffer)
        if dirty_pages(path) == 0:
            pytest.skip("this file system has no dirty pages")
        device.flush()
        assert dirty_pages(path) == 0
        device.write(buffer)
        assert dirty_pages(path) != 0
        device.write(buffer, durable=True)
        assert dirty_pages(path) == 0


TOO_LARGE = """
import resource, signal, sys, ugds
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with ugds.open(sys.argv[1]) as device, ugds.empty("2MiB") as buffer:
    resource.setrlimit(resource.RLIMIT_FSIZE, ((1 << 20) - 100, 1 << 20))
    try:
        device.write(buffer)
    except ugds.Error as error:
        print(error.errno, error.operation, error.completed <= 1 << 20, bool(error.hint))
    before = device.info.why_buffered
    try:
        device.write(buffer, (1 << 20) - 8192 - 100, 8192 + 200)
    except ugds.Error as error:
        print(error.errno)
    # What a limit cuts is no aligned request any more: nothing is to be learned from it.
    print(device.write(buffer, 0, 4096), device.state, device.info.why_buffered == before)
    try:
        ugds.empty("2MiB")
    except ugds.Error as error:
        print(error.errno, error.hint)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which would end the process
    try:
        ugds.empty("2MiB")
    except ugds.Error as error:
        print(error.errno)
"""


TOLD = """27 write True True
27
4096 ready True
27 raise the limit (ulimit -f), or ask for less
27
"""


@pytest.mark.parametrize("query", ["", "&io=threads", "&direct=off"])
def test_a_write_that_finds_no_room_says_so(path: Path, query: str) -> None:
    command = [sys.executable, "-c", TOO_LARGE, uri(path, "?create=1" + query)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, TOLD), done.stderr


WITHOUT_URING = """
import ctypes, struct, sys, ugds
# Refuses io_uring_setup, as Docker's default seccomp profile does.
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
program = b"".join(struct.pack("HBBI", *rule) for rule in rules)
memory = ctypes.create_string_buffer(program)
libc = ctypes.CDLL(None, use_errno=True)
head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(memory)))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, head, 0, 0) == 0, ctypes.get_errno()
with ugds.open(sys.argv[1]) as device, ugds.empty("1MiB") as buffer:
    print(device.write(buffer, 3), device.read(buffer), device.info.io)
try:
    ugds.open(f"file:{sys.argv[1]}?io=uring")
except ugds.Error as error:
    print(error)
"""


def test_where_io_uring_is_refused_threads_do_it_and_it_is_said(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    done = subprocess.run([sys.executable, "-c", WITHOUT_URING, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("1048576 1048576 threads: io_uring is not to be had: Operation not permitted")
    assert "[Errno 1] open on file:" in second
    assert "io_uring is not to be had: Operation not permitted; allow it (kernel.io_uring_disabled" in second


def test_a_child_of_a_fork_is_told_and_its_parent_goes_on(path: Path) -> None:
    path.write_bytes(bytes(MIB))
    with ugds.open(path) as device, ugds.empty("1MiB") as buffer:
        assert device.read(buffer) == MIB
        child = os.fork()
        if child == 0:
            try:
                device.read(buffer)
            except ugds.Error as error:
                os._exit(0 if error.errno == errno.EBADF else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert device.read(buffer) == MIB


def test_many_openings_leave_nothing_behind(path: Path) -> None:
    path.write_bytes(bytes(8192))
    ugds.open(path).close()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for turn in range(40):
        with ugds.open(uri(path, "?io=threads" if turn % 4 == 0 else "")) as device, ugds.empty(8192) as buffer:
            assert device.read(buffer) == 8192
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[str]:
    if os.geteuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("loop devices need root and losetup")
    image = tmp_path / "image"
    image.write_bytes(bytes(4 * MIB))
    made = subprocess.run(["losetup", "--find", "--show", image], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    yield made.stdout.strip()
    subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True)


def test_a_block_device_is_a_file_of_a_fixed_size(loop_device: str) -> None:
    with ugds.open(loop_device) as device, ugds.empty("1MiB") as buffer:
        assert device.capacity == 4 * MIB
        assert device.info.medium == "block device"
        view = np.frombuffer(memoryview(buffer), np.uint8)
        view[:] = 0xA7
        assert device.write(buffer, 4 * MIB - 1_000_001, 1_000_001) == 1_000_001
        view[:] = 0
        assert device.read(buffer, 4 * MIB - 100) == 100
        assert (view[:100] == 0xA7).all()
        assert (view[100:] == 0).all()
        with fails(errno.ENOSPC, f"the device ends at byte {4 * MIB}; stay within it"):
            device.write(buffer, 4 * MIB - 10, 100)
        device.flush()
        del view


def test_a_block_device_has_one_opener_that_writes(loop_device: str) -> None:
    with ugds.open(loop_device):
        with fails(errno.EBUSY, "written by one opener.*open here or in another process"):
            ugds.open(loop_device)
        ugds.open(f"file:{loop_device}?readonly=1").close()


def test_a_block_device_that_the_kernel_uses_is_not_written(loop_device: str) -> None:
    descriptor = os.open(loop_device, os.O_RDWR | os.O_EXCL)
    try:
        with fails(errno.EBUSY, "readonly=1"):
            ugds.open(loop_device)
        ugds.open(f"file:{loop_device}?readonly=1").close()
    finally:
        os.close(descriptor)


def test_the_library_asks_for_no_memory_beyond_its_own_on_registration(path: Path) -> None:
    """Memory is held by the kernel for each request; none is locked when it is registered."""
    path.write_bytes(bytes(4096))
    libc = ctypes.CDLL(None)
    assert libc is not None
    with ugds.open(path), ugds.empty("64MiB") as buffer:
        assert len(memoryview(buffer)) == 64 * MIB
        status = Path("/proc/self/status").read_text()
        assert int(status.split("VmLck:")[1].split()[0]) == 0


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio makes the baseline")
@pytest.mark.slow
def test_bench_files_measures_every_way_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ugds", "bench", "files", tmp_path, "--sizes", "64KiB", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    shares = {name for record in records for name in record["figures"] if name.startswith("share")}
    assert shares == {"share_of_pread", "share_of_io_uring", "share_of_threads"}
    assert all(figure["value"] > 0 for record in records for figure in record["figures"].values())
    assert {record["route"] for record in records} <= {"direct", "buffered"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio makes the baseline")
@pytest.mark.skipif(not os.environ.get("FAKE_CUDA_LIBRARY"), reason="FAKE_CUDA_LIBRARY names no driver without a GPU")
@pytest.mark.slow
def test_bench_files_measures_a_stream_into_gpu_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ugds", "bench", "files", tmp_path, "--gpu", "0"]
    environment = {**os.environ, "UGDS_CUDA_LIBRARY": os.environ["FAKE_CUDA_LIBRARY"]}
    done = subprocess.run(
        [*command, "--sizes", "4MiB", "--rounds", "1", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(record["memory"], record["route"]) for record in records} == {("cuda", "staged")}
    streams = [record for record in records if record["params"]["way"] == "stream"]
    for record in streams:
        share = "share_of_io_uring" if record["params"]["cached"] else "stream_share_of_io_uring"
        assert list(record["figures"]) == ["read_gib_per_s", "io_uring_gib_per_s", share]
        assert record["params"]["depth"] == 1
    assert [record["params"]["cached"] for record in streams][-1] is True
    assert all(figure["value"] > 0 for record in records for figure in record["figures"].values())
    assert list(tmp_path.iterdir()) == []
