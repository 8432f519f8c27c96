# SPDX-License-Identifier: Apache-2.0
"""`ugds devices`, `ugds bind` and `ugds unbind` against a real kernel: what is moved, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import support
import ugds
import ugds.host
from devices import Controller, disk_of, load, write_direct
from host import JOB, Host
from support import MIB, write_and_read

from drv import node_of

pytestmark = pytest.mark.boot("debian")


@pytest.fixture
def coarse(host: Host, controllers: dict[str, Controller]) -> Iterator[Controller]:
    """A controller with an empty disk, held by the kernel's driver."""
    controller = controllers["coarse"]
    controller.unbind()
    for offset in (0, controller.namespace().size - MIB):
        host.write_image("coarse1", offset, bytes(MIB))
    controller.bind("nvme")
    disk_of(controller)
    yield controller
    controller.unbind()


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def command_line(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ugds", *words]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_every_controller_is_listed_with_who_holds_it(
    coarse: Controller, vfio: Callable[[str], Controller], controllers: dict[str, Controller]
) -> None:
    two = vfio("two")
    listed = {each.address: each for each in ugds.host.devices()}
    assert sorted(listed) == sorted(controller.address for controller in controllers.values())
    assert listed[two.address].holder == "vfio-pci"
    mine = listed[coarse.address]
    assert (mine.holder, mine.model, mine.serial) == ("nvme", "QEMU NVMe Ctrl", "uGDS-coarse")
    (namespace,) = mine.namespaces
    assert (namespace.nsid, namespace.block_size, namespace.size) == (1, 4096, coarse.namespace().size)
    assert str(mine.iommu_group) == coarse.group


def test_the_command_lists_the_same(coarse: Controller, controllers: dict[str, Controller]) -> None:
    said = command_line("devices", "--json")
    assert said.returncode == 0, said.stderr
    listed = [json.loads(line) for line in said.stdout.splitlines()]
    assert sorted(each["address"] for each in listed) == sorted(each.address for each in controllers.values())
    text = command_line("devices", coarse.address)
    assert text.returncode == 0, text.stderr
    assert coarse.address in text.stdout
    assert "nvme" in text.stdout


def test_an_unused_controller_is_moved_to_vfio_and_back(coarse: Controller) -> None:
    change = ugds.host.bind(coarse.address)
    assert (change.before, change.after, change.changed) == ("nvme", "vfio-pci", True)
    assert coarse.driver == "vfio-pci"
    assert not ugds.host.bind(coarse.address).changed
    with ugds.open(change.uri) as ssd:
        write_and_read(ssd, 64 * MIB, 64 * 1024, seed=1)
    back = ugds.host.unbind(coarse.address)
    assert (back.before, back.after, back.changed) == ("vfio-pci", "nvme", True)
    assert coarse.driver == "nvme"
    assert disk_of(coarse).exists()


def test_the_kernel_helper_takes_it_too_and_its_node_is_shown(coarse: Controller) -> None:
    if (reason := JOB / "no-module").exists():
        pytest.skip(reason.read_text())
    load("ugds_drv")
    change = ugds.host.bind(coarse.address, "ugds_drv")
    assert (change.before, change.after, change.changed) == ("nvme", "ugds_drv", True)
    node = f"/dev/{node_of(coarse).name}"
    assert any(node in hint for hint in change.hints)
    shown = next(each for each in ugds.host.devices() if each.address == coarse.address)
    way = next(each for each in shown.transports if each.name == "ugds_drv")
    assert (shown.holder, way.possible, way.uris) == ("ugds_drv", True, (change.uri, node))
    for uri in way.uris:
        with ugds.open(uri) as ssd:
            assert ssd.info.transport == "ugds_drv"
            write_and_read(ssd, 64 * MIB, 64 * 1024, seed=2)
    said = command_line("devices", coarse.address)
    assert node in said.stdout
    with Path(node).open("rb") as opened, subprocess.Popen(["sleep", "60"], stdin=opened) as holder:
        with pytest.raises(ugds.Error) as refused:
            ugds.host.unbind(coarse.address)
        assert "sleep" in refused.value.cause
        assert Path(node).name in refused.value.cause
        holder.kill()
    back = ugds.host.unbind(coarse.address)
    assert (back.before, back.after, coarse.driver) == ("ugds_drv", "nvme", "nvme")
    assert disk_of(coarse).exists()


def test_the_commands_move_it_too_and_a_dry_run_does_not(coarse: Controller) -> None:
    dry = command_line("bind", coarse.address, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "driver_override" in dry.stdout
    assert coarse.driver == "nvme"
    done = command_line("bind", coarse.address)
    assert done.returncode == 0, done.stderr
    assert f"pci:{coarse.address}" in done.stdout
    assert coarse.driver == "vfio-pci"
    done = command_line("unbind", coarse.address)
    assert done.returncode == 0, done.stderr
    assert coarse.driver == "nvme"


def refused(controller: Controller, word: str, force: bool = False) -> ugds.Error:
    with pytest.raises(ugds.Error) as raised:
        ugds.host.bind(controller.address, force=force)
    assert raised.value.errno == errno.EBUSY
    assert word in raised.value.cause
    assert raised.value.hint
    assert controller.driver == "nvme"
    return raised.value


@pytest.mark.parametrize("force", [False, True])
def test_a_mounted_controller_is_refused_even_by_force(coarse: Controller, tmp_path: Path, force: bool) -> None:
    disk = disk_of(coarse)
    run("mkfs.ext4", "-q", "-F", str(disk), "16M")
    run("mount", str(disk), str(tmp_path))
    try:
        (tmp_path / "file").write_text("still here")
        error = refused(coarse, f"mounted at {tmp_path}", force)
        assert "umount" in error.hint
        os.sync()
        assert (tmp_path / "file").read_text() == "still here"
    finally:
        run("umount", str(tmp_path))


def test_a_file_system_refuses_unless_forced(coarse: Controller) -> None:
    run("mkfs.ext4", "-q", "-F", str(disk_of(coarse)), "16M")
    error = refused(coarse, "ext4")
    assert "--force" in error.hint
    assert ugds.host.bind(coarse.address, force=True).after == "vfio-pci"


def test_a_partition_table_refuses(coarse: Controller) -> None:
    disk = disk_of(coarse)
    table = bytearray(4096)
    # One partition of Linux data, from block 256 on, of 1024 blocks.
    table[446:462] = b"\0\0\0\0\x83\0\0\0" + (256).to_bytes(4, "little") + (1024).to_bytes(4, "little")
    table[510:512] = b"\x55\xaa"
    write_direct(disk, 0, bytes(table))
    run("blockdev", "--rereadpt", str(disk))
    refused(coarse, "partition")


def test_swap_refuses_even_by_force(coarse: Controller) -> None:
    disk = disk_of(coarse)
    run("mkswap", str(disk))
    run("swapon", str(disk))
    try:
        assert "swapoff" in refused(coarse, "swap", force=True).hint
    finally:
        run("swapoff", str(disk))


def test_a_loop_device_on_the_disk_refuses(coarse: Controller) -> None:
    disk = disk_of(coarse)
    loop = run("losetup", "--find", "--show", str(disk)).strip()
    try:
        refused(coarse, "loop", force=True)
    finally:
        run("losetup", "-d", loop)


OPEN = """
import os, sys
fd = os.open(sys.argv[1], int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_EXCL])
def test_a_disk_that_a_process_has_open_refuses(coarse: Controller, flags: int) -> None:
    with support.child(OPEN, str(disk_of(coarse)), str(flags)) as opener, ExitStack() as ending:
        ending.callback(opener.kill)
        assert opener.stdout is not None
        assert opener.stdout.readline() == "ready\n"
        refused(coarse, f"process {opener.pid}", force=True)
        ending.close()
        opener.wait(30)
    assert ugds.host.bind(coarse.address).after == "vfio-pci"


HOLD = """
import sys, ugds
with ugds.open(sys.argv[1]) as ssd:
    print(ssd.state, flush=True)
    sys.stdin.read()
"""


def test_a_controller_that_a_program_drives_is_not_taken_from_it(coarse: Controller) -> None:
    uri = ugds.host.bind(coarse.address).uri
    with support.child(HOLD, uri) as holder, ExitStack() as ending:
        ending.callback(holder.kill)
        assert holder.stdout is not None
        assert any("ready" in line for line in holder.stdout)
        with pytest.raises(ugds.Error) as busy:
            ugds.host.unbind(coarse.address)
        assert busy.value.errno == errno.EBUSY
        assert str(holder.pid) in busy.value.cause
        assert coarse.driver == "vfio-pci"
    assert ugds.host.unbind(coarse.address).after == "nvme"


@pytest.mark.boot("iommufd")
def test_what_no_driver_holds_is_moved_by_force_alone(controllers: dict[str, Controller]) -> None:
    small = controllers["small"]
    small.unbind()
    with pytest.raises(ugds.Error) as unknown:
        ugds.host.bind(small.address)
    assert "no driver" in unknown.value.cause
    assert ugds.host.bind(small.address, force=True).after == "vfio-pci"


@pytest.mark.boot("noiommu")
def test_a_machine_without_iommu_is_refused_with_both_ways_out(controllers: dict[str, Controller]) -> None:
    two = controllers["two"]
    two.unbind()
    switch = Path("/sys/module/vfio/parameters/enable_unsafe_noiommu_mode")
    switch.write_text("0")
    with pytest.raises(ugds.Error) as refusal:
        ugds.host.bind(two.address, force=True)
    assert "IOMMU" in refusal.value.cause
    assert "intel_iommu=on" in refusal.value.hint
    assert "enable_unsafe_noiommu_mode" in refusal.value.hint
    assert two.driver is None
    switch.write_text("1")
    assert ugds.host.bind(two.address, force=True).after == "vfio-pci"
