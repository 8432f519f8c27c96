# SPDX-License-Identifier: Apache-2.0
"""Every step of ugds_drv's set-up fails once and everything is undone; cycles leave nothing; nonsense is refused."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from devices import Controller
from host import Host
from small_nvme import SmallNvme

import drv as api
from drv import PAGE, DrvFile, address_of, failing, node_of

Give = Callable[[str], Controller]
KIB, MIB = 1 << 10, 1 << 20
pytestmark = pytest.mark.boot("debug", "debian")
LEAKS = Path("/sys/kernel/debug/kmemleak")


def dma_buf(size: int) -> int:
    """Host memory as a DMA-BUF, which its exporter never moves: of udmabuf, or of the graphics driver vgem where the
    kernel has none of those."""
    return of_udmabuf(size) if Path("/dev/udmabuf").exists() else of_vgem(size)


def of_udmabuf(size: int) -> int:
    memory = os.memfd_create("behind a DMA-BUF", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, size)
    fcntl.fcntl(memory, 1033, 2)  # F_ADD_SEALS, F_SEAL_SHRINK
    with Path("/dev/udmabuf").open("rb") as device:

        class Create(ctypes.Structure):
            _fields_ = [
                *[("memfd", ctypes.c_uint32), ("flags", ctypes.c_uint32)],
                *[("offset", ctypes.c_uint64), ("size", ctypes.c_uint64)],
            ]

        fd = fcntl.ioctl(device, 0x40187542, bytearray(bytes(Create(memory, 1, 0, size))))
    os.close(memory)
    return int(fd)


def of_vgem(size: int) -> int:
    subprocess.run(["modprobe", "vgem"], check=True)
    card = next(path for path in Path("/sys/devices/platform/vgem/drm").glob("card*"))
    with Path("/dev/dri", card.name).open("r+b", buffering=0) as device:
        image = bytearray(struct.pack("<8I", size // 4096, 1024, 32, *[0] * 5))
        fcntl.ioctl(device, 0xC02064B2, image)  # DRM_IOCTL_MODE_CREATE_DUMB: height, width, bits a pixel
        handle = struct.unpack_from("<I", image, 16)[0]
        export = bytearray(struct.pack("<IIi", handle, os.O_RDWR | os.O_CLOEXEC, -1))
        fcntl.ioctl(device, 0xC00C642D, export)  # DRM_IOCTL_PRIME_HANDLE_TO_FD
    return int(struct.unpack_from("<i", export, 8)[0])


def traces() -> tuple[int, int, str]:
    """What a set-up may leave behind: locked memory, pins, interrupts."""
    status = Path("/proc/self/status").read_text().splitlines()
    locked = next(int(line.split()[1]) for line in status if line.startswith("VmLck:"))
    Path("/proc/sys/vm/stat_refresh").write_text("1")  # adds up what each processor counts for itself
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    pins = int(counts.get("nr_foll_pin_acquired", 0)) - int(counts.get("nr_foll_pin_released", 0))
    interrupts = [line for line in Path("/proc/interrupts").read_text().splitlines() if "ugds_drv" in line]
    return locked, pins, "\n".join(line.split()[0] for line in interrupts)


class Steps:
    """Each step of a set-up by the prefix of its fault points."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.memory = mmap.mmap(-1, 4 * MIB)

    def probe(self) -> None:
        self.controller.unbind()
        (self.controller.folder / "driver_override").write_text("ugds_drv")
        Path("/sys/bus/pci/drivers_probe").write_text(self.controller.address)
        if self.controller.driver is None:
            raise OSError(errno.EUCLEAN, "it was not taken")

    def open(self) -> None:
        DrvFile(node_of(self.controller)).close()

    def mmap(self, file: DrvFile) -> None:
        area = file.call(api.Alloc(length=PAGE))
        try:
            mmap.mmap(file.fd, PAGE, offset=area.mmap_offset).close()
        finally:
            file.unmap(area.token)

    def coherent(self, file: DrvFile) -> None:
        api.Coherent(file, 64 * KIB).free()

    def host(self, file: DrvFile) -> None:
        file.unmap(file.map_host(self.memory).token)

    def dmabuf(self, file: DrvFile) -> None:
        fd = dma_buf(MIB)
        try:
            file.unmap(file.map_dmabuf(fd, MIB).token)
        finally:
            os.close(fd)

    def irq(self, file: DrvFile) -> None:
        event = os.eventfd(0)
        try:
            file.interrupts(event, -1, event)
            file.interrupts()
        finally:
            os.close(event)

    def event(self, file: DrvFile) -> None:
        event = os.eventfd(0)
        try:
            file.tell(event)
            file.tell(-1)
        finally:
            os.close(event)

    def answer(self, file: DrvFile) -> None:
        file.unmap(file.map_host(self.memory).token)

    def reset(self, file: DrvFile) -> None:
        file.reset()

    def run(self, point: str, file: DrvFile | None) -> None:
        act = getattr(self, point.split("_")[0])
        if file is None:
            act()
        else:
            act(file)


def test_every_step_that_fails_is_undone(drv: Give) -> None:
    two = drv("two")
    steps, tried = Steps(two), []
    for point in api.points():
        if point.startswith("plant"):
            continue
        if point == "dmabuf_pin":
            continue  # by test_drv_peer.py
        kind = point.split("_")[0]
        file = None if kind in ("probe", "open") else DrvFile(node_of(two))
        try:
            steps.run(point, file)  # as it is when nothing fails
            before = traces()
            with failing(point), pytest.raises(OSError) as failed:
                steps.run(point, file)
            wanted = (errno.ENOMEM,) if point in ("open_file", "coherent_pages") else (errno.EUCLEAN,)
            assert failed.value.errno in wanted, f"{point}: {failed.value}"
            assert traces() == before, point
            steps.run(point, file)
            assert traces() == before, point
        finally:
            if file:
                file.close()
        tried.append(point)
    assert len(tried) > 20
    with DrvFile(node_of(two)) as file:
        nvme = SmallNvme(file)
        nvme.identify(file.map_host(steps.memory, 0, PAGE)[0])
        nvme.close()


def scan() -> set[str]:
    """What kmemleak finds that the module has allocated and lost. Twice: it reports what has not changed between two
    looks. Linux 7.2 itself loses the list of each mapping of vfio-pci's DMA-BUFs (dma_buf_free_sgt)."""
    for _ in range(2):
        LEAKS.write_text("scan")
        time.sleep(0.1)
    found = LEAKS.read_text().split("unreferenced object ")[1:]
    return {text for text in found if "[ugds_drv]" in text and "dma_buf_phys_vec_to_sgt" not in text}


def cycle(node: Path, memory: mmap.mmap, number: int) -> None:
    """Opening, memory of each kind, interrupts, blocks both ways, and closing: with or without giving it back first."""
    with DrvFile(node) as file:
        event = os.eventfd(0, os.EFD_NONBLOCK)
        file.interrupts(event, event)
        file.tell(event)
        nvme = SmallNvme(file, vectors=True)
        pages = file.map_host(memory)
        fd = dma_buf(64 * KIB)
        memory[: 64 * KIB] = bytes([number % 251 + 1]) * 64 * KIB
        nvme.write(0, 128, pages.addresses[:16])
        shared = file.map_dmabuf(fd, 64 * KIB)
        assert (shared.answer.placement, shared.answer.peer_bytes) == (api.HOST, 0)
        nvme.read(0, 128, shared.addresses[:])
        nvme.write(0, 128, shared.addresses[:])
        os.close(fd)
        nvme.read(0, 128, pages.addresses[16:32])
        assert memory[64 * KIB : 128 * KIB] == memory[: 64 * KIB]
        if number % 2:
            file.unmap(pages.token)
        if number % 3 == 0:
            file.reset()
        nvme.close()
        os.close(event)


@pytest.mark.limit(300)
@pytest.mark.tolerates("kmemleak")
@pytest.mark.boot("debug")
def test_a_hundred_cycles_leave_nothing_behind(drv: Give) -> None:
    node, memory = node_of(drv("two")), mmap.mmap(-1, MIB)
    cycle(node, memory, 0)
    before = traces()
    for number in range(1, 100):
        cycle(node, memory, number)
    assert traces() == before
    time.sleep(6)  # kmemleak believes nothing that is younger
    assert not scan()  # of this test, and of all before it in this boot


@pytest.mark.boot("debug")
@pytest.mark.provokes("kmemleak")
def test_a_leak_would_be_seen(drv: Give) -> None:
    with DrvFile(node_of(drv("two"))) as file:
        memory = mmap.mmap(-1, MIB)
        pages = file.map_host(memory)
        with failing("plant_leak"):
            file.unmap(pages.token)
        for _ in range(8):  # what a stale register or stack still names is overwritten
            file.unmap(file.map_host(memory).token)
    end = time.monotonic() + 30
    while not (found := scan()) and time.monotonic() < end:
        time.sleep(1)
    assert found
    LEAKS.write_text("clear")


def nonsense(random_: random.Random, kind: type[api.Request], good: list[int]) -> api.Request:
    """A structure whose fields are now plausible, now limits, now anything."""
    request = kind()
    for name in api.fields(request):
        if name == "argsz" and random_.random() < 0.9:
            continue
        if name == "flags" and random_.random() < 0.7:
            continue
        value = random_.choice(
            [0, 1, PAGE, PAGE - 1, 1 << 12, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - PAGE, (1 << 64) - 1]
            + good * 3
            + [random_.getrandbits(random_.choice([3, 12, 32, 47, 64]))]
        )
        setattr(request, name, ctypes.c_int64(value).value if name == "fd" else value)
    return request


@pytest.mark.limit(300)
def test_nonsense_is_refused_or_done_and_nothing_breaks(drv: Give, host: Host) -> None:
    seed = 20
    random_ = random.Random(seed)
    node, memory = node_of(drv("two")), mmap.mmap(-1, 64 * PAGE)
    event, libc = os.eventfd(0), ctypes.CDLL(None, use_errno=True)
    fd = dma_buf(64 * PAGE)
    array = (ctypes.c_uint64 * 64)()
    before = traces()
    done = refused = 0
    for _ in range(10):
        with DrvFile(node) as file:
            good = [address_of(memory), 4 * PAGE, ctypes.addressof(array), 3, event, fd]
            for _ in range(500):
                kind = random_.choice(api.REQUESTS)
                request = nonsense(random_, kind, good)
                try:
                    fcntl.ioctl(file.fd, 0xD600 | kind.number, request)
                    done += 1
                    if (token := getattr(request, "token", 0)) and kind is not api.Status:
                        good.append(token)
                except OSError:
                    refused += 1
                if request.argsz == ctypes.sizeof(request):
                    assert request.reason in api.REASONS
            for _ in range(100):
                number = random_.getrandbits(32)
                if number >> 8 & 0xFF != 0xD6:
                    with pytest.raises(OSError):
                        fcntl.ioctl(file.fd, number, bytearray(random_.randbytes(256)))
            for kind in api.REQUESTS:
                for pointer in (0, 1, PAGE, 1 << 62):
                    assert libc.ioctl(file.fd, 0xD600 | kind.number, ctypes.c_void_p(pointer)) == -1
                    assert ctypes.get_errno() == errno.EFAULT
    assert done > 100
    assert refused > 1000
    assert traces() == before
    cycle(node, mmap.mmap(-1, MIB), 1)
    os.close(event)


def test_it_is_built_for_the_kernel_without_a_warning() -> None:
    """The module that was loaded is that of this kernel, and asks for nothing but what it exports."""
    said = subprocess.run(["modinfo", "-F", "license", "/job/ugds_drv.ko"], capture_output=True, text=True)
    assert said.stdout.strip() == "GPL"
