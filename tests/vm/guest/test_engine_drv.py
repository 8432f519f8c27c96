# SPDX-License-Identifier: Apache-2.0
"""What only the transport over ugds_drv has: its node as a path and as a descriptor, what programs written for the C
interface do with it, users and their limits, memory that its exporter takes back, and processes that are killed."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import support
import ugds
from devices import Controller, PciDevice, wait_for
from host import Host
from support import KIB, MIB, noise, write_and_read
from test_drv_setup import dma_buf
from vfio_function import VfioFunction

from drv import node_of

UriOf = Callable[..., str]
Open = Callable[..., ugds.Device]
Slow = Callable[[str, int], None]
BAR, PEER_SIZE = 2, 64 * MIB
pytestmark = [pytest.mark.boot("iommufd", "debian"), pytest.mark.transport("ugds_drv")]
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@pytest.fixture
def node(uri_of: UriOf, controllers: dict[str, Controller]) -> Iterator[Path]:
    """The node of the controller `two`, which ugds_drv holds."""
    uri_of("two", "ugds_drv")
    yield node_of(controllers["two"])


# --- Names -----------------------------------------------------------------------------------------------------------


def test_the_node_s_path_and_a_descriptor_of_it_open_the_controller(node: Path, host: Host) -> None:
    data = noise(64 * KIB, 1)
    host.write_image("two1", MIB, data)
    fd = os.open(node, os.O_RDWR)
    with pytest.raises(ugds.Error) as busy:
        ugds.open(str(node))
    assert busy.value.errno == errno.EBUSY
    assert str(node) in busy.value.cause
    for _ in range(2):  # what was set up on an open file is undone without closing it
        with ugds.open(f"{node}?fd={fd}") as ssd, ugds.empty(64 * KIB) as buffer:
            assert (ssd.info.transport, ssd.state) == ("ugds_drv", "ready")
            with pytest.raises(ugds.Error) as twice:
                ugds.open(f"{node}?fd={fd}")
            assert twice.value.errno == errno.EBUSY
            ssd.read(buffer, MIB)
            assert bytes(memoryview(buffer)) == data
    os.close(fd)
    with ugds.open(f"{node}?ns=2&interrupts=1") as ssd:
        assert (ssd.block_size, ssd.info.completion) == (4096, "interrupt")


@pytest.mark.parametrize("way", ["type1", "iommufd", "none"])
def test_a_way_of_vfio_s_is_refused_with_the_driver_that_has_it(node: Path, uri_of: UriOf, way: str) -> None:
    with pytest.raises(ugds.Error) as refused:
        ugds.open(f"{uri_of('two', 'ugds_drv')}?iommu={way}")
    assert refused.value.errno == errno.EINVAL
    assert "ugds bind" in refused.value.hint


def test_a_controller_without_a_driver_names_both(controllers: dict[str, Controller]) -> None:
    controllers["two"].unbind()
    with pytest.raises(ugds.Error) as refused:
        ugds.open(controllers["two"].uri)
    assert "vfio-pci" in refused.value.hint
    assert "--driver ugds_drv" in refused.value.hint


# --- The C interface -------------------------------------------------------------------------------------------------


class Result(ctypes.Structure):
    _fields_ = [("err", ctypes.c_int), ("cu_err", ctypes.c_int)]


class Handle(ctypes.Union):
    _fields_ = [("fd", ctypes.c_int), ("handle", ctypes.c_void_p)]


class Descriptor(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handle", Handle)]


@contextmanager
def c_library() -> Iterator[Any]:
    """The library as a C program loads it."""
    lib = ctypes.CDLL(str(Path(ugds.__file__).with_name("libugds.so")))
    for name in ("DriverOpen", "DriverClose", "HandleRegister", "GetDeviceCapacity", "BufRegister", "BufDeregister"):
        getattr(lib, f"uGDS{name}").restype = Result
    lib.uGDSHandleDeregister.argtypes = [ctypes.c_void_p]
    lib.uGDSHandleDeregister.restype = None
    for name in ("uGDSRead", "uGDSWrite"):
        getattr(lib, name).restype = ctypes.c_ssize_t
        getattr(lib, name).argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int64,
            ctypes.c_int64,
        ]
    assert lib.uGDSDriverOpen().err == 0
    try:
        yield lib
    finally:
        assert lib.uGDSDriverClose().err == 0


def why(lib: Any) -> str:
    text = ctypes.create_string_buffer(1024)
    lib.uGDSGetLastError(text, ctypes.c_size_t(1024))
    return text.value.decode()


def test_a_slab_on_the_raw_device_as_released_programs_open_it(node: Path, host: Host) -> None:
    """A character device whose sysfs subsystem is `ugds_drv`, opened by the program, registered by its descriptor, and
    as large as it says; let go of and registered again; its descriptor closed last."""
    status = os.stat(node)
    assert stat.S_ISCHR(status.st_mode)
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    assert Path(f"/sys/dev/char/{number}/subsystem").resolve().name == "ugds_drv"
    fd = os.open(node, os.O_RDWR)
    with c_library() as lib:
        for turn in range(2):
            handle, capacity = ctypes.c_void_p(), ctypes.c_uint64()
            result = lib.uGDSHandleRegister(ctypes.byref(handle), ctypes.byref(Descriptor(1, Handle(fd=fd))))
            assert result.err == 0, why(lib)
            assert lib.uGDSGetDeviceCapacity(handle, ctypes.byref(capacity)).err == 0
            assert capacity.value == 256 * MIB
            memory, data = mmap.mmap(-1, 16 * MIB), noise(MIB, turn)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            assert lib.uGDSBufRegister(ctypes.c_void_p(address), ctypes.c_size_t(16 * MIB), 0).err == 0, why(lib)
            memory[4096 : 4096 + MIB] = data
            assert lib.uGDSWrite(handle, address, MIB, 8 * MIB, 4096) == MIB, why(lib)
            assert host.read_image("two1", 8 * MIB, MIB) == data
            assert lib.uGDSRead(handle, address, MIB, 8 * MIB, 8 * MIB) == MIB, why(lib)
            assert memory[8 * MIB : 9 * MIB] == data
            assert lib.uGDSBufDeregister(ctypes.c_void_p(address)).err == 0
            lib.uGDSHandleDeregister(handle)
    os.close(fd)


def test_the_c_interface_takes_a_path_and_refuses_descriptors_of_other_kinds(node: Path) -> None:
    with c_library() as lib:
        handle, path = ctypes.c_void_p(), ctypes.create_string_buffer(str(node).encode())
        by_path = Descriptor(3, Handle(handle=ctypes.addressof(path)))
        assert lib.uGDSHandleRegister(ctypes.byref(handle), ctypes.byref(by_path)).err == 0, why(lib)
        lib.uGDSHandleDeregister(handle)
        other = os.open("/dev/null", os.O_RDWR)
        result = lib.uGDSHandleRegister(ctypes.byref(handle), ctypes.byref(Descriptor(1, Handle(fd=other))))
        os.close(other)
        assert result.err != 0
        assert "ugds_drv" in why(lib)


# --- Users and limits ------------------------------------------------------------------------------------------------

OPEN = """
import sys, ugds
try:
    with ugds.open(sys.argv[1], queues=1) as ssd, ugds.empty(65536) as buffer:
        print("read", ssd.read(buffer))
except ugds.Error as error:
    print(error.errno, error, "|", error.hint)
"""


def test_a_user_opens_the_node_that_is_his(node: Path, controllers: dict[str, Controller]) -> None:
    os.chmod(node, 0o600)
    status, said = support.run_child(OPEN, controllers["two"].uri, prefix=NOBODY)
    assert (status, said.split()[0]) == (0, str(errno.EACCES)), said
    assert str(node) in said
    assert "udev" in said
    os.chown(node, 65534, 65534)
    status, said = support.run_child(OPEN, controllers["two"].uri, prefix=("prlimit", f"--memlock={8 * MIB}", *NOBODY))
    os.chown(node, 0, 0)
    assert (status, said) == (0, "read 65536\n")


@pytest.mark.boot("noiommu")
def test_without_iommu_the_node_is_root_s_and_that_is_warned_of(node: Path, controllers: dict[str, Controller]) -> None:
    os.chown(node, 65534, 65534)
    status, said = support.run_child(OPEN, controllers["two"].uri, prefix=NOBODY)
    os.chown(node, 0, 0)
    assert (status, said.split()[0]) == (0, str(errno.EPERM)), said
    assert "CAP_SYS_RAWIO" in said
    status, said = support.run_child(OPEN, controllers["two"].uri)
    assert status == 0
    assert "without an IOMMU" in said
    assert "read 65536" in said


def test_buffers_that_share_a_page_are_mapped_and_unmapped_by_themselves(open_ssd: Open, host: Host) -> None:
    size, cut = 64 * KIB, 24 * KIB + 512
    data = noise(size, 3)
    host.write_image("two1", 0, data)
    memory = mmap.mmap(-1, size)
    view = memoryview(memory)
    with open_ssd("two", "ugds_drv") as ssd:
        first, second = ugds.register(view[:cut]), ugds.register(view[cut:])
        ssd.read(first, 0, cut)
        ssd.read(second, cut, size - cut)
        assert memory[:] == data
        first.close()
        memory[:] = bytes(size)
        ssd.read(second, cut, size - cut)
        assert memory[:] == bytes(cut) + data[cut:]
        second.close()
        again = ugds.register(view)
        ssd.read(again)
        assert memory[:] == data
        again.close()
    view.release()


# --- Memory that its exporter takes back -----------------------------------------------------------------------------


@contextmanager
def exported(peer: PciDevice, *ranges: tuple[int, int]) -> Iterator[tuple[VfioFunction, int]]:
    """The peer's BAR, or ranges of it, as a DMA-BUF."""
    peer.bind("vfio-pci")
    with VfioFunction(peer, by_iommufd=True) as function:
        fd = function.dma_buf(BAR, *(ranges or ((0, PEER_SIZE),)))
        try:
            yield function, fd
        finally:
            os.close(fd)


@pytest.mark.boot("iommufd")
def test_what_no_way_leads_to_is_refused_with_the_reason(open_ssd: Open, peer: PciDevice) -> None:
    with exported(peer) as (_, fd), open_ssd("coarse", "ugds_drv") as ssd:
        with pytest.raises(ugds.Error) as refused:
            ugds.register_dmabuf(fd, PEER_SIZE, devices=[ssd])
        assert refused.value.errno == errno.EOPNOTSUPP
        assert "ugds devices" in refused.value.hint
        write_and_read(ssd, 0, 64 * KIB, seed=4)


@pytest.mark.boot("debug")
@pytest.mark.parametrize("interrupts", [False, True])
def test_after_a_revocation_every_request_is_told_and_the_device_goes_on(
    open_ssd: Open, host: Host, peer: PciDevice, slow: Slow, interrupts: bool
) -> None:
    outcomes: list[int] = []
    over = threading.Event()
    data = noise(4 * MIB, 5)
    host.write_image("two1", 0, data)
    with (
        exported(peer) as (function, fd),
        open_ssd("two", "ugds_drv", queues=3, interrupts=interrupts) as ssd,
        ugds.empty(4 * MIB) as mine,
    ):
        taken = ugds.register_dmabuf(fd, PEER_SIZE)
        ssd.read(taken, 0, MIB)
        slow("two1", 512 * KIB)

        def work(number: int) -> None:
            buffer = mine if number == 0 else taken
            try:
                while number != 0 or not over.is_set():
                    assert ssd.read(buffer, number * MIB, MIB, number * MIB) == MIB
            except ugds.Error as error:
                outcomes.append(error.errno)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        wait_for("commands are in flight", lambda: ssd.stats().in_flight >= 3)
        time.sleep(0.5)  # of every thread
        function.reset()
        host.write_peer(0, b"\xdd" * 4 * MIB)
        over.set()
        slow("two1", 0)
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert set(outcomes) <= {errno.ECANCELED, errno.ESTALE}
        assert len(outcomes) >= 2  # what was moved before the controller had stopped is done
        with pytest.raises(ugds.Error) as stale:
            ssd.read(taken, 0, 4096)
        assert stale.value.errno == errno.ESTALE
        assert "taken back by its exporter" in stale.value.cause
        assert host.read_peer(0, 4 * MIB) == b"\xdd" * 4 * MIB
        assert ssd.state == "ready"
        assert ssd.read(mine) == 4 * MIB
        assert bytes(memoryview(mine)) == data
        taken.close()


GPU = """
import ctypes, json, os, sys
library = os.environ["UGDS_CUDA_LIBRARY"] = sys.argv[2]
import ugds
from ugds.bench import cuda
uri, peer, host = sys.argv[1], int(sys.argv[3]), int(sys.argv[4])
gpu, fake = cuda.gpu(0), ctypes.CDLL(library)
def export(fd): assert fake.fake_cuda_set(b"dmabuf_descriptor", ctypes.c_double(fd)) == 0
def told(**facts): print(json.dumps(facts), flush=True)
with ugds.open(uri) as ssd:
    export(peer)
    a = gpu.memory(1 << 20)
    with ugds.register(a, require="direct") as buffer:
        told(memory=buffer.memory, route=buffer.route, read=ssd.read(buffer, 4 << 20))
        sys.stdin.readline()
        told(written=ssd.write(buffer, 16 << 20))
    export(host)
    b = gpu.memory(1 << 20)
    try:
        ugds.register(b, require="direct")
    except ugds.Error as error:
        refused = [error.errno, str(error)]
    with ugds.register(b) as buffer:
        read = ssd.read(buffer, 4 << 20)
        first = ctypes.create_string_buffer(64)
        assert fake.fake_cuda_peek(first, ctypes.c_uint64(b.address), ctypes.c_size_t(64)) == 0
        told(route=buffer.route, why=buffer.why, refused=refused, read=read, first=first.raw.hex())
"""
#: The fake driver, where it is not named where the harness itself has built it.
FAKE = os.environ.get("FAKE_CUDA_LIBRARY") or str(
    Path(__file__).resolve().parents[3] / "build" / "test-release" / "tests" / "libfake_cuda.so"
)


@pytest.mark.boot("debug")
def test_gpu_memory_is_direct_only_where_its_export_is_a_peer_s(uri_of: UriOf, host: Host, peer: PciDevice) -> None:
    """A CUDA driver without a GPU exports what it is told to: the peer device's memory, and then the host's."""
    data, back = noise(MIB, 6), noise(MIB, 7)
    host.write_image("two1", 4 * MIB, data)
    host.write_peer(0, b"\xdd" * (MIB + 4096))
    uri, moved = uri_of("two", "ugds_drv"), dma_buf(MIB)
    with exported(peer, (0, MIB)) as (_, fd):
        command = [sys.executable, "-c", GPU, uri, FAKE, str(fd), str(moved)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=(fd, moved)) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            assert json.loads(child.stdout.readline()) == {"memory": "cuda", "route": "direct", "read": MIB}
            assert host.read_peer(0, MIB + 4096) == data + b"\xdd" * 4096
            host.write_peer(0, back)
            child.stdin.write("\n")
            child.stdin.flush()
            assert json.loads(child.stdout.readline()) == {"written": MIB}
            assert host.read_image("two1", 16 * MIB, MIB) == back
            told = json.loads(child.stdout.readline())
    os.close(moved)
    assert (told["route"], told["read"], told["first"]) == ("staged", MIB, data[:64].hex())
    assert "memory of a peer device" in told["why"]
    assert told["refused"][0] == errno.EOPNOTSUPP
    assert "0 B of 1 MiB" in told["refused"][1]


# --- Processes that are killed ---------------------------------------------------------------------------------------


def read_on(uri: str, ready: int) -> None:
    """Reads into its memory until it is killed. In a child of a fork."""
    os.setpgid(0, 0)
    with ugds.open(uri, queues=2) as ssd, ugds.empty(2 * MIB) as buffer:
        os.write(ready, b"r")
        while True:
            ssd.read(buffer)


def killed_reader(uri: str, after: float) -> None:
    """A process that was killed while the controller had commands of its."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            read_on(uri, told)
        finally:
            os._exit(1)
    os.close(told)
    assert os.read(ready, 1) == b"r"
    os.close(ready)
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)


@pytest.mark.limit(240)
@pytest.mark.boot("noiommu")
def test_after_a_hundred_kills_no_page_was_written_that_had_been_given_away(
    uri_of: UriOf, controllers: dict[str, Controller], host: Host, slow: Slow
) -> None:
    """Nothing but the order in which the module lets go keeps the controller from pages of others here: there is no
    IOMMU. The drive is slow, so that it always holds commands of the killed process."""
    uri = uri_of("two", "ugds_drv")
    host.write_image("two1", 0, b"\x66" * 2 * MIB)
    slow("two1", 8 * MIB)
    clean = b"\xa5" * 8 * MIB
    mastered = []
    for turn in range(100):
        killed_reader(uri, 0.003 * (turn % 10))
        pool = mmap.mmap(-1, len(clean))  # the first pages that were free
        pool[:] = clean
        time.sleep(0.03)
        assert pool[:] == clean, f"in turn {turn}"
        mastered.append(controllers["two"].bus_master())
        pool.close()
    assert not any(mastered)
    slow("two1", 0)
    with ugds.open(uri) as ssd:
        write_and_read(ssd, 0, MIB, seed=8)
