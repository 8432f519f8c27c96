# SPDX-License-Identifier: Apache-2.0
"""Runs inside a virtual machine: which tests belong to this boot, the log check after each, and the way to the host.

On the host it only collects: with UGDS_VM_LIST it writes down the tests of each boot."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import devices
import kernel_log
import pytest
from devices import Controller, PciDevice
from host import JOB, Host
from small_nvme import SmallNvme

from drv import DrvFile, node_of

BOOT = os.environ.get("UGDS_VM_BOOT", "")
LIMIT = 90.0
LEAKS = Path("/sys/kernel/debug/kmemleak")
#: The drivers that hand controllers out, for tests that do not say in which way they open them.
TRANSPORTS = ["vfio-pci", "ugds_drv"]


def boots_of(item: pytest.Item) -> list[str]:
    """The boots of a test: those that its own marks, and those of its parameters, have in common; else its file's."""
    own = [mark for mark in item.own_markers if mark.name == "boot"]
    marks = own or list(item.iter_markers("boot"))
    if not marks:
        raise pytest.UsageError(f"{item.nodeid} belongs to no boot: mark it with pytest.mark.boot(…)")
    return [name for name in marks[0].args if all(name in mark.args for mark in marks)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not BOOT:
        return
    selected = set((JOB / "selected").read_text().splitlines())
    mine = [item for item in items if item.nodeid in selected]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in selected])
    items[:] = mine


def pytest_collection_finish(session: pytest.Session) -> None:
    if path := os.environ.get("UGDS_VM_LIST"):
        tests: dict[str, list[str]] = {}
        for item in session.items:
            for boot in boots_of(item):
                tests.setdefault(boot, []).append(item.nodeid)
        Path(path).write_text(json.dumps(tests))
    elif BOOT:
        note(collected=len(session.items))


def note(**entry: Any) -> None:
    """Tells the host at once: what a guest that hangs had noted is all that is left of it."""
    with (JOB / "progress").open("a") as file:
        file.write(json.dumps(entry) + "\n")


_phases: dict[str, list[pytest.TestReport]] = {}


def pytest_runtest_logstart(nodeid: str) -> None:
    if BOOT:
        note(test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _phases.setdefault(report.nodeid, []).append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    if not BOOT:
        return
    reports = _phases.pop(nodeid, [])
    failed = [report for report in reports if report.failed]
    left_out = [report for report in reports if report.skipped]
    if failed:
        texts = [f"({report.when}) {report.longreprtext}" for report in failed]
        texts += [f"{title}\n{text}" for title, text in failed[-1].sections]
        note(test=nodeid, outcome="failed", report="\n".join(texts))
    elif left_out:
        why = left_out[0].longrepr
        note(test=nodeid, outcome="skipped", report=str(why[2] if isinstance(why, tuple) else why))
    else:
        note(test=nodeid, outcome="passed")


@pytest.fixture(scope="session")
def _kernel_log() -> Iterator[kernel_log.KernelLog]:
    log = kernel_log.KernelLog()
    if LEAKS.exists():
        LEAKS.write_text("scan=off")  # looks when a test asks it to, not in the middle of some other
    yield log
    log.close()


@pytest.fixture(autouse=True)
def quiet_kernel(request: pytest.FixtureRequest, _kernel_log: kernel_log.KernelLog) -> Iterator[None]:
    """Fails a test during which the kernel complained. It ends after every other fixture, since it was made first."""
    _kernel_log.new_lines()
    yield
    marker = request.node.get_closest_marker("provokes")
    tolerated = request.node.get_closest_marker("tolerates")
    words = [mark.args if mark else () for mark in (marker, tolerated)]
    wrong = kernel_log.judge(_kernel_log.new_lines(), *words)
    if wrong:
        pytest.fail(wrong, pytrace=False)


@pytest.fixture(autouse=True)
def in_time(request: pytest.FixtureRequest, quiet_kernel: None) -> Iterator[None]:
    """Fails a test that takes too long; ends the run if even that does not stop it."""
    marker = request.node.get_closest_marker("limit")
    seconds = float(marker.args[0]) if marker else LIMIT

    def stop(_number: int, _frame: FrameType | None) -> None:
        pytest.fail(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + 30, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def machine() -> dict[str, Any]:
    """This boot, as boots.py describes it."""
    described: dict[str, Any] = json.loads((JOB / "boot.json").read_text())
    return described


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """The host: QEMU's monitors, and the bytes of disk images and peer memory as it sees them."""
    asked = Host()
    yield asked
    asked.close()


@pytest.fixture(scope="session")
def controllers(machine: dict[str, Any]) -> dict[str, Controller]:
    """The NVMe controllers of this boot, by name."""
    return devices.controllers(machine)


@pytest.fixture
def controller(controllers: dict[str, Controller]) -> Callable[[str], Controller]:
    """A controller by its name."""
    return controllers.__getitem__


@pytest.fixture(scope="session")
def peer(machine: dict[str, Any]) -> PciDevice:
    """The device whose BAR 2 is plain memory: the stand-in for a GPU's."""
    return PciDevice("peer", machine["peer"]["glob"], machine["peer"]["port"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that opens controllers and does not say how has one run for each driver that hands them out."""
    says = "way" in metafunc.function.__code__.co_varnames or metafunc.definition.get_closest_marker("transport")
    if "transport" in metafunc.fixturenames and not says:
        metafunc.parametrize("transport", TRANSPORTS, indirect=True)


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    """The driver that hands controllers out where a test does not say in which way they are opened."""
    marker = request.node.get_closest_marker("transport")
    return str(marker.args[0] if marker else getattr(request, "param", TRANSPORTS[0]))


@pytest.fixture
def uri_of(machine: dict[str, Any], controllers: dict[str, Controller], transport: str) -> Callable[..., str]:
    """Gives a controller to a driver, and what to open then: `uri_of("two", "type1", ns=2)`. The way is one of vfio's
    IOMMU interfaces, or "ugds_drv". Without one, as a user would open it, who has to say so where vfio finds no
    IOMMU."""

    def make(name: str, way: str = "", **parameters: Any) -> str:
        if way == "ugds_drv" or (not way and transport == "ugds_drv"):
            if (reason := JOB / "no-module").exists():
                pytest.skip(reason.read_text())
            controllers[name].bind("ugds_drv")
        else:
            give_to_vfio(machine, controllers[name])
            way = way or ("" if machine["iommu"] else "none")
            parameters = {**({"iommu": way} if way else {}), **parameters}
        query = "&".join(f"{key}={value}" for key, value in parameters.items())
        return f"{controllers[name].uri}?{query}" if query else controllers[name].uri

    return make


@pytest.fixture
def open_ssd(uri_of: Callable[..., str]) -> Iterator[Callable[..., Any]]:
    """Opens a controller by its name, in the way that `uri_of` takes: `open_ssd("two", "type1", ns=2, queues=1)`. What
    it opened is closed at the end of the test."""
    import ugds

    with ExitStack() as stack:

        def open_one(name: str, way: str = "", ns: int = 0, **options: Any) -> ugds.Device:
            uri = uri_of(name, way, **({"ns": ns} if ns else {}))
            return stack.enter_context(ugds.open(uri, **options))

        yield open_one


def give_to_vfio(machine: dict[str, Any], device: PciDevice) -> None:
    if not machine["iommu"]:
        Path("/sys/module/vfio/parameters/enable_unsafe_noiommu_mode").write_text("1")
    device.bind("vfio-pci")


@pytest.fixture
def vfio(machine: dict[str, Any], controllers: dict[str, Controller]) -> Callable[[str], Controller]:
    """A controller by its name, given to vfio-pci."""

    def give(name: str) -> Controller:
        give_to_vfio(machine, controllers[name])
        return controllers[name]

    return give


@pytest.fixture
def drv(controllers: dict[str, Controller]) -> Iterator[Callable[[str], Controller]]:
    """A controller by its name, given to ugds_drv; taken from it at the end of the test."""
    if (reason := JOB / "no-module").exists():
        pytest.skip(reason.read_text())
    given: list[Controller] = []

    def give(name: str) -> Controller:
        controllers[name].bind("ugds_drv")
        given.append(controllers[name])
        return controllers[name]

    yield give
    for controller in given:
        if controller.present:
            controller.unbind()


@pytest.fixture
def open_drv(drv: Callable[[str], Controller]) -> Iterator[Callable[[str], DrvFile]]:
    """Opens the node of a controller, by its name. It is closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(DrvFile(node_of(drv(name))))


@pytest.fixture
def drive(open_drv: Callable[[str], DrvFile]) -> Iterator[Callable[..., SmallNvme]]:
    """Enables a controller, by its name, through ugds_drv: `drive("two")` has an admin queue and one for I/O."""
    with ExitStack() as stack:

        def start(name: str, **options: Any) -> SmallNvme:
            nvme = SmallNvme(open_drv(name), **options)
            stack.callback(nvme.close)
            return nvme

        yield start


@pytest.fixture
def slow(host: Host) -> Iterator[Callable[[str, int], None]]:
    """Makes a drive slow for the rest of the test: `slow("two1", bytes_a_second)`."""
    slowed: list[str] = []

    def make(drive: str, bytes_a_second: int) -> None:
        slowed.append(drive)
        host.throttle(drive, bytes_a_second)

    yield make
    for drive in slowed:
        host.throttle(drive, 0)
