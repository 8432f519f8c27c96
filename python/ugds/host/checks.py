# SPDX-License-Identifier: Apache-2.0
"""What forbids to take a controller from whoever has it. Whatever cannot be found out forbids it too."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack

from ugds.host import nvme, pci, processes, transports, usage
from ugds.host._errors import Refusal, why
from ugds.host.nvme import Disk, Kernel
from ugds.host.roots import Reader, Roots, read_or
from ugds.host.usage import Usage

# Drivers that give a device to a program and look at nothing on it.
_FOR_PROGRAMS = ("ugds_drv", "uio_pci_generic", "igb_uio")
_TAKE_OUT = "stop what uses it, and try again"
_ERASE = "if nothing on it is needed: --force, or erase it first by wipefs --all; all data on it will be at risk"


def is_for_programs(driver: str | None) -> bool:
    return pci.is_vfio(driver) or driver in _FOR_PROGRAMS


def _uses(look: Usage, disk: Disk) -> Iterator[Refusal]:
    use = look.of(disk)
    for mount in use.mounts:
        enter = f"nsenter --target {mount.elsewhere.split()[1]} --mount " if mount.elsewhere else ""
        remedy = f"sudo {enter}umount {shlex.quote(mount.point)}"
        yield Refusal(f"{disk.name} is mounted at {mount}", remedy)
    if use.swap:
        yield Refusal(f"{disk.name} is used as swap", f"sudo swapoff {look.roots.dev / disk.name}")
    for holder in use.holders:
        yield Refusal(f"{disk.name} is part of {holder}", f"take {disk.name} out of {holder}, or stop that")


def _exclusive(roots: Roots, disk: Disk, known: bool) -> tuple[list[Refusal], int | None]:
    """Tries to have a disk to ourselves. The descriptor keeps others away until it is closed."""
    try:
        return [], usage.open_disk(roots, disk, exclusive=True)
    except OSError as error:
        if error.errno != errno.EBUSY:
            remedy = "run as root, where the device's nodes are in /dev"
            return [Refusal(f"whether {disk.name} is in use cannot be told: {why(error)}", remedy)], None
    if known:
        return [], None
    reason = f"{disk.name} is in exclusive use (a file system of several disks, ZFS, a virtual machine, …)"
    return [Refusal(reason, _TAKE_OUT)], None


def _contents(roots: Roots, disk: Disk) -> Iterator[Refusal]:
    contents = usage.contents(roots, disk)
    if contents.found:
        yield Refusal(f"{disk.name} holds data: {', '.join(contents.found)}", _ERASE, forcible=True)
    elif disk.partitions:
        names = ", ".join(partition.name for partition in disk.partitions)
        yield Refusal(f"{disk.name} has partitions: {names}", _ERASE, forcible=True)
    if contents.problem:
        yield Refusal(f"what {disk.name} holds cannot be told: {contents.problem}", "run as root; see what dmesg says")


def _namespace(look: Usage, attached: nvme.Attached, held: ExitStack) -> Iterator[Refusal]:
    roots, disk = look.roots, attached.disk
    if attached.others:
        reason = f"{disk.name} is reached through other controllers too: {', '.join(attached.others)}"
        yield Refusal(reason, "the kernel would go on writing to it: detach the namespace from those")
    busy = False
    # Partitions first: while we have the whole disk, none of its partitions can be had.
    for part in (*disk.partitions, disk):
        found = list(_uses(look, part))
        busy |= bool(found)
        yield from found
        if disk.size == 0:
            continue
        problems, fd = _exclusive(roots, part, busy)
        busy |= bool(problems)
        yield from problems
        if fd is not None:
            if part is disk:
                held.callback(os.close, fd)
            else:
                os.close(fd)
    if disk.size == 0:
        reason = f"what {disk.name} holds cannot be told: its format is one that the kernel cannot use"
        yield Refusal(reason, _ERASE, forcible=True)
    else:
        yield from _contents(roots, disk)


def _kernel(look: Usage, kernel: Kernel, held: ExitStack) -> Iterator[Refusal]:
    if kernel.state not in ("live", "unknown"):
        reason = f"{kernel.name} is {kernel.state}, not live: what is on it cannot be told"
        yield Refusal(reason, "wait for it, or see what dmesg says; --force if nothing on it is needed", forcible=True)
    for name in kernel.without_disk:
        yield Refusal(f"what is in {name} cannot be told: the kernel made no disk of it", _ERASE, forcible=True)
    for attached in kernel.namespaces:
        yield from _namespace(look, attached, held)


def openers(roots: Roots, address: str) -> Iterator[Refusal]:
    """Processes that have the device open. Moving it would break them, or wait for them for ever."""
    device = pci.device_path(roots, address)
    through_vfio = address if pci.is_vfio(pci.driver_of(device)) else ""
    for opener in processes.openers(roots, nvme.nodes_below(roots, device), through_vfio):
        has = f"has {opener.node} open" if opener.certain else "has a vfio device open, which may be this one"
        yield Refusal(f"{opener} {has}", "end that process, or let it close the device")


def _neighbours(roots: Roots, address: str) -> Iterator[Refusal]:
    for other in pci.neighbours(roots, address):
        if other.blocks:
            remedy = "unbind that device from its driver, or put the SSD into a slot with an IOMMU group of its own"
            yield Refusal(f"its IOMMU group is shared with {other.address}, which {other.driver} holds", remedy)


def no_iommu(roots: Roots, address: str) -> Refusal | None:
    problem = transports.no_group_problem(roots, address)
    if problem is None:
        return None
    remedy = "turn the IOMMU on in the firmware, and by intel_iommu=on on the kernel's command line"
    if transports.noiommu_enabled(roots) is False:
        remedy += (
            "\n              or, at the risk that the controller writes to memory that is not yours:"
            f"\n              echo 1 | sudo tee {transports.noiommu_switch(roots)}"
        )
    return Refusal(problem, remedy)


def _driver_there(roots: Roots, address: str, driver: str) -> Iterator[Refusal]:
    available, words = transports.module_state(roots, driver)
    if available is False:
        ours = "build and install it as drv/README.md of uGDS's source says"
        remedy = "install it with the kernel's extra modules" if driver == "vfio-pci" else ours
        yield Refusal(words, remedy)
    # vfio says whether it does without an IOMMU only when it is loaded: `binding` asks again then.
    if driver == "vfio-pci" and words == "loaded":
        problem = no_iommu(roots, address)
        if problem:
            yield problem


def may_write(roots: Roots, address: str) -> Iterator[Refusal]:
    path = pci.device_path(roots, address) / "driver_override"
    if not path.exists():
        yield Refusal(f"{path} is absent", "a kernel of 3.16 or newer, with sysfs mounted, is needed")
    elif not os.access(path, os.W_OK):
        yield Refusal(f"{path} may not be written", "run as root, where /sys is mounted writable")


def before_binding(roots: Roots, address: str, driver: str, held: ExitStack) -> list[Refusal]:
    """All that forbids to move a controller to `driver`. Disks that may be taken are kept open exclusively in `held`,
    so that nothing mounts them meanwhile: close it when the former driver has let go."""
    device = pci.device_path(roots, address)
    current = pci.driver_of(device)
    found = [*may_write(roots, address), *_driver_there(roots, address, driver)]
    if current == "nvme":
        kernel = nvme.kernel_view(roots, device, Reader())
        if kernel is not None:
            found += _kernel(Usage(roots), kernel, held)
        else:
            reason = "what is on it cannot be told: the nvme driver has not set it up"
            found.append(
                Refusal(reason, "wait for it, or see what dmesg says; --force if nothing on it is needed", True)
            )
    elif current is None or current == "pci-stub":
        reason = f"what is on it cannot be told: {current or 'no driver'} holds it"
        remedy = f"give it to nvme first, by sudo ugds unbind {address}; --force if nothing on it is needed"
        found.append(Refusal(reason, remedy, forcible=True))
    elif not is_for_programs(current):
        reason = f"{current} holds it, a driver of which it is not known how to tell whether it is in use"
        found.append(Refusal(reason, f"stop what uses it, and unbind it from {current} first"))
    found += openers(roots, address)
    functions = read_or(device / "sriov_numvfs", "0")
    if functions != "0":
        remedy = f"echo 0 | sudo tee {device / 'sriov_numvfs'}"
        found.append(Refusal(f"{functions} virtual functions of it are enabled", remedy))
    found += _neighbours(roots, address)
    return found


def before_unbinding(roots: Roots, address: str) -> list[Refusal]:
    """All that forbids to give a controller back to the nvme driver."""
    current = pci.driver_of(pci.device_path(roots, address))
    found = list(may_write(roots, address))
    if current is not None and current != "pci-stub" and not is_for_programs(current):
        found.append(Refusal(f"{current} holds it, not a driver of user space", "unbind it by hand if you mean to"))
    return [*found, *openers(roots, address)]
