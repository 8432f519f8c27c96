# SPDX-License-Identifier: Apache-2.0
"""`ugds devices`, `ugds bind` and `ugds unbind`. What they need is imported when they run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING

from ugds import _report
from ugds._report import CommandError

if TYPE_CHECKING:
    from ugds.host._errors import Refusal
    from ugds.host.binding import Change, Plan
    from ugds.host.roots import Roots

MakeCommand = Callable[..., argparse.ArgumentParser]
NO_CONTROLLER = "no NVMe controller here (PCI class 0x010802); `ugds demo` and emulated:1GiB work without one"


def address(text: str) -> str:
    from ugds.host import pci

    try:
        return pci.parse_address(text)
    except pci.AddressError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _roots() -> Roots:
    from ugds.host.roots import Roots

    return Roots()


def devices(arguments: argparse.Namespace) -> int:
    from ugds.host import _tables, controllers, pci

    roots = _roots()
    if arguments.address:
        found = [controllers.describe(roots, pci.find_nvme(roots, arguments.address, "devices"))]
    else:
        found = controllers.devices(roots)
    if arguments.json:
        for controller in found:
            print(json.dumps(controller.as_dict()))
    if not found:
        folder = roots.sys / "bus/pci/devices"
        print(
            NO_CONTROLLER if folder.is_dir() else f"{NO_CONTROLLER}\n({folder} is absent)",
            file=sys.stderr if arguments.json else sys.stdout,
        )
    elif not arguments.json:
        console = _report.console()
        for part in _tables.tables(found):
            console.print(part, soft_wrap=isinstance(part, str))  # a path that is cut in two is of no use
    return 0


def bind(arguments: argparse.Namespace) -> int:
    from ugds.host import binding

    with ExitStack() as held:
        plan = binding.plan_bind(_roots(), arguments.address, arguments.driver, held)
        if arguments.dry_run:
            return _dry_run(plan, arguments)
        plan.refuse(arguments.force)
        overridden = [refusal for refusal in plan.refusals if refusal.forcible]
        if overridden:
            _confirm(plan.address, overridden, arguments.confirm)
        return _execute(plan, arguments, held.close)


def unbind(arguments: argparse.Namespace) -> int:
    from ugds.host import binding

    plan = binding.plan_unbind(_roots(), arguments.address)
    if arguments.dry_run:
        return _dry_run(plan, arguments)
    plan.refuse(force=False)
    return _execute(plan, arguments, lambda: None)


def _confirm(wanted: str, overridden: Sequence[Refusal], given: str | None) -> None:
    """Has the address typed again. Raises CommandError (2) where it is not, or is another."""
    reasons = "\n".join(f"  - {refusal.reason}" for refusal in overridden)
    if given is None:
        if not sys.stdin.isatty():
            raise CommandError(
                f"--force needs the address once more: --confirm {wanted}\n{reasons}\n  this would be at risk", status=2
            )
        print(f"{wanted} is given to a program in spite of this:\n{reasons}", file=sys.stderr)
        print("All data on it is at risk. Type its address to go on: ", end="", file=sys.stderr, flush=True)
        given = sys.stdin.readline().strip()
    try:
        typed = address(given)
    except argparse.ArgumentTypeError:
        typed = ""
    if typed != wanted:
        raise CommandError(f'"{given}" is not {wanted}: nothing was done', status=2)


def _dry_run(plan: Plan, arguments: argparse.Namespace) -> int:
    """What would be done; then what forbids it, as the error that the real run would end with."""
    steps = [step.words("write", "load") for step in plan.steps]
    force = getattr(arguments, "force", False)
    if arguments.json:
        fields = {"operation": plan.operation, "address": plan.address, "before": plan.before or "none"}
        refusals = [dataclasses.asdict(refusal) for refusal in plan.refusals]
        print(json.dumps({**fields, "after": plan.driver, "dry_run": True, "steps": steps, "refusals": refusals}))
    elif plan.done:
        print(f"{plan.address} is held by {plan.before} already: nothing would be done")
    else:
        print(f"{plan.address} would go from {plan.before or 'no driver'} to {plan.driver}:")
        print("\n".join(f"  {step}" for step in steps))
    sys.stdout.flush()
    plan.refuse(force)
    return 0


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _execute(plan: Plan, arguments: argparse.Namespace, released: Callable[[], None]) -> int:
    from ugds.host import binding

    # Ended from outside, it takes back what it did.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    if arguments.json:
        change = binding.execute(plan, released=released)
        print(json.dumps(dataclasses.asdict(change)))
        return 0
    if not plan.done:
        print(f"{plan.address}: from {plan.before or 'no driver'} to {plan.driver}", flush=True)
    # Each step is printed when it is made: if one hangs in the kernel, it is seen which.
    change = binding.execute(plan, lambda words: print(f"  {words}", flush=True), released)
    _conclude(change)
    return 0


def _conclude(change: Change) -> None:
    if not change.changed:
        print(f"{change.address} is held by {change.after} already: nothing was done")
    if change.operation == "bind":
        print(f"to open it: pci:{change.address}")
    for hint in change.hints:
        print(hint)


def add_commands(command: MakeCommand) -> None:
    """Adds the commands; `command(name, run, summary, epilog)` makes one."""
    shown = command(
        "devices",
        devices,
        "NVMe controllers: what holds them, what is on them, how they can be reached, and how far the GPUs are",
        "examples:\n"
        "  ugds devices\n"
        "  sudo ugds devices                 with what the disks hold\n"
        "  ugds devices 65:00.0 --json\n\n"
        "What cannot be found out is shown as unknown, with the reason. docs/devices.md explains each column.",
    )
    shown.add_argument("address", nargs="?", type=address, metavar="PCI-ADDRESS", help="one controller, not all")
    bound = command(
        "bind",
        bind,
        "take a controller from the kernel, for a program to drive it",
        "examples:\n"
        "  sudo ugds bind 0000:65:00.0\n"
        "  sudo ugds bind 65:00.0 --dry-run       what would be done, and what forbids it\n"
        "  sudo ugds bind 65:00.0 --force --confirm 65:00.0\n\n"
        "It is refused while anything uses a disk of the controller. --force overrides one kind of refusal: that of a\n"
        "partition table, a file system or another signature on a disk that nothing uses.",
    )
    bound.add_argument(
        "--driver", choices=("vfio-pci", "ugds_drv"), default="vfio-pci", help="%(default)s is the default"
    )
    bound.add_argument("--force", action="store_true", help="whatever is on it may be lost")
    bound.add_argument("--confirm", metavar="ADDRESS", help="the address again, for --force in a script")
    given_back = command(
        "unbind",
        unbind,
        "give a controller back to the kernel's nvme driver",
        "examples:\n  sudo ugds unbind 0000:65:00.0\n  sudo ugds unbind 65:00.0 --dry-run\n\n"
        "It is refused while a program has the controller open.",
    )
    for parser in (bound, given_back):
        parser.add_argument("address", type=address, metavar="PCI-ADDRESS", help="as 0000:65:00.0 or 65:00.0")
        parser.add_argument("--dry-run", action="store_true", help="print the steps, and make none")
    for parser in (shown, bound, given_back):
        parser.add_argument("--json", action="store_true", help="one JSON object a line instead of text")
