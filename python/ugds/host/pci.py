# SPDX-License-Identifier: Apache-2.0
"""PCI functions as sysfs shows them: addresses, drivers, links, IOMMU groups, and their place in the tree."""

from __future__ import annotations

import difflib
import errno
import re
from dataclasses import dataclass
from pathlib import Path

from ugds.host._errors import failure
from ugds.host.roots import Reader, Roots, entries, link_name, read_or

NVME_CLASS = 0x010802
BRIDGE_CLASS = 0x0604  # PCI-to-PCI bridges; the last byte, the programming interface, is cut off

# A domain has more than four digits where a driver makes it up, as for disks behind Intel's VMD.
_ADDRESS = re.compile(r"(?:pci:)?(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([01][0-9a-f])\.([0-7])", re.IGNORECASE)
_IN_PATH = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# What may share an IOMMU group with a device that a program drives: vfio itself has the same list.
HARMLESS_IN_GROUP = ("pcieport", "pci-stub")


@dataclass(frozen=True)
class Link:
    """A PCIe link now, and the most that the device can do. Speeds in GT/s; None where the kernel does not know."""

    speed: float | None
    width: int | None
    max_speed: float | None
    max_width: int | None


@dataclass(frozen=True)
class Neighbour:
    """Another device of the same IOMMU group."""

    address: str
    driver: str | None
    blocks: bool  #: it is held by a driver of the kernel's, so that no program may drive the group


class AddressError(ValueError):
    """A text that is no PCI address."""


def parse_address(text: str) -> str:
    """The address in full ("0000:65:00.0") of "0000:65:00.0", "65:00.0" or "pci:0000:65:00.0". Raises AddressError."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        raise AddressError(f'"{text}" is not a PCI address; write it as 0000:65:00.0 or 65:00.0')
    return f"{match[1] or '0000'}:{match[2]}:{match[3]}.{match[4]}".lower()


def device_path(roots: Roots, address: str) -> Path:
    return roots.sys / "bus/pci/devices" / address


def class_of(path: Path) -> int | None:
    try:
        return int(read_or(path / "class", ""), 16)
    except ValueError:
        return None


def addresses(roots: Roots) -> list[str]:
    return [path.name for path in entries(roots.sys / "bus/pci/devices")]


def nvme_addresses(roots: Roots) -> list[str]:
    return [address for address in addresses(roots) if class_of(device_path(roots, address)) == NVME_CLASS]


def find_nvme(roots: Roots, text: str, operation: str) -> str:
    """The address of an NVMe controller that is there. Raises ugds.Error (EINVAL, ENODEV), with the nearest one."""
    try:
        address = parse_address(text)
    except AddressError as error:
        raise failure(errno.EINVAL, operation, "", str(error), "ugds devices lists them") from None
    if address in addresses(roots):
        found = class_of(device_path(roots, address))
        if found == NVME_CLASS:
            return address
        what = "its class cannot be read" if found is None else f"its PCI class is {found:#08x}, not {NVME_CLASS:#08x}"
        hint = "ugds devices lists the NVMe controllers"
        raise failure(errno.EINVAL, operation, address, f"this is not an NVMe controller: {what}", hint)
    known = nvme_addresses(roots)
    near = difflib.get_close_matches(address, known, n=1, cutoff=0.6)
    if near:
        hint = f"did you mean {near[0]}?"
    elif known:
        hint = "the NVMe controllers here are " + ", ".join(known)
    else:
        hint = "there is no NVMe controller here; emulated:1GiB works without one"
    raise failure(errno.ENODEV, operation, address, "there is no PCI device of this address", hint)


def driver_of(path: Path) -> str | None:
    return link_name(path / "driver")


def override_of(path: Path) -> str | None:
    """What `driver_override` asks for; None where it asks for nothing."""
    text = read_or(path / "driver_override", "")
    return None if text in ("", "(null)") else text


def numa_node(path: Path, reader: Reader) -> int | None:
    text = reader.text("numa_node", path / "numa_node")
    if text is None:
        return None
    try:
        node = int(text)
    except ValueError:
        node = -1
    if node < 0:
        reader.unknown["numa_node"] = "the firmware names none"
        return None
    return node


def _speed(text: str) -> float | None:
    match = re.match(r"([0-9.]+) GT/s", text)
    return float(match[1]) if match else None


def _width(text: str) -> int | None:
    # 0 is a link that is down, and 255 what the kernel says of a device that has none.
    return int(text) if text.isdigit() and 0 < int(text) < 255 else None


def link_of(path: Path, reader: Reader) -> Link | None:
    if reader.text("link", path / "current_link_speed") is None:
        return None
    link = Link(
        _speed(read_or(path / "current_link_speed", "")),
        _width(read_or(path / "current_link_width", "")),
        _speed(read_or(path / "max_link_speed", "")),
        _width(read_or(path / "max_link_width", "")),
    )
    if link == Link(None, None, None, None):
        reader.unknown["link"] = "the device has no link of its own: it is part of the root complex"
        return None
    return link


def iommu_group(path: Path) -> str | None:
    return link_name(path / "iommu_group")


def is_noiommu(roots: Roots, group: str) -> bool:
    """True for the groups that vfio makes up in its mode without an IOMMU."""
    return read_or(roots.sys / "kernel/iommu_groups" / group / "name", "") == "vfio-noiommu"


def neighbours(roots: Roots, address: str) -> tuple[Neighbour, ...]:
    """The other devices of the IOMMU group."""
    found = []
    for path in entries(device_path(roots, address) / "iommu_group/devices"):
        if path.name == address:
            continue
        driver = driver_of(path)
        free = driver is None or driver in HARMLESS_IN_GROUP or is_vfio(driver)
        found.append(Neighbour(path.name, driver, not free))
    return tuple(found)


def is_vfio(driver: str | None) -> bool:
    """vfio-pci, or one of its variants for single kinds of devices."""
    return driver is not None and re.sub("_", "-", driver).endswith("vfio-pci")


def ancestry(path: Path) -> tuple[str, ...]:
    """The bridges above a device from the root port down, then the device; before them its root bus ("pci0000:64")."""
    parts = path.resolve().parts
    buses = [part for part in parts if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)]
    return (buses[0] if buses else "", *(part for part in parts if _IN_PATH.fullmatch(part)))
