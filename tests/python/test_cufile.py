# SPDX-License-Identifier: Apache-2.0
"""The cuFile-compatible library, by ctypes: what it exports, and that what it moves is what POSIX would."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import cufile_client as cf
import pytest
from cufile_client import CuFile

ROOT = Path(__file__).resolve().parents[2]
FAKE = os.environ.get("FAKE_CUDA_LIBRARY", "")
MIB = 1 << 20


@pytest.fixture
def cufile() -> Iterator[CuFile]:
    """The library in this process; its driver is closed again, and nothing may be left registered."""
    library = CuFile()
    library.call("cuFileDriverOpen")
    yield library
    library.call("cuFileDriverClose")
    assert library.library.cuFileUseCount() == 0


def exported(path: Path) -> set[str]:
    done = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines()}


def test_every_call_is_exported_and_nothing_else() -> None:
    declared = set(re.findall(r"\b(cuFile\w+)\(", (ROOT / "core/capi/cufile/abi.h").read_text()))
    assert exported(cf.OURS) == declared
    assert len(declared) == 50  # 49, and the older name of one


def test_it_needs_the_library_of_the_package_and_embeds_nothing_of_it() -> None:
    dynamic = subprocess.run(["readelf", "-d", str(cf.OURS)], capture_output=True, text=True, check=True).stdout
    assert "Library soname: [libcufile.so.0]" in dynamic
    assert "Shared library: [libugds.so]" in dynamic
    assert "$ORIGIN/.." in dynamic
    assert not [name for name in exported(cf.OURS) if "ugds" in name.lower()]


def test_the_name_without_a_number_gives_the_same_library(cufile: CuFile) -> None:
    other = CuFile(cf.OURS.parent / "libcufile.so")
    assert other.library.cuFileUseCount() == 1  # opened by the other name
    other.call("cuFileDriverOpen")
    assert cufile.library.cuFileUseCount() == 2
    cufile.call("cuFileDriverClose")


def oracle(tmp_path: Path, memory: str, way: str, cases: int) -> None:
    """Requests at random, in a process of its own, each against POSIX (cufile_oracle.py)."""
    if memory != "host" and not FAKE:
        pytest.skip("FAKE_CUDA_LIBRARY does not name the driver without a GPU")
    program = Path(__file__).with_name("cufile_oracle.py")
    seed = 20261130 + cases
    done = subprocess.run(
        [sys.executable, str(program), memory, way, str(cases), str(seed), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "UGDS_CUDA_LIBRARY": FAKE},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{cases} cases\n"


@pytest.mark.parametrize("way", ["sync", "vector", "batch"])
@pytest.mark.parametrize("memory", ["host", "cuda", "managed"])
def test_what_is_moved_is_what_posix_would_move(tmp_path: Path, memory: str, way: str) -> None:
    oracle(tmp_path, memory, way, 400)


@pytest.mark.parametrize("memory", ["cuda", "managed"])
def test_what_is_moved_in_stream_order_is_what_posix_would_move(tmp_path: Path, memory: str) -> None:
    oracle(tmp_path, memory, "stream", 300)


def test_writers_of_neighbouring_ranges_do_not_touch_each_other(tmp_path: Path, cufile: CuFile) -> None:
    """Ranges that share pages and blocks, by several threads at once, over two handles of one file."""
    piece, rounds, count = 333, 60, 8
    (tmp_path / "file").write_bytes(bytes(piece * count * rounds))
    fds = [os.open(tmp_path / "file", os.O_RDWR) for _ in range(2)]
    handles = [cufile.register(fd) for fd in fds]
    memories = []

    def write(number: int) -> None:
        memory = ctypes.create_string_buffer(bytes([number + 1]) * piece)
        memories.append(memory)
        for n in range(rounds):
            at = (n * count + number) * piece
            assert cufile.write(handles[number % 2], ctypes.addressof(memory), piece, at) == piece

    threads = [threading.Thread(target=write, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = b"".join(bytes([number + 1]) * piece for number in range(count)) * rounds
    assert (tmp_path / "file").read_bytes() == expected
    for handle, fd in zip(handles, fds, strict=True):
        cufile.deregister(handle)
        os.close(fd)


def test_a_file_is_read_to_its_end_and_grows(tmp_path: Path, cufile: CuFile) -> None:
    fd = cf.open_file(tmp_path / "file", 10_000)
    handle = cufile.register(fd)
    memory = ctypes.create_string_buffer(20_000)
    address = ctypes.addressof(memory)
    assert cufile.read(handle, address, 20_000, 0) == 10_000
    assert cufile.read(handle, address, 100, 9_990) == 10
    assert cufile.read(handle, address, 100, 10_000) == 0
    assert cufile.read(handle, address, 100, 1 << 30) == 0
    assert cufile.write(handle, address, 5_000, 20_000) == 5_000
    assert os.fstat(fd).st_size == 25_000
    assert os.pread(fd, 10_000, 10_000) == bytes(10_000)
    cufile.deregister(handle)
    os.close(fd)


def test_a_handle_allows_what_its_descriptor_does(tmp_path: Path, cufile: CuFile) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    memory = ctypes.create_string_buffer(b"x" * 4096)
    address = ctypes.addressof(memory)
    reading, writing = os.open(tmp_path / "file", os.O_RDONLY), os.open(tmp_path / "file", os.O_WRONLY)
    reader, writer = cufile.register(reading), cufile.register(writing)
    assert cufile.write(reader, address, 4096, 0) == -5019
    assert "open for reading alone" in cufile.words()
    assert cufile.read(writer, address, 4096, 0) == -5019
    assert cufile.write(writer, address, 1000, 3) == 1000
    assert cufile.read(reader, address, 1005, 0) == 1005
    assert memory.raw[:1005] == bytes(3) + b"x" * 1000 + bytes(2)
    for handle in (reader, writer):
        cufile.deregister(handle)
    os.close(reading)
    os.close(writing)


def test_what_the_file_system_says_is_in_errno(tmp_path: Path, cufile: CuFile) -> None:
    fd = cf.open_file(tmp_path / "file", 4096)
    handle = cufile.register(fd)
    memory = ctypes.create_string_buffer(4096)
    assert cufile.write(handle, ctypes.addressof(memory), 4096, (1 << 63) - 5000) in (-errno.EFBIG, -errno.EINVAL)
    cufile.deregister(handle)
    os.close(fd)


def test_what_is_beyond_the_largest_file_is_in_no_other_file(tmp_path: Path, cufile: CuFile) -> None:
    """All files are on one device of the library's, 16 TiB apart."""
    fds = [cf.open_file(tmp_path / name, 8192) for name in ("one", "two", "three")]
    before = [(tmp_path / name).read_bytes() for name in ("one", "two", "three")]
    handles = [cufile.register(fd) for fd in fds]
    memory = ctypes.create_string_buffer(b"x" * 8192)
    address = ctypes.addressof(memory)
    for handle in handles:
        for offset in ((1 << 44) - 4096, 1 << 44, (1 << 44) + 4096, 2 << 44):
            assert cufile.write(handle, address, 8192, offset) == -errno.EFBIG
            assert "16 TiB" in cufile.words()
            assert cufile.read(handle, address, 8192, offset) == 0
    assert [(tmp_path / name).read_bytes() for name in ("one", "two", "three")] == before
    for handle, fd in zip(handles, fds, strict=True):
        cufile.deregister(handle)
        os.close(fd)


def test_an_error_names_the_file_and_the_place_in_it(tmp_path: Path, cufile: CuFile) -> None:
    paths = [tmp_path / name for name in ("one", "two")]
    fds = [cf.open_file(path, 4096) for path in paths]
    handles = [cufile.register(fd) for fd in fds]
    memory = ctypes.create_string_buffer(4096)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        assert cufile.write(handles[1], ctypes.addressof(memory), 4096, 2 << 20) == -errno.EFBIG
    finally:
        signal.signal(signal.SIGXFSZ, before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert f"write on file:{paths[1]} [2097152, +4096)" in cufile.words()
    assert "at byte 2097152" in cufile.words()
    for handle, fd in zip(handles, fds, strict=True):
        cufile.deregister(handle)
        os.close(fd)


def test_a_descriptor_that_was_closed_may_be_another_file(tmp_path: Path, cufile: CuFile) -> None:
    first = cf.open_file(tmp_path / "one", 4096)
    handle = cufile.register(first)
    os.close(first)
    second = cf.open_file(tmp_path / "two", 4096)
    assert second == first
    other = cufile.register(second)
    memory = ctypes.create_string_buffer(4096)
    for one, name in ((handle, "one"), (other, "two")):
        assert cufile.read(one, ctypes.addressof(memory), 4096, 0) == 4096
        assert memory.raw == (tmp_path / name).read_bytes()
        cufile.deregister(one)
    os.close(second)


def test_hundreds_of_files_may_be_registered(tmp_path: Path, cufile: CuFile) -> None:
    memory = ctypes.create_string_buffer(512)
    fds = [cf.open_file(tmp_path / str(n), 512) for n in range(200)]
    handles = [cufile.register(fd) for fd in fds]
    for n, handle in enumerate(handles):
        assert cufile.read(handle, ctypes.addressof(memory), 512, 0) == 512
        assert memory.raw == (tmp_path / str(n)).read_bytes()
    for fd, handle in zip(fds, handles, strict=True):
        cufile.deregister(handle)
        os.close(fd)


def test_threads_share_handles_and_buffers(tmp_path: Path, cufile: CuFile) -> None:
    """Reads, registrations and deregistrations at once: each read is right, whatever the others do."""
    fd = cf.open_file(tmp_path / "file", MIB)
    contents = (tmp_path / "file").read_bytes()
    handle = cufile.register(fd)
    shared = ctypes.create_string_buffer(8 * 65536)
    wrong: list[str] = []
    stop = threading.Event()

    def register() -> None:
        while not stop.is_set():
            cufile.call("cuFileBufRegister", ctypes.addressof(shared), len(shared), 0)
            cufile.call("cuFileBufDeregister", ctypes.addressof(shared))

    def read(number: int) -> None:
        address = ctypes.addressof(shared) + number * 65536
        for n in range(150):
            offset, size = (n * 7919 + number) % (MIB - 65536), 1 + n * 397 % 65535
            moved = cufile.read(handle, address, size, offset)
            if moved != size or ctypes.string_at(address, size) != contents[offset : offset + size]:
                wrong.append(f"{number}: {moved} of {size} at {offset}: {cufile.words()}")

    readers = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    registrar = threading.Thread(target=register)
    registrar.start()
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    registrar.join()
    assert not wrong
    cufile.deregister(handle)
    os.close(fd)


def test_who_opens_the_driver_while_another_closes_it_has_it_open(tmp_path: Path) -> None:
    cufile = CuFile()
    fd = cf.open_file(tmp_path / "file", 4096)
    copies = [os.dup(fd) for _ in range(200)]
    memory = ctypes.create_string_buffer(100)
    for _ in range(10):
        cufile.call("cuFileDriverOpen")
        first, *_ = [cufile.register(copy) for copy in copies]
        thread = threading.Thread(target=cufile.call, args=("cuFileDriverClose",))
        thread.start()
        while cufile.read(first, ctypes.addressof(memory), 100, 0) == 100:
            pass
        # Of many files one is closed.
        cufile.call("cuFileDriverOpen")
        handle = cufile.register(fd)
        assert cufile.read(handle, ctypes.addressof(memory), 100, 0) == 100
        thread.join()
        assert cufile.read(handle, ctypes.addressof(memory), 100, 0) == 100
        assert cufile.library.cuFileUseCount() == 1
        cufile.call("cuFileDriverClose")
        assert cufile.library.cuFileUseCount() == 0
    for descriptor in (fd, *copies):
        os.close(descriptor)


def test_a_vector_of_no_bytes_needs_a_file_all_the_same(tmp_path: Path, cufile: CuFile) -> None:
    fd = cf.open_file(tmp_path / "file", 4096)
    handle = cufile.register(fd)
    nothing = cf.IOVec(None, 0)
    for function in ("cuFileReadv", "cuFileWritev"):
        vector = getattr(cufile.library, function)
        assert vector(handle, ctypes.byref(nothing), 1, 0, 0) == 0
        assert vector(handle, None, 0, 0, 0) == 0
        assert vector(None, None, 0, 0, 0) == -5022
    cufile.deregister(handle)
    for function in ("cuFileReadv", "cuFileWritev"):
        assert getattr(cufile.library, function)(handle, ctypes.byref(nothing), 1, 0, 0) == -5027
    os.close(fd)


NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
  *device = (void *)bus;
  return strcmp(bus, "FFFF:FA:01.0") == 0 ? 0 : 2;
}
int nvmlDeviceGetBAR1MemoryInfo(void *device, unsigned long long *memory) { return memory[0] = 256ull << 30, 0; }
"""
ASK = """
import ctypes, cufile_client as cf
library, kb = cf.CuFile(), ctypes.c_size_t()
print([(library.code("cuFileGetBARSizeInKB", gpu, ctypes.byref(kb)), kb.value) for gpu in range(3)])
"""


@pytest.mark.skipif(not FAKE, reason="FAKE_CUDA_LIBRARY does not name the driver without a GPU")
def test_where_the_system_does_not_list_a_gpu_nvml_says_how_large_its_window_is(tmp_path: Path) -> None:
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvml.so"
    compiler = shutil.which("cc") or shutil.which("gcc") or "c++"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "nvml.c")], check=True)
    environment = {**os.environ, "UGDS_CUDA_LIBRARY": FAKE, "UGDS_NVML_LIBRARY": str(library), "FAKE_CUDA_GPUS": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == f"{[(5030, 0), (0, 256 << 20), (5022, 256 << 20)]}\n"


@pytest.mark.skipif(not FAKE, reason="FAKE_CUDA_LIBRARY does not name the driver without a GPU")
@pytest.mark.parametrize("wide", [False, True], ids=["first of 32 bits", "first of 64 bits"])
def test_the_window_with_the_memory_is_the_second_that_is_there(tmp_path: Path, wide: bool) -> None:
    """One of 64 bits takes two places of the system's list, of which the second is empty."""
    empty = (0, 0, 0)
    registers, memory = (0x1000000, 0x1FFFFFF, 0x40200), (0x4000000000, 0x5FFFFFFFFF, 0x14220C)
    places = [
        registers,
        *([empty] if wide else []),
        memory,
        empty,
        (0x6000000000, 0x6001FFFFFF, 0x14220C),
        empty,
        empty,
    ]
    folder = tmp_path / "ffff:fa:00.0"
    folder.mkdir()
    (folder / "resource").write_text("".join("".join(f"{word:#018x} " for word in place) + "\n" for place in places))
    environment = {**os.environ, "UGDS_CUDA_LIBRARY": FAKE, "UGDS_PCI_DEVICES": str(tmp_path), "FAKE_CUDA_GPUS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == f"{[(0, 128 << 20), (5022, 128 << 20), (5022, 128 << 20)]}\n"
