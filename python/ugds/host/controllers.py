# SPDX-License-Identifier: Apache-2.0
"""The NVMe controllers of this machine, each with everything that can be found out about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ugds.host import gpus, nvme, pci, transports, usage
from ugds.host.gpus import Gpu
from ugds.host.pci import Link, Neighbour
from ugds.host.roots import Reader, Roots
from ugds.host.transports import Transport
from ugds.host.usage import Usage


@dataclass(frozen=True)
class Volume:
    """A disk or a partition."""

    name: str
    size: int  #: bytes
    mounts: tuple[str, ...]  #: mount points
    swap: bool
    holders: tuple[str, ...]  #: what it is a part of: "RAID array md0", "LVM volume data-kv", …
    holds: tuple[str, ...] | None  #: signatures of file systems and the like; None where that is unknown
    use: str  #: what uses it now, in words; empty where nothing does


@dataclass(frozen=True)
class Namespace(Volume):
    """A namespace that the kernel made a disk of."""

    nsid: int | None
    block_size: int | None  #: bytes
    partitions: tuple[Volume, ...]
    shared_with: tuple[str, ...]  #: other controllers that reach it


@dataclass(frozen=True)
class Controller:
    """An NVMe controller. What could not be found out is None, with the reason in `unknown` by the field's name."""

    address: str  #: "0000:65:00.0"
    pci_id: str  #: "144d:a80a": vendor and device
    model: str | None
    serial: str | None
    firmware: str | None
    name: str | None  #: what the kernel calls it ("nvme0"); None where the nvme driver does not hold it
    state: str | None  #: as the nvme driver has it: "live", "resetting", "dead", …
    holder: str  #: the driver that holds it: nvme, vfio-pci, ugds_drv, uio_pci_generic, …, or "none"
    driver_override: str | None
    namespaces: tuple[Namespace, ...]
    iommu_group: int | None
    group_shared_with: tuple[Neighbour, ...]
    link: Link | None
    numa_node: int | None
    gpus: tuple[Gpu, ...]  #: the nearest first
    transports: tuple[Transport, ...]
    unknown: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return dataclasses.asdict(self)


def _volume(look: Usage, disk: nvme.Disk, reader: Reader) -> dict[str, Any]:
    use = look.of(disk)
    contents = usage.contents(look.roots, disk)
    if contents.problem:
        reader.unknown[f"{disk.name} holds"] = contents.problem
    return {
        "name": disk.name,
        "size": disk.size,
        "mounts": tuple(dict.fromkeys(mount.point for mount in use.mounts)),
        "swap": use.swap,
        "holders": use.holders,
        "holds": None if contents.problem else contents.found,
        "use": str(use),
    }


def _namespace(look: Usage, attached: nvme.Attached, reader: Reader) -> Namespace:
    partitions = tuple(Volume(**_volume(look, disk, reader)) for disk in attached.disk.partitions)
    return Namespace(
        **_volume(look, attached.disk, reader),
        nsid=attached.nsid,
        block_size=attached.block_size,
        partitions=partitions,
        shared_with=attached.others,
    )


def _in_use(namespace: Namespace) -> bool:
    return any(volume.use for volume in (namespace, *namespace.partitions))


def _points(namespace: Namespace) -> tuple[str, ...]:
    return tuple(point for volume in (namespace, *namespace.partitions) for point in volume.mounts)


def _explain_absence(kernel: nvme.Kernel | None, driver: str | None, reader: Reader) -> None:
    if kernel is None:
        if driver == "nvme":
            reason = "the nvme driver has not set it up: it still starts, or has failed"
        else:
            reason = f"only the nvme driver tells, and {driver or 'no driver'} holds it"
        for fact in ("model", "serial", "firmware", "name", "state", "namespaces"):
            reader.unknown[fact] = reason
    elif kernel.without_disk:
        names = ", ".join(kernel.without_disk)
        reader.unknown["namespaces"] = f"the kernel made no disk of {names}: their format is one that it cannot use"


def describe(roots: Roots, address: str, look: Usage | None = None) -> Controller:
    """One controller, by its full address."""
    look = look or Usage(roots)
    device, reader = pci.device_path(roots, address), Reader()
    driver = pci.driver_of(device)
    kernel = nvme.kernel_view(roots, device, reader)
    _explain_absence(kernel, driver, reader)
    attached = kernel.namespaces if kernel else ()
    namespaces = tuple(_namespace(look, one, reader) for one in attached)
    ways = tuple((a, _points(n), _in_use(n)) for a, n in zip(attached, namespaces, strict=True))
    group = pci.iommu_group(device)
    if group is None:
        reader.unknown["iommu_group"] = "it has none: the IOMMU is off or absent"
    identifiers = [(reader.text("pci_id", device / part) or "?").removeprefix("0x") for part in ("vendor", "device")]
    return Controller(
        address=address,
        pci_id=":".join(identifiers),
        model=kernel.model if kernel else None,
        serial=kernel.serial if kernel else None,
        firmware=kernel.firmware if kernel else None,
        name=kernel.name if kernel else None,
        state=kernel.state if kernel else None,
        holder=driver or "none",
        driver_override=pci.override_of(device),
        namespaces=namespaces,
        iommu_group=int(group) if group is not None else None,
        group_shared_with=pci.neighbours(roots, address),
        link=pci.link_of(device, reader),
        numa_node=pci.numa_node(device, reader),
        gpus=gpus.gpus_of(roots, device),
        transports=(
            transports.vfio(roots, address),
            transports.ugds_drv(roots, address),
            transports.file(roots, driver, ways),
        ),
        unknown=reader.unknown,
    )


def devices(roots: Roots) -> list[Controller]:
    """Every NVMe controller, by address. What cannot be read is unknown; nothing is raised for it."""
    look = Usage(roots)
    return [describe(roots, address, look) for address in pci.nvme_addresses(roots)]
