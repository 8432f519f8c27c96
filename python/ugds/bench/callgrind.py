# SPDX-License-Identifier: Apache-2.0
"""Counting instructions by valgrind's callgrind: running a program under it, and reading what it wrote.

Only what is asked of the format is read: the total, and the inclusive cost of the calls to a function.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ugds._report import CommandError

#: A function of the C library that a program calls (`os.getppid()`) to end one section of its profile.
MARK = "getppid"

_NAMED = re.compile(r"(fn|cfn)=\((\d+)\)(?: (.+))?")


@dataclass
class Profile:
    """Instructions executed while collection was on. `calls` holds, for each called function, how often it was called
    and how many instructions that took, the function's own callees included. A function that calls itself counts more
    than once, so ask only for one that does not."""

    total: int = 0
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)

    def called(self, function: str) -> tuple[int, int]:
        """Calls and inclusive instructions of `function`, by its plain name: signature and symbol version aside. Calls
        of a compiler's partial clones (`name.part.0`) lie inside those of the function, and are not added."""
        count = cost = 0
        for name, (calls, instructions) in self.calls.items():
            if plain(name) == function:
                count += calls
                cost += instructions
        return count, cost


def plain(name: str) -> str:
    """`ugds::emulator::Controller::turn(void*)` and `uGDSRead@@UGDS_1.0` without what follows the name."""
    return re.split(r"[(@']", name, maxsplit=1)[0]


def parse(text: str) -> Profile:
    """A callgrind output file of one event (Ir). Names are compressed: each is given once, with its number."""
    profile, names = Profile(), {}
    called, calls, cost_follows = "", 0, False
    for line in text.splitlines():
        if cost_follows:  # the line after "calls=": position, inclusive cost
            cost_follows = False
            before = profile.calls.get(called, (0, 0))
            profile.calls[called] = (before[0] + calls, before[1] + int(line.split()[1]))
        elif named := _NAMED.fullmatch(line):
            kind, number, name = named.groups()
            if name is not None:
                names[number] = name
            if kind == "cfn":
                called = names[number]
        elif line.startswith("calls="):
            calls, cost_follows = int(line[len("calls=") :].split()[0]), True
        elif line.startswith(("summary:", "totals:")):
            profile.total = max(profile.total, int(line.split()[1]))
    return profile


def find() -> str:
    path = shutil.which("valgrind")
    if path is None:
        raise CommandError(
            "this counts instructions by valgrind, which is not installed\n"
            "  what to do: apt-get install valgrind libc6-dbg (on other systems: the packages of those names)"
        )
    return path


def run(command: Sequence[str], environment: Mapping[str, str]) -> list[Profile]:
    """Runs a program to its end. Gives a profile of each stretch between two calls of `MARK`: what was before the first
    call is the first profile, and what came after the last one is the last.

    Sections of one run are compared, and not whole runs, so that starting up does not count. They are told apart by
    marks and not by callgrind's --toggle-collect on the function of interest, since that does not see a function which
    is called through libffi (ctypes), where the stack is moved below the call.
    """
    valgrind = find()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "profile"
        options = [
            "--tool=callgrind",
            f"--callgrind-out-file={out}",
            f"--dump-before={MARK}",
            "--dump-instr=no",
            "--dump-line=no",
            "--quiet",
        ]
        done = subprocess.run([valgrind, *options, *command], env=dict(environment), capture_output=True, text=True)
        if done.returncode != 0:
            raise CommandError(f"the program did not run under valgrind:\n{(done.stderr or done.stdout).strip()}")
        numbered = sorted(Path(folder).glob("profile.*"), key=lambda path: int(path.suffix[1:]))
        return [parse(path.read_text(errors="replace")) for path in [*numbered, out] if path.exists()]
