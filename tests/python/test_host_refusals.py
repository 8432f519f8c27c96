# SPDX-License-Identifier: Apache-2.0
"""What must never be taken from the kernel. Each of these, let through once, is somebody's lost file system."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import ugds
from host_machine import GPU, SSD, SSD2, Machine, link, put
from ugds.host import Roots, bind, nvme, unbind, usage


@pytest.fixture
def disk(machine: Machine) -> Path:
    """The folder of one SSD's blank disk."""
    return machine.disk(machine.ssd(), "nvme0n1")


def refusal(machine: Machine, *, force: bool = False) -> str:
    """Why binding is refused; nothing may have been written."""
    with pytest.raises(ugds.Error) as caught:
        bind(SSD, force=force, roots=machine)
    assert caught.value.errno == errno.EBUSY
    assert caught.value.hint
    assert machine.writes == []
    assert machine.holder() not in (None, "vfio-pci")
    return str(caught.value)


def stands_with_force(machine: Machine, words: str) -> None:
    assert words in refusal(machine)
    assert words in refusal(machine, force=True)


# --- Use, which force does not override ------------------------------------------------------------------------------


def test_a_mounted_disk(machine: Machine, disk: Path) -> None:
    machine.mounted("/dev/nvme0n1", "/srv")
    stands_with_force(machine, "nvme0n1 is mounted at /srv (ext4)")


def test_a_mounted_partition_by_its_number(machine: Machine, disk: Path) -> None:
    machine.partition(disk, 1, minor=9)
    machine.mounted("/dev/root", "/", "259:9")
    stands_with_force(machine, "nvme0n1p1 is mounted at /")


def test_a_mount_of_another_mount_namespace(machine: Machine, disk: Path) -> None:
    machine.process(77, "dockerd")
    machine.mounted("/dev/nvme0n1", "/data", table="77")
    stands_with_force(machine, "in the mount namespace of process 77 (dockerd)")


def test_a_mount_by_another_name_of_the_node(machine: Machine, disk: Path) -> None:
    link(machine.dev / "disk/by-id/nvme-Samsung", machine.dev / "nvme0n1")
    machine.mounted("/dev/disk/by-id/nvme-Samsung", "/srv")
    stands_with_force(machine, "mounted at /srv")


def test_the_head_of_a_multipath_namespace(machine: Machine) -> None:
    folder = machine.ssd()
    machine.disk(folder, "nvme0c0n1", minor=1)
    subsystem = machine.sys / "devices/virtual/nvme-subsystem/nvme-subsys0"
    machine.disk(subsystem, "nvme0n1", minor=2)
    put(subsystem / "ng0n1/dev", "241:0")
    link(subsystem / "nvme0", folder)
    link(machine.sys / "class/nvme-subsystem/nvme-subsys0", subsystem)
    machine.mounted("/dev/nvme0n1", "/srv", "259:2")
    machine.process(99, "fio", str(machine.dev / "ng0n1"))
    stands_with_force(machine, "nvme0n1 is mounted at /srv")
    stands_with_force(machine, "process 99 (fio) has ng0n1 open")


def test_a_namespace_of_two_controllers(machine: Machine) -> None:
    folders = machine.ssd(), machine.ssd(SSD2, "nvme1", group=13)
    subsystem = machine.sys / "class/nvme-subsystem/nvme-subsys0"
    for index, folder in enumerate(folders):
        machine.disk(folder, f"nvme{index}n1", minor=index)
        link(subsystem / folder.name, folder)
    stands_with_force(machine, "nvme0n1 is reached through other controllers too: nvme1 (0000:66:00.0)")


def test_swap(machine: Machine, disk: Path) -> None:
    machine.partition(disk, 2)
    put(machine.proc / "swaps", "Filename Type Size Used Priority\n/dev/nvme0n1p2 partition 1 0 -2")
    stands_with_force(machine, "nvme0n1p2 is used as swap")


@pytest.mark.parametrize(
    ("name", "uuid", "words"),
    [
        ("md0", "", "RAID array md0"),
        ("bcache0", "", "bcache0"),
        ("dm-3", "LVM-xyz", "LVM volume some-name"),
        ("dm-3", "CRYPT-LUKS2-x", "encrypted volume some-name"),
        ("dm-3", "mpath-x", "multipath device some-name"),
        ("dm-3", "DMRAID-x", "device-mapper device some-name"),
    ],
)
def test_a_part_of_something_larger(machine: Machine, disk: Path, name: str, uuid: str, words: str) -> None:
    put(machine.sys / "block" / name / "dm/name", "some-name")
    put(machine.sys / "block" / name / "dm/uuid", uuid)
    link(disk / "holders" / name, machine.sys / "block" / name)
    stands_with_force(machine, f"nvme0n1 is part of {words}")


def test_an_exported_disk(machine: Machine, disk: Path) -> None:
    folder = machine.sys / "kernel/config/nvmet/subsystems/nqn.x/namespaces/1"
    put(folder / "device_path", str(machine.dev / "nvme0n1"))
    put(folder / "enable", "1")
    stands_with_force(machine, "the NVMe target nqn.x")


@pytest.mark.parametrize("name", ["nvme0n1", "nvme0n1p1"])
def test_exclusive_use_that_nothing_else_tells(machine: Machine, disk: Path, name: str) -> None:
    machine.partition(disk, 1)
    machine.busy.add(name)
    stands_with_force(machine, f"{name} is in exclusive use")


@pytest.mark.parametrize("node", ["nvme0n1", "nvme0n1p1", "ng0n1", "nvme0"])
def test_a_process_that_has_it_open(machine: Machine, disk: Path, node: str) -> None:
    machine.partition(disk, 1)
    put(disk.parent / "ng0n1/dev", "241:0")
    machine.process(99, "qemu-system-x86", str(machine.dev / node))
    stands_with_force(machine, f"process 99 (qemu-system-x86) has {node} open")


def test_virtual_functions(machine: Machine, disk: Path) -> None:
    put(machine.pci / "devices" / SSD / "sriov_numvfs", "4")
    stands_with_force(machine, "4 virtual functions of it are enabled")


def test_a_shared_iommu_group_names_who_is_in_it(machine: Machine, disk: Path) -> None:
    machine.device("pci0000:64", "0000:64:05.0", GPU, kind=0x030200, vendor=0x10DE, group=12)
    machine.group("0000:64:05.0", 12)
    machine.take(GPU, "nvidia")
    stands_with_force(machine, f"its IOMMU group is shared with {GPU}, which nvidia holds")
    machine.take(GPU, "vfio-pci")
    assert bind(SSD, roots=machine).changed


def test_a_driver_that_is_not_known(machine: Machine, disk: Path) -> None:
    machine.write(machine.pci / "drivers/nvme/unbind", SSD)
    machine.take(SSD, "xen-pciback")
    machine.writes.clear()
    stands_with_force(machine, "xen-pciback holds it")


# --- What cannot be told ---------------------------------------------------------------------------------------------


def test_a_disk_without_a_node(machine: Machine, disk: Path) -> None:
    (machine.dev / "nvme0n1").unlink()
    stands_with_force(machine, "whether nvme0n1 is in use cannot be told")


def test_a_node_of_another_device(machine: Machine, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_node_of", lambda fd, number: False)
    stands_with_force(machine, "it is not the block device 259:0")


def test_a_disk_that_cannot_be_read(machine: Machine, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, size: int) -> tuple[str, ...]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("ugds.host.signatures.find", broken)
    stands_with_force(machine, "what nvme0n1 holds cannot be told")


def test_sysfs_that_may_not_be_written(machine: Machine, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "driver_override")
    stands_with_force(machine, "driver_override may not be written")


# --- What force overrides --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mark", "words"),
    [(bytes(512) + b"EFI PART", "GPT partition table"), (b"XFSB", "xfs"), (bytes(4086) + b"SWAPSPACE2", "swap")],
)
def test_a_signature(machine: Machine, disk: Path, mark: bytes, words: str) -> None:
    put(machine.dev / "nvme0n1", mark.ljust(1 << 20, b"\0"))
    assert f"nvme0n1 holds data: {words}" in refusal(machine)
    assert bind(SSD, force=True, roots=machine).changed


def test_partitions_whose_table_is_gone(machine: Machine, disk: Path) -> None:
    machine.partition(disk, 1)
    assert "nvme0n1 has partitions: nvme0n1p1" in refusal(machine)
    assert bind(SSD, force=True, roots=machine).changed


def test_the_second_namespace_counts_as_the_first(machine: Machine, disk: Path) -> None:
    machine.disk(disk.parent, "nvme0n2", b"XFSB" + bytes(1 << 20), minor=3)
    assert "nvme0n2 holds data: xfs" in refusal(machine)


def test_a_format_that_the_kernel_cannot_use(machine: Machine, disk: Path) -> None:
    put(disk / "size", "0")
    assert "its format is one that the kernel cannot use" in refusal(machine)
    assert bind(SSD, force=True, roots=machine).changed


def test_a_controller_that_is_not_live(machine: Machine, disk: Path) -> None:
    put(disk.parent / "state", "resetting")
    assert "nvme0 is resetting, not live" in refusal(machine)


def test_a_controller_that_nobody_holds_may_hold_data(machine: Machine, disk: Path) -> None:
    machine.write(machine.pci / "drivers/nvme/unbind", SSD)
    machine.writes.clear()
    with pytest.raises(ugds.Error, match="what is on it cannot be told: no driver holds it"):
        bind(SSD, roots=machine)
    assert bind(SSD, force=True, roots=machine).changed


def test_all_reasons_are_told_at_once(machine: Machine, disk: Path) -> None:
    machine.mounted("/dev/nvme0n1", "/srv/a\\040b")
    put(machine.dev / "nvme0n1", b"XFSB" + bytes(1 << 20))
    text = refusal(machine)
    assert "mounted at /srv/a b" in text
    assert "holds data: xfs" in text
    assert "sudo umount '/srv/a b'" in text


# --- Giving back -----------------------------------------------------------------------------------------------------


def refused_unbind(machine: Machine) -> str:
    machine.writes.clear()
    with pytest.raises(ugds.Error) as caught:
        unbind(SSD, roots=machine)
    assert machine.writes == []
    assert machine.holder() == "vfio-pci"
    return caught.value.cause


@pytest.mark.parametrize("node", ["vfio/12", "vfio/devices/vfio0"])
def test_unbind_while_a_process_has_it_open(machine: Machine, disk: Path, node: str) -> None:
    bind(SSD, roots=machine)
    put(machine.pci / "devices" / SSD / "vfio-dev/vfio0/dev", "511:0")
    machine.process(4321, "python3", str(machine.dev / node))
    assert f"process 4321 (python3) has {node} open" in refused_unbind(machine)


def test_unbind_while_a_process_holds_the_device_without_its_group(machine: Machine, disk: Path) -> None:
    bind(SSD, roots=machine)
    folder = machine.process(4321, "python3", "anon_inode:[vfio-device]")
    assert "may be this one" in refused_unbind(machine)
    put(folder / "fdinfo/0", f"pos: 0\nvfio-device-syspath: /sys/devices/pci0000:64/{SSD}")
    assert "has a vfio device open" in refused_unbind(machine)
    put(folder / "fdinfo/0", f"pos: 0\nvfio-device-syspath: /sys/devices/pci0000:64/{SSD2}")
    assert unbind(SSD, roots=machine).changed


def test_another_device_s_user_does_not_keep_it(machine: Machine, disk: Path) -> None:
    bind(SSD, roots=machine)
    machine.process(4321, "qemu", "/dev/vfio/99", "anon_inode:[vfio-device]")
    assert unbind(SSD, roots=machine).changed


# --- Real block devices ----------------------------------------------------------------------------------------------


class RealNodes(Machine):
    """A made-up machine whose disks are block devices of this one."""

    def is_node_of(self, fd: int, number: str) -> bool:
        return Roots.is_node_of(self, fd, number)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[str]:
    """A loop device of a blank image."""
    image = put(tmp_path / "image", bytes(32 << 20))
    if os.geteuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("needs root and losetup")
    done = subprocess.run(["losetup", "--find", "--show", image], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no loop device here: {done.stderr.strip()}")
    try:
        yield done.stdout.strip()
    finally:
        subprocess.run(["losetup", "--detach", done.stdout.strip()], check=True)


def test_the_kernel_itself_tells_of_exclusive_use(tmp_path: Path, loop: str) -> None:
    machine = RealNodes(tmp_path / "machine")
    folder = machine.disk(machine.ssd(), "nvme0n1", bytes(32 << 20))
    node = machine.dev / "nvme0n1"
    node.unlink()
    node.symlink_to(loop)
    stands_with_force(machine, "it is not the block device 259:0")
    rdev = os.stat(loop).st_rdev
    put(folder / "dev", f"{os.major(rdev)}:{os.minor(rdev)}")
    with ExitStack() as held:
        fd = os.open(loop, os.O_RDONLY | os.O_EXCL)
        held.callback(os.close, fd)
        stands_with_force(machine, "nvme0n1 is in exclusive use")
    kept = usage.open_disk(machine, nvme.disk_at(folder), exclusive=True)
    with pytest.raises(OSError, match="busy"):
        os.open(loop, os.O_RDONLY | os.O_EXCL)
    os.close(kept)
    assert bind(SSD, roots=machine).changed
