# SPDX-License-Identifier: Apache-2.0
"""By which transports a controller can be reached now, and what is in the way of the others."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from ugds import sizes
from ugds.host import pci
from ugds.host._errors import why
from ugds.host.nvme import Attached
from ugds.host.roots import Roots, read, read_or

MODULES = {"vfio-pci": "vfio_pci", "ugds_drv": "ugds_drv"}
DRIVERS = tuple(MODULES)  #: what a controller can be bound to for a program to drive it
_CAP_IPC_LOCK, _CAP_SYS_RAWIO = 14, 17
ENOUGH_LOCKED = 64 << 20  # below it, hardly more than the queues can be mapped


@dataclass(frozen=True)
class Transport:
    """One way to a controller."""

    name: str  #: vfio, ugds_drv or file
    possible: bool  #: now, for this process
    routes: tuple[str, ...]  #: direct, staged, buffered: what it can have
    uris: tuple[str, ...]  #: what to open where it is possible
    reasons: tuple[str, ...]  #: what is in the way where it is not; else what to know


def module_state(roots: Roots, driver: str) -> tuple[bool | None, str]:
    """Whether a driver is there or can be loaded, None where that cannot be told, and the words for it."""
    if (roots.sys / "bus/pci/drivers" / driver).is_dir():
        return True, "loaded"
    folder = roots.modules / os.uname().release
    lists = []
    for name in ("modules.dep", "modules.builtin"):
        try:
            lists.append(read(folder / name))
        except OSError as error:
            problem = why(error)
    if not lists:
        return None, f"whether the kernel has {driver} is unknown: {problem}"
    spellings = {driver.replace("-", "_"), driver.replace("_", "-")}
    if any(f"/{name}.ko" in text for text in lists for name in spellings):
        return True, "not loaded"
    return False, f"this kernel has no module {driver}"


def noiommu_switch(roots: Roots) -> Path:
    return roots.sys / "module/vfio/parameters/enable_unsafe_noiommu_mode"


def noiommu_enabled(roots: Roots) -> bool | None:
    """Whether vfio hands out devices without an IOMMU, unsafely; None where vfio is not loaded or cannot do so."""
    text = read_or(noiommu_switch(roots), "")
    return None if not text else text in ("Y", "y", "1")


def capable(roots: Roots, capability: int) -> bool:
    for line in read_or(roots.proc / "self/status", "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False


def locked_memory_problem(roots: Roots) -> str | None:
    """What is wrong with the limit of locked memory, which bounds what vfio maps for this process."""
    if capable(roots, _CAP_IPC_LOCK):
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or limit >= ENOUGH_LOCKED:
        return None
    return f"locked memory is limited to {sizes.format(limit)} (ulimit -l), which bounds what can be mapped"


def group_node(roots: Roots, group: str) -> str:
    return f"vfio/noiommu-{group}" if pci.is_noiommu(roots, group) else f"vfio/{group}"


def cdev_node(roots: Roots, address: str) -> str | None:
    """The device's own node, of kernels with iommufd."""
    for path in sorted((pci.device_path(roots, address) / "vfio-dev").glob("vfio*")):
        if (path / "dev").exists():
            return f"vfio/devices/{path.name}"
    return None


def _closed(roots: Roots, *nodes: str) -> str | None:
    """Why a set of nodes cannot be opened; None if they can."""
    for node in nodes:
        path = roots.dev / node
        if not path.exists():
            return f"{path} is absent"
        if not os.access(path, os.R_OK | os.W_OK):
            return f"{path} may not be opened: sudo chown $USER {path}"
    return None


def _vfio_bound(roots: Roots, address: str) -> list[str]:
    """What keeps this process from opening a controller that vfio-pci holds."""
    group = pci.iommu_group(pci.device_path(roots, address))
    cdev = cdev_node(roots, address)
    problems = []
    if cdev is not None:
        problem = _closed(roots, cdev, "iommu")
        if problem is None:
            return []
        problems.append(problem)
    if group is None:
        return [*problems, "it has no IOMMU group"]
    node = group_node(roots, group)
    problem = _closed(roots, "vfio/vfio", node)
    if problem is None and "noiommu" in node and not capable(roots, _CAP_SYS_RAWIO):
        problem = "it has no IOMMU, and without one only root may use vfio (CAP_SYS_RAWIO)"
    return [] if problem is None else [*problems, problem]


def no_group_problem(roots: Roots, address: str) -> str | None:
    """Why vfio-pci cannot take a controller that has no IOMMU group; None if it can."""
    if pci.iommu_group(pci.device_path(roots, address)) is not None or noiommu_enabled(roots):
        return None
    return "it has no IOMMU group: the IOMMU is off or absent, and vfio is not allowed to do without one"


def vfio(roots: Roots, address: str) -> Transport:
    device = pci.device_path(roots, address)
    driver = pci.driver_of(device)
    reasons = []
    available, words = module_state(roots, "vfio-pci")
    if not pci.is_vfio(driver):
        reasons.append(f"{driver or 'no driver'} holds it: sudo ugds bind {address}")
        if not available:
            reasons.append(words)
        problem = no_group_problem(roots, address)
        if problem:
            reasons.append(problem)
    else:
        reasons += _vfio_bound(roots, address)
    blocked = [f"{n.address} ({n.driver})" for n in pci.neighbours(roots, address) if n.blocks]
    if blocked:
        reasons.append(f"its IOMMU group is shared with {', '.join(blocked)}")
    possible = not reasons
    memory = locked_memory_problem(roots)
    if memory:
        reasons.append(memory)
    group = pci.iommu_group(device)
    if possible and group is not None and pci.is_noiommu(roots, group):
        reasons.append("without an IOMMU nothing keeps the controller from memory that is not yours")
    return Transport("vfio", possible, ("direct",), (f"pci:{address}",) if possible else (), tuple(reasons))


def drv_node(roots: Roots, address: str) -> str | None:
    """The node that ugds_drv made for a controller which it holds."""
    for path in sorted((pci.device_path(roots, address) / "ugds_drv").glob("ugds_drv*")):
        if (path / "dev").exists():
            return path.name
    return None


def is_translated(roots: Roots, address: str) -> bool:
    """Whether an IOMMU translates what the controller addresses while a driver of the kernel's has it, and so keeps it
    from all other memory."""
    group = pci.iommu_group(pci.device_path(roots, address))
    if group is None or pci.is_noiommu(roots, group):
        return False
    return read_or(roots.sys / "kernel/iommu_groups" / group / "type", "DMA").startswith("DMA")


def _drv_bound(roots: Roots, address: str) -> list[str]:
    """What keeps this process from opening a controller that ugds_drv holds."""
    node = drv_node(roots, address)
    if node is None:
        return ["ugds_drv made no node for it: sudo dmesg | tail says why"]
    problem = _closed(roots, node)
    if problem is None and not is_translated(roots, address) and not capable(roots, _CAP_SYS_RAWIO):
        problem = "no IOMMU translates its addresses, and without one only root may use ugds_drv (CAP_SYS_RAWIO)"
    return [] if problem is None else [problem]


def ugds_drv(roots: Roots, address: str) -> Transport:
    driver = pci.driver_of(pci.device_path(roots, address))
    available, words = module_state(roots, "ugds_drv")
    if driver == "ugds_drv":
        reasons = _drv_bound(roots, address)
    elif available and words == "not loaded":
        reasons = [f"the module ugds_drv is not loaded: sudo ugds bind {address} --driver ugds_drv"]
    elif available:
        reasons = [f"{driver or 'no driver'} holds it: sudo ugds bind {address} --driver ugds_drv"]
    else:
        reasons = [words]
    possible = not reasons
    uris = (f"pci:{address}", f"{roots.dev / (drv_node(roots, address) or '')}") if possible else ()
    if possible:
        reasons += filter(None, [locked_memory_problem(roots)])
        if not is_translated(roots, address):
            reasons.append("without an IOMMU that translates nothing keeps it from memory that is not yours")
    return Transport("ugds_drv", possible, ("direct",), uris, tuple(reasons))


def file(roots: Roots, driver: str | None, namespaces: tuple[tuple[Attached, tuple[str, ...], bool], ...]) -> Transport:
    """Through the kernel: for each namespace, where its file systems are mounted, and whether anything uses it."""
    routes = ("staged", "buffered")
    if driver != "nvme":
        reason = f"{driver or 'no driver'} holds it, so that it has no block device"
        return Transport("file", False, routes, (), (reason,))
    uris, reasons = [], []
    for namespace, points, used in namespaces:
        node = roots.dev / namespace.disk.name
        if points:
            uris += [f"file:{point.rstrip('/')}/…" for point in points]
        elif used:
            reasons.append(f"{namespace.disk.name} is in use")
        elif not node.exists():
            reasons.append(f"{node} is absent")
        elif not os.access(node, os.R_OK | os.W_OK):
            reasons.append(f"{node} may not be opened: run as root, or give access to it")
        else:
            uris.append(f"file:{node}")
    if not namespaces:
        reasons.append("it has no namespaces")
    return Transport("file", bool(uris), routes, tuple(uris), tuple(reasons))
