# SPDX-License-Identifier: Apache-2.0
"""GPUs, and how far they are from a controller: what a transfer between the two has to pass."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ugds.host import pci
from ugds.host.roots import Reader, Roots, entries, read_or

VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
# VGA, 3D and other display controllers; processing accelerators, as which GPUs without display outputs are known too.
CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)

SAME_SWITCH = "same switch"
SAME_ROOT_PORT = "same root port"
OTHER_ROOT_PORT = "other root port"
OTHER_SOCKET = "other socket"
DISTANCES = (SAME_SWITCH, SAME_ROOT_PORT, OTHER_ROOT_PORT, OTHER_SOCKET)  #: nearest first


@dataclass(frozen=True)
class Gpu:
    """A GPU as one controller sees it."""

    address: str
    vendor: str
    name: str  #: as its driver calls it, or the PCI identifiers
    driver: str | None
    numa_node: int | None
    distance: str  #: one of DISTANCES


def _number(path: Path) -> int:
    try:
        return int(read_or(path, "0"), 16)
    except ValueError:
        return 0


def gpu_paths(roots: Roots) -> list[Path]:
    found = []
    for path in entries(roots.sys / "bus/pci/devices"):
        kind = pci.class_of(path)
        if kind is not None and kind >> 8 in CLASSES and _number(path / "vendor") in VENDORS:
            found.append(path)
    return found


def _name(roots: Roots, path: Path) -> str:
    told = read_or(roots.proc / "driver/nvidia/gpus" / path.name / "information", "")
    model = re.search(r"^Model:\s*(.+)$", told, re.MULTILINE)
    if model:
        return model[1].strip()
    return read_or(path / "product_name", "") or f"{_number(path / 'vendor'):04x}:{_number(path / 'device'):04x}"


def _socket(roots: Roots, node: int) -> str | None:
    """The processor package of a NUMA node: one package may have several nodes."""
    cpus = re.match(r"\d+", read_or(roots.sys / f"devices/system/node/node{node}/cpulist", ""))
    if cpus is None:
        return None
    return read_or(roots.sys / f"devices/system/cpu/cpu{cpus[0]}/topology/physical_package_id", "") or None


def distance(roots: Roots, one: Path, other: Path) -> str:
    """What lies between two devices, from their places in the tree of bridges and their NUMA nodes."""
    first, second = pci.ancestry(one), pci.ancestry(other)
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    # The first entry is the bus of the host bridge, the second the root port, all below it belong to switches.
    if shared >= 3:
        return SAME_SWITCH
    if shared == 2:
        return SAME_ROOT_PORT
    ignored = Reader()
    nodes = pci.numa_node(one, ignored), pci.numa_node(other, ignored)
    if shared == 1 or nodes[0] is None or nodes[1] is None or nodes[0] == nodes[1]:
        return OTHER_ROOT_PORT
    sockets = _socket(roots, nodes[0]), _socket(roots, nodes[1])
    return OTHER_ROOT_PORT if sockets[0] is not None and sockets[0] == sockets[1] else OTHER_SOCKET


def gpus_of(roots: Roots, controller: Path) -> tuple[Gpu, ...]:
    """Every GPU, the nearest first."""
    ignored = Reader()
    found = [
        Gpu(
            path.name,
            VENDORS[_number(path / "vendor")],
            _name(roots, path),
            pci.driver_of(path),
            pci.numa_node(path, ignored),
            distance(roots, controller, path),
        )
        for path in gpu_paths(roots)
    ]
    return tuple(sorted(found, key=lambda gpu: (DISTANCES.index(gpu.distance), gpu.address)))
