# SPDX-License-Identifier: Apache-2.0
"""The virtual machine suite: boots each machine of boots.py in turn and runs its tests in it. `./test --vm` calls this.

    python tests/vm/run.py                      every boot
    python tests/vm/run.py --boot iommufd       one
    python tests/vm/run.py -k removal           the tests of that name, in the boots that have some
    python tests/vm/run.py --boot debian --command 'lspci -nn'

The last line is "N passed, N failed, N skipped"; the exit status is 0 if none failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import kernel
import machine
import module
import qemu
from boots import BOOTS, Boot
from machine import ROOT, Outcome
from qemu import Unavailable

GUEST_TESTS = Path(__file__).resolve().parent / "guest"
STATE = ROOT / "build" / "vm"


def collect(guest_tests: Path, expression: str) -> dict[str, list[str]]:
    """The tests of each boot, by pytest's own collection on the host. Raises Unavailable with pytest's words."""
    with tempfile.NamedTemporaryFile(suffix=".json") as listed:
        command = [sys.executable, "-m", "pytest", "-c", str(guest_tests / "pytest.ini"), "--collect-only", "-q"]
        command += ["-p", "no:cacheprovider", *(["-k", expression] if expression else []), str(guest_tests)]
        settings = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1", "UGDS_VM_LIST": listed.name}
        environment = {**os.environ, **settings}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode not in (0, 5):  # 5: nothing was selected
            raise Unavailable(f"the guest's tests cannot be collected:\n{done.stdout}{done.stderr}")
        text = Path(listed.name).read_text()
    found: dict[str, list[str]] = json.loads(text) if text else {}
    return found


def show(text: str) -> None:
    print(text.rstrip(), flush=True)


def skipped(boot: Boot, names: list[str], reason: str) -> Outcome:
    outcome = Outcome(boot.name)
    outcome.results = dict.fromkeys(names, "skipped")
    show(f"  NOT TESTED  {boot.name} ({len(names)} tests): {reason}")
    return outcome


def run_boot(boot: Boot, names: list[str], guest_tests: Path = GUEST_TESTS) -> Outcome:
    """One boot, and a line about it, with the report of whatever failed."""
    try:
        chosen = kernel.find(boot.kernel, ROOT, STATE / "debian")
    except Unavailable as error:
        return skipped(boot, names, str(error))
    show(f"  booting {boot.name} ({len(names)} tests) on Linux {chosen.version}: {boot.shows}")
    try:
        outcome = machine.run(boot, chosen, STATE / "logs" / boot.name, names, guest_tests)
    except module.Broken as error:
        outcome = Outcome(boot.name, results=dict.fromkeys(names, "failed"), trouble=str(error))
    if boot.expected:
        outcome.compare(boot.expected)
    good = not outcome.count("failed") and not outcome.trouble
    counts = ", ".join(f"{outcome.count(what)} {what}" for what in ("passed", "failed", "skipped"))
    times = f"{outcome.seconds:.1f} s, the first test after {outcome.up_after:.1f} s"
    show(f"  {'ok  ' if good else 'FAIL'}  {boot.name} on Linux {chosen.version}: {counts} ({times})")
    for name, what in outcome.results.items():
        if what != "passed":
            show(f"    {what.upper()} {name}\n{indent(outcome.reports.get(name, ''))}")
    if outcome.trouble:
        show(indent(outcome.trouble))
        if not outcome.count("failed"):  # every test passed, and then something went wrong
            outcome.results[f"{boot.name}: ends well"] = "failed"
    return outcome


def indent(text: str) -> str:
    return "\n".join(f"      {line}" for line in text.splitlines())


def everything(wanted: list[Boot], expression: str) -> list[Outcome]:
    try:
        qemu.ensure()
        tests = collect(GUEST_TESTS, expression)
    except Unavailable as error:
        show(f"  NOT TESTED: NO VIRTUAL MACHINE CAN BE HAD HERE: {error}")
        return [Outcome("none", results={"virtual machines": "skipped"})]
    outcomes = [run_boot(boot, names) for boot in wanted if (names := tests.get(boot.name, []))]
    if not outcomes:
        show("  FAIL  no test was selected: `tests/vm/run.py --list` names them")
        return [Outcome("none", results={"selection": "failed"})]
    return outcomes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs tests in virtual machines.")
    names = [boot.name for boot in BOOTS]
    parser.add_argument("--boot", action="append", choices=names, help="this boot only (may be given several times)")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="tests whose names match, as pytest takes it")
    parser.add_argument("--command", help="run this shell command in the guest instead of tests; needs --boot")
    parser.add_argument("--list", action="store_true", help="name the boots and their tests, and boot nothing")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    wanted = [boot for boot in BOOTS if arguments.boot is None or boot.name in arguments.boot]
    if arguments.list:
        tests = collect(GUEST_TESTS, arguments.k)
        for boot in wanted:
            show(f"{boot.name}: {boot.shows}")
            show("".join(f"  {name}\n" for name in tests.get(boot.name, [])) or "  no test")
        return 0
    if arguments.command is not None:
        chosen = kernel.find(wanted[0].kernel, ROOT, STATE / "debian")
        return machine.run_command(wanted[0], chosen, STATE / "logs" / wanted[0].name, arguments.command)
    start = time.monotonic()
    outcomes = everything(wanted, arguments.k)
    total = {what: sum(outcome.count(what) for outcome in outcomes) for what in ("passed", "failed", "skipped")}
    boots = "1 boot" if len(outcomes) == 1 else f"{len(outcomes)} boots"
    show(f"  {boots} in {time.monotonic() - start:.0f} s")
    show(", ".join(f"{number} {what}" for what, number in total.items()))
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
