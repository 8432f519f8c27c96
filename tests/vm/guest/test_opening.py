# SPDX-License-Identifier: Apache-2.0
"""What cannot be opened or mapped is refused with the reason and the remedy, and changes nothing."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support
import ugds
from devices import Controller, PciDevice
from host import Host
from support import MIB, WITHOUT_LOCK_PRIVILEGE, write_and_read

Open = Callable[..., ugds.Device]
Vfio = Callable[[str], Controller]
UriOf = Callable[..., str]
pytestmark = pytest.mark.boot("iommufd", "debian")


def refused(uri: str, **options: Any) -> ugds.Error:
    """The error of an opening that must fail, which leaves no descriptor behind."""
    before = support.descriptors()
    with pytest.raises(ugds.Error) as raised:
        ugds.open(uri, **options)
    error = raised.value
    assert support.descriptors() == before
    assert error.operation == "open"
    assert error.device == uri
    assert error.cause
    assert error.hint
    return error


@pytest.mark.boot("iommufd", "debian", "noiommu")
def test_a_controller_that_no_driver_holds_is_refused_with_the_command_that_helps(
    controller: Callable[[str], Controller],
) -> None:
    two = controller("two")
    two.unbind()
    error = refused(two.uri)
    assert error.errno == errno.ENXIO
    assert "no driver" in error.cause
    assert f"ugds bind {two.address}" in error.hint


@pytest.mark.boot("debian")
def test_a_controller_that_the_kernel_uses_is_refused_and_left_alone(controller: Callable[[str], Controller]) -> None:
    two = controller("two")
    two.bind("nvme")
    try:
        error = refused(two.uri)
        assert error.errno == errno.ENXIO
        assert "driver nvme" in error.cause
        assert two.driver == "nvme"
    finally:
        two.unbind()


@pytest.mark.parametrize(
    ("uri", "code", "word"),
    [
        ("pci:0000:ff:1f.7", errno.ENODEV, "no PCI device"),
        ("pci:not-an-address", errno.EINVAL, "no PCI address"),
        ("pci:0000:01:00.0?iomu=type1", errno.EINVAL, "iommu"),
        ("pci:0000:01:00.0?ns=0", errno.EINVAL, "ns"),
        ("pci:0000:01:00.0?iommu=maybe", errno.EINVAL, "type1"),
    ],
)
@pytest.mark.boot("iommufd")
def test_what_is_wrong_with_a_uri_is_said(uri: str, code: int, word: str) -> None:
    error = refused(uri)
    assert error.errno == code
    assert word in str(error)


def test_a_device_of_another_class_is_refused(peer: PciDevice) -> None:
    error = refused(f"pci:{peer.address}")
    assert error.errno == errno.EINVAL
    assert "not an NVMe controller" in error.cause


def test_the_iommu_is_not_done_without_where_there_is_one(vfio: Vfio) -> None:
    error = refused(f"{vfio('two').uri}?iommu=none")
    assert error.errno == errno.EINVAL
    assert "has an IOMMU" in error.cause


@pytest.mark.boot("debian")
def test_a_kernel_without_device_nodes_says_what_works_instead(vfio: Vfio) -> None:
    error = refused(f"{vfio('two').uri}?iommu=iommufd")
    assert error.errno == errno.EOPNOTSUPP
    assert "iommu=type1" in error.hint


@pytest.mark.boot("noiommu")
@pytest.mark.parametrize(("way", "code"), [("", errno.EPERM), ("?iommu=type1", errno.ENODEV)])
def test_a_machine_without_iommu_is_refused_unless_that_is_asked_for(vfio: Vfio, way: str, code: int) -> None:
    error = refused(f"{vfio('two').uri}{way}")
    assert error.errno == code
    assert "no IOMMU" in error.cause
    assert "iommu=none" in error.hint


@pytest.mark.boot("noiommu")
def test_going_without_iommu_is_warned_of(vfio: Vfio, capfd: pytest.CaptureFixture[str]) -> None:
    with ugds.open(f"{vfio('two').uri}?iommu=none") as ssd:
        assert ssd.state == "ready"
    assert "without an IOMMU" in capfd.readouterr().err


HOLD = """
import sys, ugds
with ugds.open(sys.argv[1]) as ssd:
    print(ssd.state, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("way", support.WAYS)
@pytest.mark.boot("iommufd", "debian", "noiommu")
def test_a_second_process_is_told_that_the_controller_is_in_use(uri_of: UriOf, open_ssd: Open, way: str) -> None:
    uri = uri_of("two", way)
    with support.child(HOLD, uri) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        lines = iter(holder.stdout)
        assert any("ready" in line for line in lines)
        error = refused(uri)
        assert error.errno == errno.EBUSY
        assert "in use" in error.cause
        holder.stdin.close()
        assert holder.wait(timeout=30) == 0
    with open_ssd("two", way) as ssd:
        write_and_read(ssd, 0, 4096, seed=2)


@pytest.mark.parametrize("way", support.WAYS)
@pytest.mark.boot("iommufd", "debian", "noiommu")
def test_a_second_opening_in_the_process_is_refused_and_the_first_goes_on(open_ssd: Open, way: str) -> None:
    with open_ssd("two", way) as ssd:
        for ns in (1, 2):
            with pytest.raises(ugds.Error) as busy:
                open_ssd("two", way, ns=ns)
            assert busy.value.errno == errno.EBUSY
            assert busy.value.hint
        write_and_read(ssd, 4096, 8192, seed=3)


REGISTER = """
import resource, sys, ugds
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[2]), int(sys.argv[2])))
try:
    with ugds.open(sys.argv[1], queues=1, depth=8) as ssd:
        try:
            ugds.empty("16MiB")
        except ugds.Error as error:
            print("register", error.errno, error.cause, "|", error.hint)
        with ugds.empty(65536) as small:
            print("small", ssd.read(small))
except ugds.Error as error:
    print("open", error.errno, error.cause, "|", error.hint)
"""


@pytest.mark.parametrize("way", support.IOMMU_WAYS)
def test_a_limit_of_locked_memory_that_is_too_small_is_named_with_its_remedy(uri_of: UriOf, way: str) -> None:
    uri = uri_of("two", way)
    status, said = support.run_child(REGISTER, uri, str(4 * MIB), prefix=WITHOUT_LOCK_PRIVILEGE)
    assert status == 0, said
    assert f"register {errno.ENOMEM}" in said
    assert "4 MiB" in said
    assert "ulimit -l" in said
    assert "small 65536" in said
    status, said = support.run_child(REGISTER, uri, "4096", prefix=WITHOUT_LOCK_PRIVILEGE)
    assert f"open {errno.ENOMEM}" in said
    assert "ulimit -l" in said


PINNED = """
import sys, ugds
def pinned():
    rows = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return sum(int(rows[name].split()[0]) for name in ("VmLck", "VmPin"))
before = pinned()
with ugds.open(sys.argv[1]) as ssd:
    idle = pinned()
    with ugds.empty("8MiB") as buffer:
        ssd.read(buffer)
        held = pinned()
    print("kept", held - idle, pinned() - idle)
print("closed", pinned() - before)
"""


@pytest.mark.parametrize("way", support.IOMMU_WAYS)
def test_closing_a_registration_unpins_its_pages_and_closing_the_device_the_rest(uri_of: UriOf, way: str) -> None:
    uri = uri_of("two", way)
    limited = ("prlimit", f"--memlock={64 * MIB}", *WITHOUT_LOCK_PRIVILEGE)
    status, said = support.run_child(PINNED, uri, prefix=limited)
    assert status == 0, said
    assert "kept 8192 0" in said  # KiB
    assert "closed 0" in said


def test_a_user_who_may_not_open_the_nodes_is_told_which(vfio: Vfio) -> None:
    program = "import sys, ugds\ntry: ugds.open(sys.argv[1])\nexcept ugds.Error as e: print(e.errno, e, '|', e.hint)"
    prefix = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    status, said = support.run_child(program, vfio("two").uri, prefix=prefix)
    assert status == 0, said
    assert said.startswith(f"{errno.EACCES} ")
    assert "/dev/vfio/" in said
    assert "udev" in said


@pytest.mark.parametrize("way", support.WAYS)
@pytest.mark.boot("iommufd", "debian", "noiommu")
def test_a_forked_child_is_refused_and_the_parent_goes_on(open_ssd: Open, way: str) -> None:
    with open_ssd("two", way) as ssd, ugds.empty(4096) as buffer:
        write_and_read(ssd, 0, 8192, seed=4)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                ssd.read(buffer)
                said = "read"
            except ugds.Error as error:
                said = f"{error.errno} {error}"
            os.write(writer, f"{said} {support.descriptors()}".encode())
            os._exit(0)
        os.waitpid(pid, 0)
        said = os.read(reader, 4096).decode()
        os.close(reader)
        os.close(writer)
        assert "fork" in said
        assert "/dev/vfio" not in said, "the child has the device open"
        write_and_read(ssd, 0, 8192, seed=5)


@pytest.mark.parametrize("way", support.IOMMU_WAYS)
def test_read_only_memory_is_written_from_and_never_read_into(open_ssd: Open, host: Host, way: str) -> None:
    path, data = Path("/dev/shm/read-only"), support.noise(64 * 1024, 6)
    path.write_bytes(data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        with open_ssd("two", way) as ssd, ugds.register(memory) as buffer:
            assert buffer.readonly
            assert ssd.write(buffer, MIB) == len(data)
            assert host.read_image("two1", MIB, len(data)) == data
            with pytest.raises(ugds.Error) as into:
                ssd.read(buffer, 0)
            assert into.value.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.EINVAL)
        assert path.read_bytes() == data
    path.unlink()
