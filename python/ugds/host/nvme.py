# SPDX-License-Identifier: Apache-2.0
"""What the kernel's nvme driver made of a controller: its name, its namespaces, and the block devices of those.

With native multipath a namespace has two kinds of block device: a hidden one for each path (nvme0c1n2: subsystem 0,
controller 1, namespace 2), and the head (nvme0n2), which lies in the subsystem's folder and is the one that is used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from ugds.host import pci
from ugds.host.roots import Reader, Roots, entries, read_or

_CONTROLLER = re.compile(r"nvme\d+")
_DISK = re.compile(r"nvme(\d+)(?:c(\d+))?n(\d+)")
SECTOR = 512  #: what `size` and `start` of sysfs count in, whatever the block size


@dataclass(frozen=True)
class Disk:
    """A namespace's block device, or a partition of it, as sysfs has it."""

    name: str
    path: Path
    number: str  #: "major:minor"
    size: int  #: bytes
    partitions: tuple[Disk, ...] = ()


@dataclass(frozen=True)
class Attached:
    """A namespace of a controller that the nvme driver holds."""

    nsid: int | None
    disk: Disk
    block_size: int | None
    path_name: str  #: the hidden device of this path where there is one, else the disk's name
    others: tuple[str, ...]  #: other controllers that reach the same namespace: "nvme1 (0000:66:00.0)"


@dataclass(frozen=True)
class Kernel:
    """A controller that the nvme driver holds."""

    name: str  #: nvme0
    path: Path
    state: str  #: "live" when it works
    model: str | None
    serial: str | None
    firmware: str | None
    namespaces: tuple[Attached, ...]
    without_disk: tuple[str, ...] = field(default=())  #: namespaces with a character device alone


def controller_folder(device: Path) -> Path | None:
    for path in entries(device / "nvme"):
        if _CONTROLLER.fullmatch(path.name):
            return path
    return None


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def disk_at(path: Path) -> Disk:
    partitions = tuple(
        disk_at(child) for child in entries(path) if child.name.startswith(path.name) and (child / "partition").exists()
    )
    size = (_whole(read_or(path / "size", "")) or 0) * SECTOR
    return Disk(path.name, path, read_or(path / "dev", ""), size, partitions)


def _subsystem(roots: Roots, controller: Path) -> Path | None:
    """The folder of the subsystem that lists this controller."""
    for path in entries(roots.sys / "class/nvme-subsystem"):
        if (path / controller.name).exists():
            return path
    return None


def _head(roots: Roots, path: Path, subsystem: Path | None) -> Path:
    """The disk that is used: the head of a multipath namespace, else the namespace's own."""
    match = _DISK.fullmatch(path.name)
    if match is None or match[2] is None:
        return path
    name = f"nvme{match[1]}n{match[3]}"
    for folder in ((subsystem,) if subsystem else ()) + (roots.sys / "block",):
        if (folder / name).exists():
            return folder / name
    return path


def _disks(controller: Path) -> list[Path]:
    return [path for path in entries(controller) if _DISK.fullmatch(path.name)]


def _identity(path: Path) -> tuple[str, str]:
    return read_or(path / "nsid", ""), read_or(path / "wwid", "")


def _others(controller: Path, path: Path, subsystem: Path | None) -> tuple[str, ...]:
    """Controllers of the same subsystem that reach the same namespace, with or without native multipath."""
    found = []
    for other in entries(subsystem) if subsystem else []:
        if not _CONTROLLER.fullmatch(other.name) or other.name == controller.name:
            continue
        if any(_identity(disk) == _identity(path) for disk in _disks(other)):
            address = read_or(other / "address", "")
            found.append(f"{other.name} ({address})" if address else other.name)
    return tuple(found)


def kernel_view(roots: Roots, device: Path, reader: Reader) -> Kernel | None:
    """What the nvme driver shows of a PCI device; None where it shows nothing."""
    folder = controller_folder(device)
    if folder is None:
        return None
    subsystem = _subsystem(roots, folder)
    found = []
    for path in _disks(folder):
        disk = disk_at(_head(roots, path, subsystem))
        block = _whole(read_or(disk.path / "queue/logical_block_size", ""))
        nsid = _whole(read_or(path / "nsid", read_or(disk.path / "nsid", "")))
        found.append(Attached(nsid, disk, block, path.name, _others(folder, path, subsystem)))
    numbers = {match[3] for path in _disks(folder) if (match := _DISK.fullmatch(path.name))}
    generic = [path.name for path in entries(folder) if re.fullmatch(r"ng\d+n\d+", path.name)]
    return Kernel(
        folder.name,
        folder,
        read_or(folder / "state", "unknown"),
        reader.text("model", folder / "model"),
        reader.text("serial", folder / "serial"),
        reader.text("firmware", folder / "firmware_rev"),
        tuple(found),
        tuple(name for name in generic if name.rpartition("n")[2] not in numbers),
    )


def nodes_below(roots: Roots, device: Path) -> dict[str, str]:
    """Every device node that belongs to a PCI device, by its name below /dev, with its "major:minor": whoever has one
    open uses the device. They are found as sysfs lists them, whichever driver made them."""
    found: dict[str, str] = {}

    def search(folder: Path, depth: int) -> None:
        for path in entries(folder):
            if path.is_symlink() or not path.is_dir() or pci._IN_PATH.fullmatch(path.name):
                continue
            number = read_or(path / "dev", "")
            if number:
                found[_node_name(path)] = number
            if depth > 0:
                search(path, depth - 1)

    search(device, 4)
    kernel = kernel_view(roots, device, Reader())
    for namespace in kernel.namespaces if kernel else ():
        for disk in (namespace.disk, *namespace.disk.partitions):
            found[disk.name] = disk.number
        generic = namespace.disk.path.parent / namespace.disk.name.replace("nvme", "ng")
        if (generic / "dev").exists():
            found[generic.name] = read_or(generic / "dev", "")
    group = pci.iommu_group(device)
    if group is not None and pci.is_vfio(pci.driver_of(device)):
        name = f"noiommu-{group}" if pci.is_noiommu(roots, group) else group
        found[f"vfio/{name}"] = read_or(roots.sys / "class/vfio" / name / "dev", "")
    return found


def _node_name(path: Path) -> str:
    """The node's name below /dev: the kernel says it in `uevent`."""
    match = re.search(r"^DEVNAME=(.+)$", read_or(path / "uevent", ""), re.MULTILINE)
    if match:
        return match[1].strip().replace("!", "/")
    return f"vfio/devices/{path.name}" if path.parent.name == "vfio-dev" else path.name
