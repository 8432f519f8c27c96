# SPDX-License-Identifier: Apache-2.0
"""Moving a controller: what is written to sysfs, in which order, and how it is taken back."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
from pathlib import Path

import pytest
import ugds
from host_machine import SSD, SSD2, Machine, put
from ugds import cli
from ugds.host import _cli, bind, binding, unbind

OVERRIDE = f"/bus/pci/devices/{SSD}/driver_override"
PROBE = "/bus/pci/drivers_probe"


def unbind_file(driver: str) -> str:
    return f"/bus/pci/drivers/{driver}/unbind"


@pytest.fixture
def blank(machine: Machine) -> Machine:
    """A machine with one SSD, of one blank disk that nothing uses."""
    machine.disk(machine.ssd(), "nvme0n1")
    return machine


@pytest.fixture
def here(blank: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(_cli, "_roots", lambda: blank)
    return blank


def override(machine: Machine) -> str:
    return (machine.pci / "devices" / SSD / "driver_override").read_text().strip()


# --- There and back --------------------------------------------------------------------------------------------------


def test_bind_makes_three_writes_in_order_and_tells_them(blank: Machine) -> None:
    told: list[str] = []
    change = bind("65:00.0", roots=blank, report=told.append)
    assert blank.writes == [(OVERRIDE, "vfio-pci"), (unbind_file("nvme"), SSD), (PROBE, SSD)]
    assert blank.holder() == "vfio-pci"
    assert (change.before, change.after, change.changed, change.uri) == ("nvme", "vfio-pci", True, f"pci:{SSD}")
    assert tuple(told) == change.steps
    assert told == [
        "loaded module vfio-pci",
        f"wrote vfio-pci to {blank.sys}{OVERRIDE}",
        f"wrote {SSD} to {blank.sys}{unbind_file('nvme')}",
        f"wrote {SSD} to {blank.sys}{PROBE}",
        "checked: vfio-pci holds it",
    ]
    assert any(f"{blank.dev}/vfio/12" in hint for hint in change.hints)


def test_unbind_gives_it_back_and_leaves_nothing(blank: Machine) -> None:
    bind(SSD, roots=blank)
    blank.writes.clear()
    change = unbind(SSD, roots=blank)
    assert blank.writes == [(OVERRIDE, "\n"), (unbind_file("vfio-pci"), SSD), (PROBE, SSD)]
    assert (blank.holder(), override(blank)) == ("nvme", "(null)")
    assert (change.before, change.after) == ("vfio-pci", "nvme")
    assert change.hints == (f"its namespaces are {blank.dev}/nvme0n1",)


def test_what_is_bound_already_is_left_alone(blank: Machine) -> None:
    bind(SSD, roots=blank)
    blank.writes.clear()
    again = bind(SSD, roots=blank)
    assert (again.changed, again.uri) == (False, f"pci:{SSD}")
    assert blank.writes == []
    unbind(SSD, roots=blank)
    blank.writes.clear()
    assert not unbind(SSD, roots=blank).changed
    assert blank.writes == []


def test_unbind_clears_an_override_that_would_take_it_away_later(blank: Machine) -> None:
    put(blank.pci / "devices" / SSD / "driver_override", "vfio-pci")
    assert unbind(SSD, roots=blank).changed
    assert blank.writes == [(OVERRIDE, "\n")]
    assert blank.holder() == "nvme"


def test_a_program_s_driver_can_be_changed_for_another(blank: Machine) -> None:
    bind(SSD, roots=blank)
    blank.driver("ugds_drv")
    change = bind(SSD, "ugds_drv", roots=blank)
    assert change.before == "vfio-pci"
    assert blank.holder() == "ugds_drv"
    assert any(f"chown $USER {blank.dev}/ugds_drv0" in hint for hint in change.hints)


def test_unbind_loads_nvme_where_it_is_missing(blank: Machine) -> None:
    bind(SSD, roots=blank)
    for path in sorted((blank.pci / "drivers/nvme").iterdir()):
        path.unlink()
    (blank.pci / "drivers/nvme").rmdir()
    assert unbind(SSD, roots=blank).steps[0] == "loaded module nvme"


def test_the_disk_is_kept_from_others_until_nvme_let_go_and_not_longer(
    blank: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}
    write = blank.write

    def watch(path: Path, value: str) -> None:
        links = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        ]
        seen[path.name] = str(blank.dev / "nvme0n1") in links
        write(path, value)

    monkeypatch.setattr(blank, "write", watch)
    bind(SSD, roots=blank)
    assert seen == {"driver_override": True, "unbind": True, "drivers_probe": False}


# --- Failing on the way ----------------------------------------------------------------------------------------------


def test_a_driver_that_refuses_leads_back_to_nvme(blank: Machine) -> None:
    blank.refusing.add("vfio-pci")
    with pytest.raises(ugds.Error, match="vfio-pci did not take the controller: no driver took it") as caught:
        bind(SSD, roots=blank)
    assert (blank.holder(), override(blank)) == ("nvme", "(null)")
    assert "it was put back to nvme" in caught.value.cause
    assert (caught.value.errno, caught.value.operation, caught.value.device) == (errno.ENODEV, "bind", f"pci:{SSD}")
    assert "dmesg" in caught.value.hint


@pytest.mark.parametrize("file", ["driver_override", "unbind", "drivers_probe"])
def test_a_write_that_fails_is_told_and_the_rest_taken_back(blank: Machine, file: str) -> None:
    blank.broken[file] = errno.EIO
    with pytest.raises(ugds.Error, match=f"{file} failed: Input/output error") as caught:
        bind(SSD, roots=blank)
    if file == "drivers_probe":  # which is what taking back needs, too
        assert "it could not be put back to nvme" in caught.value.cause
        assert "no driver holds it now" in caught.value.cause
    else:
        assert blank.holder() == "nvme"
        assert override(blank) == "(null)"


def test_a_failed_unbind_goes_back_to_the_program_s_driver(blank: Machine) -> None:
    bind(SSD, roots=blank)
    blank.refusing.add("nvme")
    with pytest.raises(ugds.Error, match="it was put back to vfio-pci"):
        unbind(SSD, roots=blank)
    assert (blank.holder(), override(blank)) == ("vfio-pci", "vfio-pci")


def test_a_module_that_cannot_be_loaded_changes_nothing(blank: Machine) -> None:
    blank.loadable.clear()
    with pytest.raises(ugds.Error, match="loading module vfio-pci failed: modprobe: FATAL"):
        bind(SSD, roots=blank)
    assert blank.writes == []
    assert blank.holder() == "nvme"


def test_a_module_that_does_not_exist_is_told_before_anything(blank: Machine) -> None:
    with pytest.raises(ugds.Error, match="this kernel has no module ugds_drv"):
        bind(SSD, "ugds_drv", roots=blank)


def test_without_iommu_it_is_refused_even_if_that_shows_only_after_loading_vfio(machine: Machine) -> None:
    machine.disk(machine.ssd(group=None), "nvme0n1")
    with pytest.raises(ugds.Error, match="no IOMMU group") as caught:
        bind(SSD, roots=machine)
    assert "intel_iommu=on" in caught.value.hint
    assert "noiommu" not in caught.value.hint  # this kernel's vfio has no such mode
    assert machine.writes == []
    put(machine.sys / "module/vfio/parameters/enable_unsafe_noiommu_mode", "N")
    with pytest.raises(ugds.Error, match="no IOMMU group") as caught:
        bind(SSD, roots=machine)
    assert "enable_unsafe_noiommu_mode" in caught.value.hint
    put(machine.sys / "module/vfio/parameters/enable_unsafe_noiommu_mode", "Y")
    assert bind(SSD, roots=machine).changed


def test_an_interrupt_half_way_leads_back(blank: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    write, interrupts = blank.write, [True]

    def interrupted(path: Path, value: str) -> None:
        if path.name == "drivers_probe" and interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        write(path, value)

    monkeypatch.setattr(blank, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bind(SSD, roots=blank)
    assert (blank.holder(), override(blank)) == ("nvme", "(null)")


def test_two_moves_at_once_are_refused(blank: Machine) -> None:
    fd = os.open(blank.pci / "devices" / SSD, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(ugds.Error, match="another process is moving it"):
            bind(SSD, roots=blank)
    finally:
        os.close(fd)
    assert bind(SSD, roots=blank).changed


# --- Addresses -------------------------------------------------------------------------------------------------------


def test_an_address_that_is_not_there_gets_the_nearest(blank: Machine) -> None:
    with pytest.raises(ugds.Error, match=f"did you mean {SSD}") as caught:
        bind("56:00.0", roots=blank)
    assert caught.value.errno == errno.ENODEV


def test_another_kind_of_device_is_refused(blank: Machine) -> None:
    with pytest.raises(ugds.Error, match="not an NVMe controller: its PCI class is 0x060400"):
        bind("0000:64:05.0", roots=blank)


@pytest.mark.parametrize("text", ["65:00", "nvme0", "0000:65:20.0", "0000:65:00.8", "65:00.0 ; x", ""])
def test_what_is_no_address_is_said_to_be_none(blank: Machine, text: str) -> None:
    with pytest.raises(ugds.Error, match="is not a PCI address") as caught:
        bind(text, roots=blank)
    assert caught.value.errno == errno.EINVAL


def test_an_unknown_driver_is_refused(blank: Machine) -> None:
    with pytest.raises(ugds.Error, match="vfio-pci or ugds_drv"):
        bind(SSD, "uio_pci_generic", roots=blank)


# --- The commands ----------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[str, str]:
    assert cli.main(list(arguments)) == status
    return capsys.readouterr()


def test_bind_says_what_it_did_and_what_to_open(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "bind", "65:00.0")
    assert f"{SSD}: from nvme to vfio-pci" in out
    assert f"  wrote vfio-pci to {here.sys}{OVERRIDE}\n" in out
    assert f"to open it: pci:{SSD}\n" in out
    assert "sudo chown" in out
    assert "ulimit -l" in out
    out, _ = run(capsys, "bind", SSD)
    assert "already: nothing was done" in out
    assert f"pci:{SSD}" in out


def test_dry_run_prints_the_steps_and_makes_none(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "bind", SSD, "--dry-run")
    assert f"  write {SSD} to {here.sys}{unbind_file('nvme')}\n" in out
    assert here.writes == []
    assert not (here.pci / "drivers/vfio-pci").exists()
    here.mounted("/dev/nvme0n1", "/srv")
    out, err = run(capsys, "bind", SSD, "--dry-run", status=1)
    assert "would go from nvme to vfio-pci" in out
    assert "mounted at /srv" in err


def test_the_commands_as_json(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    planned = json.loads(run(capsys, "bind", SSD, "--dry-run", "--json")[0])
    assert (planned["before"], planned["after"], planned["refusals"]) == ("nvme", "vfio-pci", [])
    done = json.loads(run(capsys, "bind", SSD, "--json")[0])
    assert (done["before"], done["after"], done["changed"], done["uri"]) == ("nvme", "vfio-pci", True, f"pci:{SSD}")
    assert len(done["steps"]) == 5
    assert json.loads(run(capsys, "unbind", SSD, "--json")[0])["after"] == "nvme"


def test_force_needs_the_address_again(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    put(here.dev / "nvme0n1", b"XFSB" + bytes(1 << 20))
    assert "holds data: xfs" in run(capsys, "bind", SSD, status=1)[1]
    assert f"--confirm {SSD}" in run(capsys, "bind", SSD, "--force", status=2)[1]
    assert "nothing was done" in run(capsys, "bind", SSD, "--force", "--confirm", "66:00.0", status=2)[1]
    assert here.writes == []
    run(capsys, "bind", SSD, "--force", "--confirm", "65:00.0")
    assert here.holder() == "vfio-pci"


def test_force_without_need_asks_for_nothing(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "bind", SSD, "--force")
    assert here.holder() == "vfio-pci"


def test_force_prompts_a_person(
    here: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(here.dev / "nvme0n1", b"XFSB" + bytes(1 << 20))
    master, slave = os.openpty()
    os.write(master, b"66:00.0\n65:00.0\n")
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        assert "nothing was done" in run(capsys, "bind", SSD, "--force", status=2)[1]
        assert "Type its address" in run(capsys, "bind", SSD, "--force")[1]
    os.close(master)
    assert here.holder() == "vfio-pci"


@pytest.mark.parametrize("arguments", [["bind"], ["bind", "65:0"], ["bind", SSD, "--driver", "nvme"], ["unbind", "x"]])
def test_wrong_usage_exits_with_2(here: Machine, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_an_unknown_address_exits_with_1(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"did you mean {SSD}?" in run(capsys, "unbind", SSD2, status=1)[1]


# --- Plans that others overtook --------------------------------------------------------------------------------------


def test_a_plan_from_before_another_move_changes_nothing(blank: Machine) -> None:
    bind(SSD, roots=blank)
    first, second = binding.plan_unbind(blank, SSD), binding.plan_unbind(blank, SSD)
    assert binding.execute(first).after == "nvme"  # from now on its disks may be mounted
    blank.writes.clear()
    with pytest.raises(ugds.Error, match="moved meanwhile: nvme holds it") as caught:
        binding.execute(second)
    assert caught.value.errno == errno.EBUSY
    assert blank.writes == []
    assert blank.holder() == "nvme"


def test_what_nvme_has_by_then_is_not_taken_back_from_it(blank: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    bind(SSD, roots=blank)
    plan = binding.plan_unbind(blank, SSD)
    write = blank.write

    def fail_after_the_probe(path: Path, value: str) -> None:
        write(path, value)
        if str(path).endswith("drivers_probe"):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(blank, "write", fail_after_the_probe)
    with pytest.raises(ugds.Error):
        binding.execute(plan)
    assert blank.holder() == "nvme"


def test_a_move_that_is_ended_from_outside_is_taken_back(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    write = here.write

    def end_at_the_unbind(path: Path, value: str) -> None:
        write(path, value)
        if str(path).endswith("nvme/unbind"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(here, "write", end_at_the_unbind)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    try:
        with pytest.raises(SystemExit) as caught:
            cli.main(["bind", SSD])
        assert caught.value.code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGHUP, before[1])
    assert here.holder() == "nvme"
