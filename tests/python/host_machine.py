# SPDX-License-Identifier: Apache-2.0
"""A made-up machine: a tree as sysfs, /proc and /dev have it, and of the kernel only what answers writes to sysfs."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from ugds.host import Roots

SSD, SSD2, GPU, FAR_GPU = "0000:65:00.0", "0000:66:00.0", "0000:67:00.0", "0000:c1:00.0"
SERIAL = "S6Z1NJ0W123456"


def put(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode() + b"\n")
    return path


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


class Machine(Roots):
    """The tree, and a kernel that moves the driver link. `refusing` drivers take no device; `broken` files fail."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / "sys", root / "proc", root / "dev", root / "modules")
        self.pci = self.sys / "bus/pci"
        self.refusing: set[str] = set()
        self.loadable = {"vfio-pci", "nvme"}
        self.broken: dict[str, int] = {}
        self.writes: list[tuple[str, str]] = []
        self.busy: set[str] = set()
        self.attached: dict[str, list[Path]] = {}
        for path in (self.pci / "devices", self.sys / "block", self.dev / "vfio"):
            path.mkdir(parents=True)
        put(self.pci / "drivers_probe", "")
        put(self.proc / "self/mountinfo", "22 1 0:21 / /proc rw - proc proc rw")
        put(self.proc / "self/status", "Name:\tpython3\nCapEff:\t000001ffffffffff")
        put(self.proc / "swaps", "Filename\tType\tSize\tUsed\tPriority")
        put(self.modules / os.uname().release / "modules.dep", "kernel/drivers/vfio/pci/vfio-pci.ko.xz: a.ko\n")
        for name in ("nvme", "pcieport"):
            self.driver(name)

    # --- building ---

    def driver(self, name: str) -> Path:
        folder = self.pci / "drivers" / name
        put(folder / "unbind", "")
        return folder

    def device(self, *chain: str, kind: int, vendor: int = 0x144D, node: int = 0, group: int | None = None) -> Path:
        """A function below root bus and bridges: device("pci0000:64", "0000:64:00.0", "0000:65:00.0", kind=…)."""
        path = self.sys.joinpath("devices", *chain)
        facts = {"class": f"{kind:#08x}", "vendor": f"{vendor:#06x}", "device": "0xa80a", "numa_node": str(node)}
        facts |= {"driver_override": "(null)", "current_link_speed": "16.0 GT/s PCIe", "current_link_width": "4"}
        facts |= {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "4"}
        for name, value in facts.items():
            put(path / name, value)
        address = chain[-1]
        link(self.pci / "devices" / address, path)
        for index in range(2, len(chain)):
            above = self.sys.joinpath("devices", *chain[:index])
            if not (above / "class").exists():
                self.device(*chain[:index], kind=0x060400, node=node)
                self.take(chain[index - 1], "pcieport")
        if group is not None:
            self.group(address, group)
        return path

    def group(self, address: str, number: int) -> None:
        folder = self.sys / "kernel/iommu_groups" / str(number)
        put(folder / "type", "DMA-FQ")
        put(folder / "reserved_regions", "")
        link(folder / "devices" / address, self.pci / "devices" / address)
        link(self.pci / "devices" / address / "iommu_group", folder)

    def take(self, address: str, driver: str) -> None:
        """A driver holds a device, with what it makes of it."""
        path = (self.pci / "devices" / address).resolve()
        link(path / "driver", self.driver(driver))
        if driver == "vfio-pci":
            put(path / "vfio-dev/vfio0/power/control", "auto")
            group = (path / "iommu_group").resolve().name
            put(self.dev / "vfio" / group, "")
            put(self.dev / "vfio/vfio", "")
        if driver == "ugds_drv":
            put(path / "ugds_drv/ugds_drv0/dev", "511:0")
            put(self.dev / "ugds_drv0", "")
        if driver == "nvme" and address in self.attached:
            self.attached.pop(address)[0].rename(path / "nvme")

    def ssd(self, address: str = SSD, name: str = "nvme0", group: int | None = 12, root: str = "pci0000:64") -> Path:
        port = f"{root.removeprefix('pci')}:0{int(address[6], 16) % 8}.0"
        path = self.device(root, port, address, kind=0x010802, group=group)
        folder = path / "nvme" / name
        facts = {"model": "Samsung SSD 990 PRO 2TB                 ", "serial": f"{SERIAL}      "}
        facts |= {"firmware_rev": "4B2QJXD7", "state": "live", "address": address, "dev": f"240:{name[4:]}"}
        for fact, value in facts.items():
            put(folder / fact, value)
        self.take(address, "nvme")
        return folder

    def disk(self, folder: Path, name: str, image: bytes = bytes(1 << 20), minor: int = 0, block: int = 512) -> Path:
        """A namespace's block device below a controller, with its node."""
        path = folder / name
        facts = {"size": str(len(image) // 512), "nsid": name.rpartition("n")[2], "dev": f"259:{minor}", "hidden": "0"}
        for fact, value in (
            facts | {"wwid": f"eui.{name.rpartition('n')[2]}", "queue/logical_block_size": str(block)}
        ).items():
            put(path / fact, value)
        (path / "holders").mkdir()
        (path / "slaves").mkdir()
        put(self.dev / name, image)
        link(self.sys / "block" / name, path)
        return path

    def partition(self, disk: Path, number: int, image: bytes = bytes(1 << 20), minor: int = 1) -> Path:
        name = f"{disk.name}p{number}"
        path = disk / name
        facts = {"size": str(len(image) // 512), "partition": str(number), "start": "2048", "dev": f"259:{minor}"}
        for fact, value in facts.items():
            put(path / fact, value)
        (path / "holders").mkdir()
        put(self.dev / name, image)
        return path

    def process(self, pid: int, command: str, *opened: str, mounts: str = "") -> Path:
        folder = self.proc / str(pid)
        put(folder / "comm", command)
        (folder / "fd").mkdir()
        (folder / "ns").mkdir()
        (folder / "ns/mnt").symlink_to(f"mnt:[{4026531840 + pid}]")
        put(folder / "mountinfo", mounts)
        for fd, target in enumerate(opened):
            (folder / "fd" / str(fd)).symlink_to(target)
        return folder

    def mounted(self, source: str, point: str, number: str = "0:99", table: str = "self") -> None:
        path = self.proc / table / "mountinfo"
        put(path, path.read_text().rstrip() + f"\n36 35 {number} / {point} rw,noatime shared:1 - ext4 {source} rw")

    def holder(self) -> str | None:
        path = self.pci / "devices" / SSD / "driver"
        return path.resolve().name if path.is_symlink() else None

    # --- the kernel's answers ---

    def open(self, path: Path, *, exclusive: bool) -> int:
        if exclusive and path.name in self.busy:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return super().open(path, exclusive=exclusive)

    def is_node_of(self, fd: int, number: str) -> bool:
        return True  # nodes are files here

    def modprobe(self, module: str) -> None:
        if module not in self.loadable:
            raise OSError(1, f"modprobe: FATAL: Module {module} not found")
        self.driver(module)

    def write(self, path: Path, value: str) -> None:
        told = str(path).removeprefix(str(self.sys))
        self.writes.append((told, value))
        if path.name in self.broken:
            raise OSError(self.broken[path.name], os.strerror(self.broken[path.name]), str(path))
        super().write(path, value)
        if path.name == "driver_override":
            put(path, value.strip() or "(null)")
        elif path.name == "unbind":
            self._unbind(value, path.parent.name)
        elif path.name == "drivers_probe":
            self._probe(value)

    def _unbind(self, address: str, driver: str) -> None:
        path = (self.pci / "devices" / address).resolve()
        if not (path / "driver").is_symlink() or (path / "driver").resolve().name != driver:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        (path / "driver").unlink()
        shutil.rmtree(path / "vfio-dev", ignore_errors=True)
        shutil.rmtree(path / "ugds_drv", ignore_errors=True)
        if driver == "nvme" and (path / "nvme").exists():
            kept = self.sys / "kept" / address
            kept.parent.mkdir(exist_ok=True)
            (path / "nvme").rename(kept)
            self.attached[address] = [kept]

    def _probe(self, address: str) -> None:
        path = (self.pci / "devices" / address).resolve()
        if (path / "driver").is_symlink():
            return
        wanted = (path / "driver_override").read_text().strip()
        driver = "nvme" if wanted == "(null)" else wanted
        there = (self.pci / "drivers" / driver).is_dir()
        if there and driver not in self.refusing:
            self.take(address, driver)
