# SPDX-License-Identifier: Apache-2.0
"""What `ugds.devices()` finds out of sysfs, /proc and /dev, and that it lives with whatever is missing there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import ugds
from host_machine import FAR_GPU, GPU, SERIAL, SSD, SSD2, Machine, link, put
from ugds import cli
from ugds.host import Controller, _cli, devices, pci
from ugds.host.roots import Reader


def only(machine: Machine) -> Controller:
    (found,) = devices(roots=machine)
    return found


# --- The machine that this runs on -----------------------------------------------------------------------------------


def test_this_machine_can_be_looked_at() -> None:
    found = ugds.devices()
    assert [controller.address for controller in found] == pci.nvme_addresses(ugds.host.Roots())


def test_every_device_of_this_machine_has_a_place_in_the_tree() -> None:
    roots = ugds.host.Roots()
    for address in pci.addresses(roots):
        bus, *chain = pci.ancestry(pci.device_path(roots, address))
        assert bus.startswith("pci")
        assert chain[-1] == address


# --- Controllers -----------------------------------------------------------------------------------------------------


def test_a_controller_of_the_kernels_tells_everything(machine: Machine) -> None:
    machine.disk(machine.ssd(), "nvme0n1", bytes(3 << 20), block=4096)
    found = only(machine)
    assert (found.address, found.model, found.serial) == (SSD, "Samsung SSD 990 PRO 2TB", SERIAL)
    assert (found.firmware, found.name, found.state, found.holder) == ("4B2QJXD7", "nvme0", "live", "nvme")
    assert (found.iommu_group, found.group_shared_with, found.numa_node) == (12, (), 0)
    assert found.link == ugds.host.Link(16.0, 4, 32.0, 4)
    (namespace,) = found.namespaces
    assert (namespace.name, namespace.nsid, namespace.size, namespace.block_size) == ("nvme0n1", 1, 3 << 20, 4096)
    assert (namespace.holds, namespace.use, namespace.partitions) == ((), "", ())
    assert found.unknown == {}


def test_the_size_is_in_sectors_of_512_whatever_the_block_size(machine: Machine) -> None:
    folder = machine.ssd()
    machine.disk(folder, "nvme0n1", bytes(1 << 20), block=512)
    machine.disk(folder, "nvme0n2", bytes(1 << 20), block=4096, minor=1)
    assert [namespace.size for namespace in only(machine).namespaces] == [1 << 20, 1 << 20]


def test_only_nvme_controllers_are_listed(machine: Machine) -> None:
    machine.device("pci0000:00", "0000:00:1f.2", kind=0x010601)
    machine.device("pci0000:00", "0000:00:1e.0", kind=0x010801)
    assert devices(roots=machine) == []


@pytest.mark.parametrize("driver", ["vfio-pci", "ugds_drv", "uio_pci_generic", None])
def test_who_holds_it_is_told_and_what_only_nvme_knows_is_unknown(machine: Machine, driver: str | None) -> None:
    machine.ssd()
    machine.write(machine.pci / "drivers/nvme/unbind", SSD)
    if driver:
        machine.take(SSD, driver)
    found = only(machine)
    assert found.holder == (driver or "none")
    assert found.serial is None
    assert f"{driver or 'no driver'} holds it" in found.unknown["serial"]
    assert found.pci_id == "144d:a80a"


@pytest.mark.parametrize(
    "file", ["class", "numa_node", "vendor", "current_link_speed", "max_link_width", "driver_override"]
)
def test_a_missing_file_spoils_nothing_else(machine: Machine, file: str) -> None:
    machine.disk(machine.ssd(), "nvme0n1")
    (machine.pci / "devices" / SSD / file).unlink()
    found = devices(roots=machine)
    if file == "class":
        assert found == []
        return
    assert found[0].serial == SERIAL
    assert found[0].namespaces[0].name == "nvme0n1"
    if file in ("numa_node", "current_link_speed"):
        assert "is absent" in found[0].unknown[{"current_link_speed": "link"}.get(file, file)]


def test_a_machine_without_proc_dev_or_sysfs_is_one_without_controllers(machine: Machine) -> None:
    for root in (machine.sys, machine.proc, machine.dev):
        shutil.rmtree(root)
    assert devices(roots=machine) == []


def test_a_container_that_sees_sysfs_alone_lists_what_that_has(machine: Machine) -> None:
    machine.disk(machine.ssd(), "nvme0n1")
    shutil.rmtree(machine.proc)
    shutil.rmtree(machine.dev)
    found = only(machine)
    assert found.namespaces[0].holds is None
    assert "nvme0n1 is absent" in found.unknown["nvme0n1 holds"]


def test_links_and_nodes_that_nobody_knows_are_unknown(machine: Machine) -> None:
    path = machine.device("pci0000:00", SSD, kind=0x010802, node=-1)
    for name, value in (("current_link_speed", "Unknown"), ("current_link_width", "0")):
        put(path / name, value)
    for name, value in (("max_link_speed", "Unknown"), ("max_link_width", "255")):
        put(path / name, value)
    found = only(machine)
    assert (found.link, found.numa_node, found.iommu_group) == (None, None, None)
    assert "root complex" in found.unknown["link"]
    assert "firmware names none" in found.unknown["numa_node"]
    assert "IOMMU is off" in found.unknown["iommu_group"]


# --- Namespaces ------------------------------------------------------------------------------------------------------


def multipath(machine: Machine) -> tuple[Path, Path]:
    """Two controllers of one subsystem, and one namespace that both reach: the head, and the first one's folder."""
    first, second = machine.ssd(), machine.ssd(SSD2, "nvme1", group=13)
    machine.disk(first, "nvme0c0n1", minor=1)
    machine.disk(second, "nvme0c1n1", minor=2)
    subsystem = machine.sys / "devices/virtual/nvme-subsystem/nvme-subsys0"
    head = machine.disk(subsystem, "nvme0n1", bytes(2 << 20), minor=3)
    link(subsystem / "nvme0", first)
    link(subsystem / "nvme1", second)
    link(machine.sys / "class/nvme-subsystem/nvme-subsys0", subsystem)
    return head, first


def test_with_multipath_the_head_is_the_disk(machine: Machine) -> None:
    head, _ = multipath(machine)
    machine.partition(head, 1)
    machine.mounted("/dev/nvme0n1p1", "/srv", "259:1")
    for controller, other in zip(devices(roots=machine), ("nvme1 (0000:66:00.0)", "nvme0 (0000:65:00.0)"), strict=True):
        (namespace,) = controller.namespaces
        assert (namespace.name, namespace.size) == ("nvme0n1", 2 << 20)
        assert namespace.partitions[0].mounts == ("/srv",)
        assert namespace.shared_with == (other,)


def test_a_private_namespace_of_a_shared_subsystem_is_not_shared(machine: Machine) -> None:
    _, first = multipath(machine)
    put(first / "nvme0c0n1/wwid", "eui.other")
    assert devices(roots=machine)[0].namespaces[0].shared_with == ()


def test_a_namespace_that_the_kernel_made_no_disk_of_is_told(machine: Machine) -> None:
    folder = machine.ssd()
    machine.disk(folder, "nvme0n1")
    put(folder / "ng0n1/dev", "241:0")
    put(folder / "ng0n2/dev", "241:1")
    assert "no disk of ng0n2:" in only(machine).unknown["namespaces"]


# --- What uses a disk ------------------------------------------------------------------------------------------------


def test_mounts_are_found_by_source_by_number_and_in_other_namespaces(machine: Machine) -> None:
    disk = machine.disk(machine.ssd(), "nvme0n1")
    for number in (1, 2, 3):
        machine.partition(disk, number, minor=number)
    machine.mounted("/dev/nvme0n1p1", "/one\\040place")
    machine.mounted("/dev/root", "/two", "259:2")
    machine.process(4242, "containerd")
    machine.mounted("/dev/nvme0n1p3", "/three", table="4242")
    parts = only(machine).namespaces[0].partitions
    assert [part.mounts for part in parts] == [("/one place",), ("/two",), ("/three",)]
    assert parts[2].use == "mounted at /three (ext4) in the mount namespace of process 4242 (containerd)"


def test_swap_and_holders_are_told(machine: Machine) -> None:
    disk = machine.disk(machine.ssd(), "nvme0n1")
    for number in range(1, 5):
        machine.partition(disk, number, minor=number)
    put(machine.proc / "swaps", "Filename Type Size Used Priority\n/dev/nvme0n1p1 partition 1 0 -2")
    put(machine.sys / "block/md127/dev", "9:127")
    link(disk / "nvme0n1p2/holders/md127", machine.sys / "block/md127")
    put(machine.sys / "block/dm-0/dm/name", "vg-data")
    put(machine.sys / "block/dm-0/dm/uuid", "LVM-abc")
    link(machine.sys / "block/dm-0/slaves/nvme0n1p3", disk / "nvme0n1p3")
    put(machine.sys / "block/loop0/loop/backing_file", str(machine.dev / "nvme0n1p4"))
    uses = [part.use for part in only(machine).namespaces[0].partitions]
    expected = ["used as swap", "part of RAID array md127", "part of LVM volume vg-data", "part of loop device loop0"]
    assert uses == expected


# --- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chain", "node", "expected"),
    [
        (("pci0000:64", "0000:64:01.0", "0000:70:00.0", "0000:71:01.0", GPU), 0, "same switch"),
        (("pci0000:64", "0000:64:01.0", "0000:70:00.0", "0000:71:02.0", "0000:73:00.0", GPU), 0, "same switch"),
        (("pci0000:64", "0000:64:01.0", GPU), 0, "same root port"),
        (("pci0000:64", "0000:64:02.0", GPU), 0, "other root port"),
        (("pci0000:64", "0000:64:02.0", GPU), 1, "other root port"),
        (("pci0000:16", "0000:16:01.0", GPU), 0, "other root port"),
        (("pci0000:16", "0000:16:01.0", GPU), -1, "other root port"),
        (("pci0000:c0", "0000:c0:01.0", GPU), 1, "other socket"),
        (("pci0000:c0", "0000:c0:01.0", GPU), 2, "other root port"),
    ],
)
def test_the_distance_is_what_lies_between(machine: Machine, chain: tuple[str, ...], node: int, expected: str) -> None:
    machine.device("pci0000:64", "0000:64:01.0", "0000:70:00.0", "0000:71:00.0", SSD, kind=0x010802)
    machine.device(*chain, kind=0x030200, vendor=0x10DE, node=node)
    for number, package in ((0, 0), (1, 1), (2, 0)):  # one socket of two nodes, and another
        put(machine.sys / f"devices/system/node/node{number}/cpulist", f"{number * 8}-{number * 8 + 7}")
        put(machine.sys / f"devices/system/cpu/cpu{number * 8}/topology/physical_package_id", str(package))
    (gpu,) = only(machine).gpus
    assert gpu.distance == expected


def test_gpus_are_display_controllers_and_accelerators_of_their_makers(machine: Machine) -> None:
    machine.ssd()
    kinds = [(0x030000, 0x8086), (0x030200, 0x10DE), (0x038000, 0x1002), (0x120000, 0x1002)]
    others = [(0x030000, 0x1A03), (0x040300, 0x10DE), (0x120000, 0x1AF4), (0x0B4000, 0x8086)]
    for index, (kind, vendor) in enumerate(kinds + others):
        machine.device("pci0000:00", f"0000:00:{index + 1:02x}.0", kind=kind, vendor=vendor)
    assert [gpu.vendor for gpu in only(machine).gpus] == ["Intel", "NVIDIA", "AMD", "AMD"]


def test_the_nearest_gpu_comes_first_under_its_drivers_name(machine: Machine) -> None:
    machine.ssd()
    machine.device("pci0000:00", "0000:00:02.0", kind=0x030000, vendor=0x8086, node=1)
    machine.device("pci0000:64", "0000:64:05.0", GPU, kind=0x030200, vendor=0x10DE)
    put(machine.proc / f"driver/nvidia/gpus/{GPU}/information", "Model: \t\t NVIDIA H200\nIRQ: 1")
    assert [gpu.name for gpu in only(machine).gpus] == ["NVIDIA H200", "8086:a80a"]


# --- Transports ------------------------------------------------------------------------------------------------------


def transport(machine: Machine, name: str) -> ugds.host.Transport:
    return next(found for found in only(machine).transports if found.name == name)


def test_vfio_is_possible_when_bound_and_openable(machine: Machine) -> None:
    machine.ssd()
    assert any(f"sudo ugds bind {SSD}" in reason for reason in transport(machine, "vfio").reasons)
    machine.take(SSD, "vfio-pci")
    found = transport(machine, "vfio")
    assert (found.possible, found.routes, found.uris) == (True, ("direct",), (f"pci:{SSD}",))
    (machine.dev / "vfio/12").unlink()
    assert transport(machine, "vfio").reasons == (f"{machine.dev}/vfio/12 is absent",)


def test_vfio_goes_by_iommufd_where_the_kernel_has_it(machine: Machine) -> None:
    machine.ssd()
    machine.take(SSD, "vfio-pci")
    (machine.dev / "vfio/12").unlink()
    put(machine.pci / f"devices/{SSD}/vfio-dev/vfio0/dev", "511:0")
    put(machine.dev / "vfio/devices/vfio0", "")
    assert f"{machine.dev}/iommu is absent" in transport(machine, "vfio").reasons
    put(machine.dev / "iommu", "")
    assert transport(machine, "vfio").possible


def test_what_is_in_the_way_of_vfio_is_told(machine: Machine) -> None:
    machine.ssd(group=None)
    machine.group(SSD, 7)
    machine.device("pci0000:64", "0000:64:05.0", GPU, kind=0x030200, vendor=0x10DE, group=7)
    machine.take(GPU, "nvidia")
    (machine.modules / os.uname().release / "modules.dep").write_text("kernel/fs/xfs.ko:\n")
    reasons = transport(machine, "vfio").reasons
    assert "this kernel has no module vfio-pci" in reasons
    assert f"its IOMMU group is shared with {GPU} (nvidia)" in reasons
    shutil.rmtree(machine.modules)
    assert any("whether the kernel has vfio-pci is unknown" in reason for reason in transport(machine, "vfio").reasons)


def test_bridges_of_the_same_group_are_in_nobodys_way(machine: Machine) -> None:
    machine.ssd()
    machine.group("0000:64:05.0", 12)
    assert [(n.driver, n.blocks) for n in only(machine).group_shared_with] == [("pcieport", False)]


def test_without_iommu_vfio_is_root_s_and_unsafe(machine: Machine) -> None:
    machine.ssd(group=None)
    assert any("no IOMMU group" in reason for reason in transport(machine, "vfio").reasons)
    put(machine.sys / "module/vfio/parameters/enable_unsafe_noiommu_mode", "Y")
    assert not any("no IOMMU group" in reason for reason in transport(machine, "vfio").reasons)
    machine.group(SSD, 0)
    put(machine.sys / "kernel/iommu_groups/0/name", "vfio-noiommu")
    machine.take(SSD, "vfio-pci")
    put(machine.dev / "vfio/noiommu-0", "")
    assert transport(machine, "vfio").possible
    put(machine.proc / "self/status", "CapEff:\t0000000000000000")
    assert any("CAP_SYS_RAWIO" in reason for reason in transport(machine, "vfio").reasons)


def test_ugds_drv_is_possible_when_bound_and_its_node_is_openable(machine: Machine) -> None:
    machine.ssd()
    machine.driver("ugds_drv")
    assert any("sudo ugds bind" in reason for reason in transport(machine, "ugds_drv").reasons)
    machine.take(SSD, "ugds_drv")
    found = transport(machine, "ugds_drv")
    assert (found.possible, found.routes) == (True, ("direct",))
    assert found.uris == (f"pci:{SSD}", f"{machine.dev}/ugds_drv0")
    (machine.dev / "ugds_drv0").unlink()
    found = transport(machine, "ugds_drv")
    assert (found.possible, found.uris) == (False, ())
    assert found.reasons == (f"{machine.dev}/ugds_drv0 is absent",)
    shutil.rmtree(machine.pci / f"devices/{SSD}/ugds_drv")
    assert any("made no node" in reason for reason in transport(machine, "ugds_drv").reasons)


@pytest.mark.parametrize("kind", [None, "identity"])
def test_ugds_drv_without_translation_is_root_s_and_unsafe(machine: Machine, kind: str | None) -> None:
    machine.ssd(group=None if kind is None else 12)
    if kind is not None:
        put(machine.sys / "kernel/iommu_groups/12/type", kind)
    machine.take(SSD, "ugds_drv")
    found = transport(machine, "ugds_drv")
    assert found.possible
    assert any("not yours" in reason for reason in found.reasons)
    put(machine.proc / "self/status", "CapEff:\t0000000000000000")
    found = transport(machine, "ugds_drv")
    assert not found.possible
    assert any("CAP_SYS_RAWIO" in reason for reason in found.reasons)


def test_a_small_limit_of_locked_memory_is_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.ssd()
    machine.take(SSD, "vfio-pci")
    monkeypatch.setattr("resource.getrlimit", lambda which: (8 << 20, 8 << 20))
    assert not transport(machine, "vfio").reasons  # with CAP_IPC_LOCK there is no limit
    put(machine.proc / "self/status", "CapEff:\t0000000000000000")
    found = transport(machine, "vfio")
    assert found.possible
    assert "8 MiB" in found.reasons[0]


def test_the_kernels_own_way_is_the_disk_or_its_file_systems(machine: Machine) -> None:
    disk = machine.disk(machine.ssd(), "nvme0n1")
    assert transport(machine, "file").uris == (f"file:{machine.dev}/nvme0n1",)
    machine.partition(disk, 1)
    machine.mounted("/dev/nvme0n1p1", "/srv")
    assert transport(machine, "file").uris == ("file:/srv/…",)
    assert transport(machine, "file").routes == ("staged", "buffered")
    machine.write(machine.pci / "drivers/nvme/unbind", SSD)
    assert not transport(machine, "file").possible


# --- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(_cli, "_roots", lambda: machine)
    return machine


def test_devices_without_controllers_says_what_works(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["devices"]) == 0
    assert "ugds demo" in capsys.readouterr().out
    assert cli.main(["devices", "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_devices_prints_tables_for_people(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    disk = here.disk(here.ssd(), "nvme0n1")
    here.partition(disk, 1)
    here.mounted("/dev/nvme0n1p1", "/srv/[bold]")
    here.device("pci0000:c0", "0000:c0:01.0", FAR_GPU, kind=0x038000, vendor=0x1002, node=1)
    (disk.parent / "serial").unlink()
    assert cli.main(["devices"]) == 0
    text = capsys.readouterr().out
    for part in (SSD, "nvme (nvme0)", "16 GT/s x4 of 32 GT/s x4", "12, alone", "/srv/[bold]", FAR_GPU, "other socket"):
        assert part in text
    assert "serial unknown" in text
    assert "serial is absent" in text


def test_devices_as_json_is_one_object_a_controller(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    here.disk(here.ssd(), "nvme0n1")
    here.ssd(SSD2, "nvme1", group=13)
    assert cli.main(["devices", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["address"], second["address"]) == (SSD, SSD2)
    assert first["namespaces"][0]["block_size"] == 512
    assert {way["name"] for way in first["transports"]} == {"vfio", "ugds_drv", "file"}
    assert cli.main(["devices", "66:00.0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["address"] == SSD2


def test_a_reader_keeps_the_reason(tmp_path: Path) -> None:
    reader = Reader()
    assert reader.text("serial", tmp_path / "nothing") is None
    assert reader.text("model", tmp_path) is None
    assert reader.unknown == {
        "serial": f"{tmp_path}/nothing is absent",
        "model": f"{tmp_path} cannot be read: Is a directory",
    }
