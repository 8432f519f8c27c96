# SPDX-License-Identifier: Apache-2.0
"""The guest's PCI devices by their names in boots.py: where they are, which driver has them, and how to change that."""

from __future__ import annotations

import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from host import JOB, Host

PCI = Path("/sys/bus/pci")
ROOT_BUS = Path("/sys/devices/pci0000:00")
T = TypeVar("T")


def wait_for(what: str, poll: Callable[[], T | None], seconds: float = 20.0) -> T:
    """Asks until there is an answer. Fails the test where none comes in time."""
    deadline = time.monotonic() + seconds
    while True:
        if (found := poll()) is not None and found is not False:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.02)


def load(driver: str) -> None:
    """Has the kernel know a driver: one of its own modules, or ugds_drv, which the host built for it."""
    if (PCI / "drivers" / driver).exists():
        return
    ours = JOB / f"{driver}.ko"
    subprocess.run(["insmod", ours] if ours.exists() else ["modprobe", driver], check=True)


@dataclass(frozen=True)
class Namespace:
    nsid: int
    drive: str  # its name for the host
    block: int
    size: int
    broken: int | None


@dataclass(frozen=True)
class PciDevice:
    """A device behind a port of its own. `glob` finds it below the root bus: bus numbers are the firmware's."""

    name: str
    glob: str
    port: str

    @property
    def present(self) -> bool:
        found = next(ROOT_BUS.glob(self.glob), None)
        return found is not None and (PCI / "devices" / found.name).exists()

    @property
    def address(self) -> str:
        found = next(ROOT_BUS.glob(self.glob), None)
        if found is None:
            raise AssertionError(f"the device {self.name} is not on the bus ({self.glob})")
        return found.name

    @property
    def folder(self) -> Path:
        return PCI / "devices" / self.address

    @property
    def driver(self) -> str | None:
        link = self.folder / "driver"
        return link.resolve().name if link.exists() else None

    @property
    def group(self) -> str | None:
        link = self.folder / "iommu_group"
        return link.resolve().name if link.exists() else None

    def unbind(self) -> None:
        if self.driver is not None:
            (self.folder / "driver" / "unbind").write_text(self.address)
        (self.folder / "driver_override").write_text("\n")

    def bind(self, driver: str) -> None:
        """Gives the device to a driver of the kernel, whatever has it now."""
        if self.driver == driver:
            return
        self.unbind()
        load(driver)
        (self.folder / "driver_override").write_text(driver)
        (PCI / "drivers_probe").write_text(self.address)
        # A device that has just come may be probed by whoever found it, at the same time.
        wait_for(f"{driver} takes {self.name} ({self.address})", lambda: self.driver == driver, 30)

    def bus_master(self) -> bool:
        """Whether its command register lets it reach memory (PCI 3.0, 6.2.2: bit 2)."""
        return bool(int.from_bytes((self.folder / "config").read_bytes()[4:6], "little") & 4)


@dataclass(frozen=True)
class Controller(PciDevice):
    device: str  # what QEMU's monitor needs to plug it in again
    namespaces: tuple[Namespace, ...]

    @property
    def uri(self) -> str:
        return f"pci:{self.address}"

    def namespace(self, nsid: int = 1) -> Namespace:
        return self.namespaces[nsid - 1]

    def unplug(self, host: Host) -> int:
        """Asks the machine to take it out, and gives the number of the event from where its leaving is to be seen."""
        before = host.event_count()
        host.qmp("device_del", id=self.name)
        return before

    def left(self, host: Host, before: int, seconds: float = 20.0) -> bool:
        """Whether it has left the machine within that time. QEMU says so when nothing of it refers to the device any
        more, which may never be: it forgets requests whose completion could not be posted when they were cut off, and
        with them their references (hw/nvme/ctrl.c, of QEMU 7.2). So it is looked for among what is plugged in, too."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if host.wait_event("DEVICE_DELETED", before, 0.5, device=self.name) is not None:
                return True
            there = {each["name"] for each in host.qmp("qom-list", path="/machine/peripheral")}
            if self.name not in there and not self.present:
                return True
        return False

    def plug(self, host: Host) -> None:
        """Puts it back, and waits until the kernel has found it."""
        said = host.hmp(f"device_add {self.device}")
        assert not said.strip(), said
        wait_for(f"{self.name} is on the bus", lambda: self.present)


def controllers(machine: dict[str, Any]) -> dict[str, Controller]:
    return {
        name: Controller(
            name, told["glob"], told["port"], told["device"], tuple(Namespace(**each) for each in told["namespaces"])
        )
        for name, told in machine["controllers"].items()
    }


@contextmanager
def kernel_disks(controller: Controller) -> Iterator[list[Path]]:
    """The block devices that the kernel's own NVMe driver makes of a controller, by namespace; unbound at the end."""
    controller.bind("nvme")
    try:
        yield [disk_of(controller, namespace.nsid) for namespace in controller.namespaces]
    finally:
        controller.unbind()


def disk_of(controller: Controller, nsid: int = 1) -> Path:
    """The block device of a namespace, once the kernel's driver has made it."""

    def look() -> Path | None:
        for disk in Path("/sys/block").glob("nvme*n*"):
            nsid_file = disk / "nsid"
            inside = controller.address in str(disk.resolve())
            if inside and nsid_file.exists() and int(nsid_file.read_text()) == nsid:
                node = Path("/dev", disk.name)
                return node if node.exists() else None
        return None

    return wait_for(f"the disk of {controller.name}, namespace {nsid}", look)


def read_direct(disk: Path, offset: int, size: int) -> bytes:
    """Bytes of a block device, past the page cache."""
    fd = os.open(disk, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, size) as memory:
            assert os.preadv(fd, [memory], offset) == size
            return bytes(memory)
    finally:
        os.close(fd)


def write_direct(disk: Path, offset: int, data: bytes) -> None:
    fd = os.open(disk, os.O_WRONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, len(data)) as memory:
            memory[:] = data
            assert os.pwritev(fd, [memory], offset) == len(data)
    finally:
        os.close(fd)
