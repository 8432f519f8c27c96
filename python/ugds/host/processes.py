# SPDX-License-Identifier: Apache-2.0
"""What /proc tells of the other processes: what they have mounted, and what they have open."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ugds.host.roots import Roots, device_number, entries, read, read_or


@dataclass(frozen=True)
class Mount:
    """One line of a mount table."""

    number: str  #: "major:minor"; made up by the kernel for file systems of several devices, as btrfs
    source: str
    point: str
    kind: str
    elsewhere: str  #: whose mount table it is where it is not ours: "process 4242 (containerd)"

    def __str__(self) -> str:
        return f"{self.point} ({self.kind})" + (
            f" in the mount namespace of {self.elsewhere}" if self.elsewhere else ""
        )


@dataclass(frozen=True)
class Opener:
    """A process that has a device open."""

    pid: int
    command: str
    node: str
    certain: bool = True

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})"


def unescape(text: str) -> str:
    """A field of the kernel's tables: blanks and the like are written as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def pids(roots: Roots) -> list[int]:
    return sorted(int(path.name) for path in entries(roots.proc) if path.name.isdigit())


def command_of(roots: Roots, pid: int) -> str:
    return read_or(roots.proc / str(pid) / "comm", "?")


def _lines(text: str, elsewhere: str) -> Iterator[Mount]:
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if separator and len(fields) >= 5 and len(rest) >= 2:
            yield Mount(fields[2], unescape(rest[1]), unescape(fields[4]), rest[0], elsewhere)


def mounts(roots: Roots) -> list[Mount]:
    """Every mount of every mount namespace that can be seen, ours first. Of the others only what ours lacks."""
    found = list(_lines(read_or(roots.proc / "self/mountinfo", ""), ""))
    seen = {(mount.number, mount.source, mount.point) for mount in found}
    tables = {_namespace(roots, "self")} - {None}
    texts = set()  # whoever is not root is not told which namespaces are the same
    for pid in pids(roots):
        table = _namespace(roots, str(pid))
        if table is not None and table in tables:
            continue
        tables.add(table)
        try:
            text = read(roots.proc / str(pid) / "mountinfo")
        except OSError:
            continue
        if text in texts:
            continue
        texts.add(text)
        for mount in _lines(text, f"process {pid} ({command_of(roots, pid)})"):
            key = (mount.number, mount.source, mount.point)
            if key not in seen:
                seen.add(key)
                found.append(mount)
    return found


def _namespace(roots: Roots, process: str) -> str | None:
    try:
        return os.readlink(roots.proc / process / "ns/mnt")
    except OSError:
        return None


def swaps(roots: Roots) -> list[str]:
    """Paths of the swap spaces in use."""
    lines = read_or(roots.proc / "swaps", "").splitlines()[1:]
    return [unescape(line.split()[0]) for line in lines if line.split()]


def _descriptors(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in entries(folder):
        try:
            yield path, os.readlink(path)
        except OSError:
            continue


def openers(roots: Roots, nodes: Mapping[str, str], address: str = "") -> list[Opener]:
    """Processes other than this one that have one of the nodes open: names below /dev, each with its "major:minor".
    With an `address`, also those that hold the device itself through vfio, which has no name. Best effort: what belongs
    to others is hidden from whoever is not root."""
    names = {str(roots.dev / name): name for name in nodes}
    numbers = {number: name for name, number in nodes.items() if number}
    found = []
    for pid in pids(roots):
        if pid == os.getpid():
            continue
        opened = list(_descriptors(roots.proc / str(pid) / "fd"))
        node = next(filter(None, (_node(path, target, names, numbers) for path, target in opened)), None)
        certain = True
        if node is None and address:
            node, certain = _vfio_device(roots, pid, opened, address)
        if node is not None:
            found.append(Opener(pid, command_of(roots, pid), node, certain))
    return found


def _node(path: Path, target: str, names: Mapping[str, str], numbers: Mapping[str, str]) -> str | None:
    if target in names:
        return names[target]
    # In another mount namespace /dev may be elsewhere: what counts is the number.
    if target.startswith("/") and "/dev/" in target:
        try:
            return numbers.get(device_number(os.stat(path).st_rdev))
        except OSError:
            return None
    return None


def _vfio_device(roots: Roots, pid: int, opened: Iterable[tuple[Path, str]], address: str) -> tuple[str | None, bool]:
    """The device's own descriptor, which stays when that of its group is closed. Newer kernels tell the device in
    fdinfo; with older ones, a process that has a nameless device and no group of another one is suspect."""
    opened = list(opened)
    nameless = [path for path, target in opened if target == "anon_inode:[vfio-device]"]
    untold = False
    for path in nameless:
        told = read_or(roots.proc / str(pid) / "fdinfo" / path.name, "")
        syspath = re.search(r"^vfio-device-syspath:\s*(\S+)", told, re.MULTILINE)
        if syspath and syspath[1].endswith(f"/{address}"):
            return "a vfio device", True
        untold |= syspath is None
    elsewhere = any(re.search(r"/vfio/(?:noiommu-\d+|\d+|devices/.+)$", target) for _, target in opened)
    return ("a vfio device", False) if untold and not elsewhere else (None, True)
