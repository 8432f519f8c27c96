# SPDX-License-Identifier: Apache-2.0
"""Moving a controller between the kernel's nvme driver and a program. All that is changed, and all that is remembered,
is in sysfs: `driver_override` of a device names the only driver that may take it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ugds._core import Error
from ugds.host import checks, nvme, pci, transports
from ugds.host._errors import Refusal, failure, refused
from ugds.host.roots import Reader, Roots

Report = Callable[[str], None]
_SEE_KERNEL = "the kernel's log says why: sudo dmesg | tail"


@dataclass(frozen=True)
class Step:
    """One thing that is done to the machine."""

    target: Path | None  #: a file of sysfs; None for loading the module `value`
    value: str

    def words(self, write: str = "wrote", load: str = "loaded") -> str:
        if self.target is None:
            return f"{load} module {self.value}"
        return f"{write} {self.value.strip() or 'an empty line'} to {self.target}"


@dataclass(frozen=True)
class Change:
    """What `bind` or `unbind` did. `steps` are in order, in words; with `changed` false there was nothing to do."""

    operation: str
    address: str
    before: str
    after: str
    changed: bool
    steps: tuple[str, ...] = ()
    uri: str = ""  #: what to open now
    hints: tuple[str, ...] = ()


@dataclass
class Plan:
    """A move that has been looked at and not been made."""

    roots: Roots
    operation: str
    address: str
    driver: str  #: that shall take the controller
    before: str | None
    override: str | None  #: what driver_override was
    steps: list[Step] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    @property
    def device(self) -> Path:
        return pci.device_path(self.roots, self.address)

    @property
    def done(self) -> bool:
        """There is nothing to do."""
        return not self.steps

    def refuse(self, force: bool) -> None:
        """Raises ugds.Error (EBUSY) with every refusal that stands."""
        standing = [refusal for refusal in self.refusals if not (force and refusal.forcible)]
        if standing:
            raise refused(self.operation, self.address, standing)


def _steps(roots: Roots, address: str, driver: str, override: str) -> list[Step]:
    device, bus = pci.device_path(roots, address), roots.sys / "bus/pci"
    current = pci.driver_of(device)
    steps = [] if (bus / "drivers" / driver).is_dir() else [Step(None, driver)]
    if pci.override_of(device) != (override.strip() or None):
        steps.append(Step(device / "driver_override", override))
    if current is not None:
        steps.append(Step(bus / "drivers" / current / "unbind", address))
    return [*steps, Step(bus / "drivers_probe", address)]


def plan_bind(roots: Roots, text: str, driver: str, held: ExitStack) -> Plan:
    """Looks at what `bind` would do. Raises ugds.Error where there is no such controller."""
    address = pci.find_nvme(roots, text, "bind")
    if driver not in transports.DRIVERS:
        hint = f"it can be {' or '.join(transports.DRIVERS)}"
        raise failure(errno.EINVAL, "bind", address, f"{driver} is no driver for it", hint)
    device = pci.device_path(roots, address)
    plan = Plan(roots, "bind", address, driver, pci.driver_of(device), pci.override_of(device))
    if plan.before != driver:
        plan.steps = _steps(roots, address, driver, driver)
        plan.refusals = checks.before_binding(roots, address, driver, held)
    return plan


def plan_unbind(roots: Roots, text: str) -> Plan:
    """Looks at what `unbind` would do. Raises ugds.Error where there is no such controller."""
    address = pci.find_nvme(roots, text, "unbind")
    device = pci.device_path(roots, address)
    plan = Plan(roots, "unbind", address, "nvme", pci.driver_of(device), pci.override_of(device))
    if plan.before != "nvme":
        plan.steps = _steps(roots, address, "nvme", "\n")
        plan.refusals = checks.before_unbinding(roots, address)
    elif plan.override not in (None, "nvme"):
        # It would go to another driver at the next start or rescan.
        plan.steps = [Step(device / "driver_override", "\n")]
        plan.refusals = list(checks.may_write(roots, address))
    return plan


class _Mover:
    """Makes the steps of a plan, tells of each as it is made, and takes them back where one fails."""

    def __init__(self, plan: Plan, report: Report, released: Callable[[], None]) -> None:
        self.plan, self.roots, self.report, self.released = plan, plan.roots, report, released
        self.made: list[str] = []
        self.touched = False
        self.taken = False  # the former driver was made to let go, by us

    def tell(self, words: str) -> None:
        self.made.append(words)
        self.report(words)

    def make(self, step: Step) -> None:
        if step.target is None:
            self.roots.modprobe(step.value)
        else:
            letting_go = step.target.name == "unbind"
            # Before it is made: what ends us in the middle of it must know.
            self.touched, self.taken = True, self.taken or letting_go
            try:
                self.roots.write(step.target, step.value)
            except OSError:
                self.taken = self.taken and not letting_go
                raise
        self.tell(step.words())

    def fail(self, code: int, cause: str, hint: str) -> Error:
        """The error to raise, after what was done has been taken back."""
        plan = self.plan
        if self.touched:
            restored = self.restore()
            cause = f"{cause}; {restored}"
        return failure(code, plan.operation, plan.address, cause, hint)

    def check(self) -> None:
        """Between the look at the controller and the lock somebody else may have moved it."""
        plan = self.plan
        now, override = pci.driver_of(plan.device), pci.override_of(plan.device)
        if (now, override) != (plan.before, plan.override):
            cause = f"it was moved meanwhile: {now or 'no driver'} holds it, and it was {plan.before or 'no driver'}"
            raise failure(errno.EBUSY, plan.operation, plan.address, cause, "look at it (ugds devices), and repeat")

    def move(self) -> None:
        plan = self.plan
        self.check()
        for step in plan.steps:
            try:
                self.make(step)
            except OSError as error:
                what = step.words("writing", "loading")
                raise self.fail(error.errno or errno.EIO, f"{what} failed: {error.strerror}", _SEE_KERNEL) from None
            if step.target is None and step.value == "vfio-pci":
                problem = checks.no_iommu(self.roots, plan.address)
                if problem:
                    raise refused(plan.operation, plan.address, [problem])
            if step.target is not None and step.target.name == "unbind":
                self.released()
        found = pci.driver_of(plan.device)
        if found != plan.driver:
            took = f"{found} took it" if found else "no driver took it"
            raise self.fail(errno.ENODEV, f"{plan.driver} did not take the controller: {took}", _SEE_KERNEL)
        self.tell(f"checked: {plan.driver} holds it")

    def restore(self) -> str:
        """Puts the controller back to where it was. Says what came of it."""
        plan, bus = self.plan, self.roots.sys / "bus/pci"
        self.released()
        steps = []
        current = pci.driver_of(plan.device)
        # Only what was done here is undone; and what nvme has by now may be mounted.
        ours = (self.taken or plan.before is None) and current != "nvme"
        if current != plan.before and ours:
            if current is not None:
                steps.append(Step(bus / "drivers" / current / "unbind", plan.address))
            if plan.before is not None:
                # By name, since several drivers may match it, and then back to what was asked for before.
                steps.append(Step(plan.device / "driver_override", plan.before))
                steps.append(Step(bus / "drivers_probe", plan.address))
        steps.append(Step(plan.device / "driver_override", plan.override or "\n"))
        problem = ""
        for step in steps:
            try:
                self.roots.write(step.target or Path(), step.value)
                self.tell(f"taking back: {step.words()}")
            except OSError as error:
                problem = f": {step.words('writing')} failed: {error.strerror}"
                self.tell(f"taking back failed{problem}")
        now = pci.driver_of(plan.device)
        if now == plan.before:
            whole = "it was put back to" if now != current else "it is still held by"
            return f"{whole} {now}{problem}" if now else f"it is without a driver, as it was{problem}"
        return f"and it could not be put back to {plan.before}{problem}: {now or 'no driver'} holds it now"


def execute(plan: Plan, report: Report = lambda words: None, released: Callable[[], None] = lambda: None) -> Change:
    """Makes a planned move. `report` is told of every step as it is made; `released` is called when the former driver
    has let go. Raises ugds.Error, after taking back what was done."""
    before = plan.before or "none"
    uri = f"pci:{plan.address}" if plan.operation == "bind" else ""
    if plan.done:
        return Change(plan.operation, plan.address, before, before, False, uri=uri, hints=_hints(plan))
    mover = _Mover(plan, report, released)
    try:
        with plan.roots.locked(plan.device):
            try:
                mover.move()
            except (KeyboardInterrupt, SystemExit):  # half a move is nobody's wish
                if mover.touched:
                    mover.restore()
                raise
    except BlockingIOError:
        cause = "another process is moving it"
        raise failure(errno.EBUSY, plan.operation, plan.address, cause, "wait for that one") from None
    if plan.driver == "nvme":
        _await_disks(plan)
    return Change(plan.operation, plan.address, before, plan.driver, True, tuple(mover.made), uri, _hints(plan))


def _await_disks(plan: Plan, seconds: float = 5.0) -> None:
    """The nvme driver scans for namespaces after it has taken a controller."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        kernel = nvme.kernel_view(plan.roots, plan.device, Reader())
        if kernel is not None and kernel.state == "live" and kernel.namespaces:
            return
        time.sleep(0.05)


def _hints(plan: Plan) -> tuple[str, ...]:
    if plan.operation == "unbind":
        kernel = nvme.kernel_view(plan.roots, plan.device, Reader())
        disks = [str(plan.roots.dev / one.disk.name) for one in kernel.namespaces] if kernel else []
        return (f"its namespaces are {', '.join(disks)}",) if disks else ()
    roots, user = plan.roots, os.environ.get("SUDO_USER", "$USER")
    hints = []
    group = pci.iommu_group(plan.device)
    node = transports.drv_node(roots, plan.address)
    if plan.driver == "ugds_drv":
        if node is not None and transports.is_translated(roots, plan.address):
            hints.append(f"to use it without being root: sudo chown {user} {roots.dev / node}")
        elif node is not None:
            hints.append(f"its node is {roots.dev / node}; no IOMMU translates its addresses: only root may open it")
    elif group is not None and pci.is_noiommu(roots, group):
        hints.append("it has no IOMMU: only root may open it, and nothing keeps it from memory of others")
    elif group is not None:
        nodes = [transports.group_node(roots, group), transports.cdev_node(roots, plan.address)]
        paths = " ".join(str(roots.dev / node) for node in nodes if node)
        hints.append(f"to use it without being root: sudo chown {user} {paths}")
    hints.append("without root, the limit of locked memory (ulimit -l) bounds how much can be mapped: raise it")
    return tuple(hints)
