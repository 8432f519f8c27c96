# SPDX-License-Identifier: Apache-2.0
"""What uses a disk, and what is on it."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ugds.host import processes, signatures
from ugds.host._errors import why
from ugds.host.nvme import Disk
from ugds.host.processes import Mount
from ugds.host.roots import Roots, entries, read_or


@dataclass(frozen=True)
class Use:
    """What uses one disk or partition now."""

    mounts: tuple[Mount, ...]
    swap: bool
    holders: tuple[str, ...]  #: "RAID array md0", "LVM volume data-kv", …

    def __bool__(self) -> bool:
        return bool(self.mounts or self.swap or self.holders)

    def __str__(self) -> str:
        said = [f"mounted at {mount}" for mount in self.mounts]
        said += ["used as swap"] if self.swap else []
        return ", ".join([*said, *(f"part of {holder}" for holder in self.holders)])


@dataclass(frozen=True)
class Contents:
    """What is on a disk or partition; with `problem`, why that cannot be told."""

    found: tuple[str, ...] = ()
    problem: str = ""


class Usage:
    """One look at the machine: its tables are read once, when first asked for."""

    def __init__(self, roots: Roots) -> None:
        self.roots = roots

    @cached_property
    def mounts(self) -> list[Mount]:
        return processes.mounts(self.roots)

    @cached_property
    def swaps(self) -> list[str]:
        return processes.swaps(self.roots)

    @cached_property
    def backing(self) -> list[tuple[str, str]]:
        """Devices that the kernel itself opened for something else: what it is, and its path."""
        loops = [(path.parent.parent.name, path) for path in self.roots.sys.glob("block/loop*/loop/backing_file")]
        found = [(f"loop device {name}", read_or(path, "")) for name, path in loops]
        for path in self.roots.sys.glob("kernel/config/nvmet/subsystems/*/namespaces/*/device_path"):
            if read_or(path.parent / "enable", "0") == "1":
                name = path.parent.parent.parent.name
                found.append((f"the NVMe target {name}", read_or(path, "")))
        return found

    @cached_property
    def stacked(self) -> dict[str, list[Path]]:
        """Block devices by what they are made of."""
        found: dict[str, list[Path]] = {}
        for path in entries(self.roots.sys / "block"):
            for slave in entries(path / "slaves"):
                found.setdefault(slave.name, []).append(path)
        return found

    def _is(self, path: str, disk: Disk) -> bool:
        """True if a path that the kernel names is this disk's, by whatever name."""
        if os.path.basename(path) == disk.name:
            return True
        try:
            inside = self.roots.dev / os.path.relpath(path, "/dev") if path.startswith("/dev/") else Path(path)
            return inside.resolve().name == disk.name
        except (OSError, RuntimeError):
            return False

    def of(self, disk: Disk) -> Use:
        mounted = [m for m in self.mounts if m.number == disk.number or self._is(m.source, disk)]
        swap = any(self._is(path, disk) for path in self.swaps)
        above = {path.name: path for path in [*entries(disk.path / "holders"), *self.stacked.get(disk.name, [])]}
        holders = [_holder(path) for path in above.values()]
        holders += [what for what, path in self.backing if path and self._is(path, disk)]
        return Use(tuple(mounted), swap, tuple(holders))


def _holder(path: Path) -> str:
    name = path.name
    if re.fullmatch(r"md[0-9_].*", name):
        return f"RAID array {name}"
    if name.startswith("dm-"):
        called = read_or(path / "dm/name", name)
        kind = read_or(path / "dm/uuid", "").partition("-")[0]
        words = {"LVM": "LVM volume", "CRYPT": "encrypted volume", "mpath": "multipath device"}
        return f"{words.get(kind, 'device-mapper device')} {called}"
    return name


def open_disk(roots: Roots, disk: Disk, *, exclusive: bool) -> int:
    """Opens a disk for reading (see `Roots.open`). Raises OSError, also where its node in /dev is of another device."""
    path = roots.dev / disk.name
    fd = roots.open(path, exclusive=exclusive)
    if roots.is_node_of(fd, disk.number):
        return fd
    os.close(fd)
    raise OSError(errno.ENODEV, f"it is not the block device {disk.number}", str(path))


def contents(roots: Roots, disk: Disk) -> Contents:
    """What is on a disk, by blkid where it is installed, and by our own look."""
    if disk.size == 0:
        return Contents(problem=f"{disk.name} has no readable blocks: its format is one that the kernel cannot use")
    try:
        fd = open_disk(roots, disk, exclusive=False)
    except OSError as error:
        return Contents(problem=why(error))
    try:
        ours = signatures.find(fd, os.lseek(fd, 0, os.SEEK_END))
    except OSError as error:
        return Contents(problem=f"{roots.dev / disk.name} cannot be read: {error.strerror}")
    finally:
        os.close(fd)
    try:
        done = roots.program(["blkid", "-p", "-o", "export", str(roots.dev / disk.name)], seconds=30)
    except FileNotFoundError:
        return Contents(ours)
    except OSError as error:
        return Contents(ours, f"blkid on {roots.dev / disk.name}: {error.strerror}")
    if done.returncode == 8:  # two that contradict each other, which no tool resolves
        return Contents(ours or ("several signatures",))
    return Contents(signatures.merge(ours, signatures.from_blkid(done.stdout)))
