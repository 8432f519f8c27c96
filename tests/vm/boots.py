# SPDX-License-Identifier: Apache-2.0
"""The virtual machines that the suite boots: which kernel, which controllers, where they sit. One table, `BOOTS`.

Booting and starting Python cost more than most tests, so there are few boots, each with everything that its tests need.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20
PEER_SIZE = 64 * MIB


@dataclass(frozen=True)
class Namespace:
    """One namespace, a raw image on the host. `broken` is a byte offset whose block can be neither read nor
    written: a media error."""

    block: int = 512
    size: int = 256 * MIB
    broken: int | None = None


@dataclass(frozen=True)
class Controller:
    """QEMU's NVMe controller. `options` are its own, `place` says what it sits behind: "port", a root port of its own
    from which it can be removed, or "switch"."""

    name: str
    namespaces: tuple[Namespace, ...] = (Namespace(),)
    options: str = ""
    place: str = "port"

    def drive(self, nsid: int) -> str:
        """The name of a namespace's drive, for the monitor and for `host.read_image`."""
        return f"{self.name}{nsid}"


@dataclass(frozen=True)
class Boot:
    """One virtual machine. `kernel` is a flavour (see kernel.py); `modules` are loaded before the tests."""

    name: str
    shows: str
    kernel: str
    controllers: tuple[Controller, ...] = ()
    peer: str = ""  # where the peer memory sits ("port" or "switch"), or nowhere
    iommu: bool = True
    memory: int = 1024 * MIB
    cpus: int = 1
    cpu: str = "max"  # the model. The kernel forwards between root ports of processors that it knows to be able to
    modules: tuple[str, ...] = ()
    append: str = ""
    # Seconds without the end or the start of a test after which the guest counts as hung.
    patience: float = 240.0
    # What has to become of tests, by name, where that is not to pass.
    expected: dict[str, str] = field(default_factory=dict)


DEBIAN_MODULES = ("virtio_console", "vfio-pci", "vfio_iommu_type1", "ext4", "loop")

TWO = Controller("two", (Namespace(512), Namespace(4096, 128 * MIB)), "max_ioqpairs=8,msix_qsize=9")
# One data page a command beyond the first, and one queue pair: the least that a controller may offer.
SMALL = Controller("small", (Namespace(512, 64 * MIB),), "mdts=1,max_ioqpairs=1,msix_qsize=2")
COARSE = Controller("coarse", (Namespace(4096, 128 * MIB),), "mdts=2,max_ioqpairs=4,msix_qsize=5")
BROKEN = Controller("broken", (Namespace(512, 64 * MIB, broken=8 * MIB),), "max_ioqpairs=4,msix_qsize=5")
PEERED = Controller("peered", (Namespace(4096, 256 * MIB),), "max_ioqpairs=4,msix_qsize=5", place="switch")
# More queues than interrupt vectors.
MANY = Controller("many", (Namespace(512, 64 * MIB),), "max_ioqpairs=4,msix_qsize=2")
LOOSE = Controller("loose", (Namespace(512, 64 * MIB),), "max_ioqpairs=4,msix_qsize=5")

BOOTS = (
    Boot(
        "iommufd",
        "a recent kernel: vfio by iommufd and by type1, many kinds of controller, peer memory behind a switch",
        "iommufd",
        (TWO, SMALL, COARSE, BROKEN, PEERED, MANY, LOOSE),
        peer="switch",
    ),
    Boot(
        "debian",
        "a distribution's kernel: vfio by type1, the kernel's own NVMe driver and file systems",
        "debian",
        (TWO, COARSE, LOOSE),
        peer="port",
        modules=DEBIAN_MODULES,
    ),
    Boot(
        "debug",
        "a kernel that checks locks, DMA mappings and lists: killed processes, hung commands, removal",
        "debug",
        (TWO, BROKEN, LOOSE),
        peer="port",
        cpu="EPYC",
        memory=1536 * MIB,
        patience=400.0,
    ),
    Boot(
        "selftest",
        "the suite itself: that it tells a failure, a kernel that complains, and a guest that hangs",
        "any",
        memory=512 * MIB,
        patience=15.0,
        expected={
            "test_fails": "failed",
            "test_skips": "skipped",
            "test_passes_while_the_kernel_warns": "failed",
            "test_announces_a_message_that_does_not_come": "failed",
            "test_takes_too_long": "failed",
            "test_hangs_the_guest": "hung",
            "test_comes_after_that": "missing",
        },
    ),
    Boot("noiommu", "a machine without IOMMU", "iommufd", (TWO,), iommu=False),
)


@dataclass
class Topology:
    """QEMU's arguments for a boot's devices, and where the guest finds each: a glob below /sys/devices/pci0000:00."""

    arguments: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    ports: dict[str, str] = field(default_factory=dict)


def topology(boot: Boot, images: Path, peer_file: Path) -> Topology:
    """Puts the controllers of `boot` behind ports, one behind the other from device 0x10 on. Makes the images."""
    made = Topology()
    behind_switch = 0
    if "switch" in {boot.peer, *(c.place for c in boot.controllers)}:
        made.arguments += ["-device", "pcie-root-port,id=port_switch,bus=pcie.0,addr=0x1c,chassis=100,slot=100"]
        made.arguments += ["-device", "x3130-upstream,id=switch,bus=port_switch"]

    def place(name: str, where: str, number: int) -> None:
        nonlocal behind_switch
        slot = f"id=port_{name},chassis={number + 1},slot={number + 1}"
        if where == "switch":
            made.arguments.extend(["-device", f"xio3130-downstream,{slot},bus=switch,addr={behind_switch:#x}"])
            made.places[name] = f"0000:00:1c.0/*:00.0/*:{behind_switch:02x}.0/*:00.0"
            behind_switch += 1
        else:
            made.arguments.extend(["-device", f"pcie-root-port,{slot},bus=pcie.0,addr={16 + number:#x}"])
            made.places[name] = f"0000:00:{16 + number:02x}.0/*:00.0"
        made.ports[name] = f"port_{name}"

    for number, controller in enumerate(boot.controllers):
        place(controller.name, controller.place, number)
        made.arguments += controller_arguments(controller, images)
    if boot.peer:
        place("peer", boot.peer, len(boot.controllers))
        backend = f"memory-backend-file,id=peer_memory,mem-path={peer_file},size={PEER_SIZE},share=on"
        made.arguments += ["-object", backend, "-device", "ivshmem-plain,id=peer,memdev=peer_memory,bus=port_peer"]
    return made


def device_words(controller: Controller) -> str:
    """What makes QEMU's controller, on the command line or by the monitor's device_add."""
    # Shared: a device that was taken out may keep its drive, if only in QEMU's mind (guest/devices.py, `left`).
    words = f"nvme,id={controller.name},serial=uGDS-{controller.name},bus=port_{controller.name}"
    if len(controller.namespaces) == 1:
        words += ",share-rw=on"
    if controller.options:
        words += f",{controller.options}"
    if len(controller.namespaces) > 1:
        return words
    return f"{words},drive={controller.drive(1)},{block_words(controller.namespaces[0])}"


def block_words(namespace: Namespace) -> str:
    return f"logical_block_size={namespace.block},physical_block_size={namespace.block}"


def controller_arguments(controller: Controller, images: Path) -> list[str]:
    arguments = []
    for nsid, namespace in enumerate(controller.namespaces, 1):
        arguments += ["-object", f"throttle-group,id=limit_{controller.drive(nsid)}"]
        arguments += ["-blockdev", json.dumps(drive(controller.drive(nsid), namespace, images))]
    arguments += ["-device", device_words(controller)]
    if len(controller.namespaces) > 1:
        for nsid, namespace in enumerate(controller.namespaces, 1):
            where = f"bus={controller.name},nsid={nsid},drive={controller.drive(nsid)}"
            arguments += ["-device", f"nvme-ns,{where},{block_words(namespace)}"]
    return arguments


def drive(name: str, namespace: Namespace, images: Path) -> dict[str, Any]:
    """A raw image behind two layers of QEMU's: blkdebug, which makes commands fail at a broken place, and a throttle,
    which can make them take long, and lets go of them when the controller is reset. What is written is in the image at
    once, where the host sees it."""
    image, rules = images / f"{name}.img", images / f"{name}.rules"
    with image.open("wb") as file:
        file.truncate(namespace.size)
    broken = namespace.broken
    rule = '[inject-error]\nevent = "{}_aio"\nerrno = "5"\nsector = "{}"\n'
    rules.write_text("" if broken is None else "".join(rule.format(way, broken // 512) for way in ("read", "write")))
    stored = {"driver": "file", "filename": str(image)}
    layer = {"driver": "blkdebug", "config": str(rules), "image": stored}
    raw = {"driver": "raw", "discard": "unmap", "file": layer}
    return {"driver": "throttle", "node-name": name, "throttle-group": f"limit_{name}", "discard": "unmap", "file": raw}


def described(boot: Boot, made: Topology) -> dict[str, Any]:
    """What the guest's tests are told of their machine, as JSON."""
    return {
        "boot": boot.name,
        "iommu": boot.iommu,
        "modules": list(boot.modules),
        "peer": {"glob": made.places["peer"], "port": "port_peer", "size": PEER_SIZE} if boot.peer else None,
        "controllers": {
            c.name: {
                "glob": made.places[c.name],
                "port": made.ports[c.name],
                "device": device_words(c),
                "namespaces": [
                    {"nsid": nsid, "drive": c.drive(nsid), "block": n.block, "size": n.size, "broken": n.broken}
                    for nsid, n in enumerate(c.namespaces, 1)
                ],
            }
            for c in boot.controllers
        },
    }
