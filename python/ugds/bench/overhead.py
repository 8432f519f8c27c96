# SPDX-License-Identifier: Apache-2.0
"""What one 4 KiB read costs in the library and in Python, apart from the device's own work.

Instructions are counted by callgrind, which makes them repeatable. Every count is a difference of two loops in one
process, after warming up: one of reads, and one of the same calls to a function of the C library that does nothing (its
own four or so instructions are the error), or, in Python, with an empty body. The emulated controller runs in the
caller's thread (`pump=caller`): its turns are counted by name and taken away.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import ugds
from ugds import _core
from ugds._report import CommandError, Record
from ugds.bench import callgrind

SIZE = 4096
BATCH, BATCHES = 128, 20  # requests of a batch, and batches to count over
TURN = "ugds::emulator::Controller::turn"
BLOCK, PAIRS = 2000, 31  # of the timed comparison


def measure(uri: str, calls: int) -> list[Record]:
    if "pump=caller" not in uri:
        raise CommandError(f"{uri} does not have pump=caller, without which its work cannot be told apart", status=2)
    callgrind.find()
    c_total, c_turn, turns = c_instructions(uri, calls)
    library = c_total - c_turn
    python = python_instructions(uri, calls)
    batch = batch_instructions("_c_batches.py", _core.library_path(), uri)
    batch_python = batch_instructions("_python_batches.py", uri)
    python_us, c_us, memory, route = times(uri)
    return [
        Record(
            "overhead",
            {"api": "c", "size": SIZE, "batch": BATCH, "batches": BATCHES},
            uri,
            memory,
            route,
            {"batch_read_4k_instructions": (batch, "instructions")},
        ),
        Record(
            "overhead",
            {"api": "python", "size": SIZE, "batch": BATCH, "batches": BATCHES},
            uri,
            memory,
            route,
            {"batch_read_4k_python_instructions": (batch_python, "instructions")},
        ),
        Record(
            "overhead",
            {"api": "c", "size": SIZE, "calls": calls},
            uri,
            memory,
            route,
            {
                "sync_read_4k_instructions": (library, "instructions"),
                "sync_read_4k_total_instructions": (c_total, "instructions"),
                "emulator_turn_instructions": (c_turn, "instructions"),
                "emulator_turns": (turns, "1"),
            },
        ),
        Record(
            "overhead",
            {"api": "python", "size": SIZE, "calls": calls},
            uri,
            memory,
            route,
            {
                "python_extra_instructions": (python - library, "instructions"),
                "python_read_4k_instructions": (python, "instructions"),
            },
        ),
        Record(
            "overhead",
            {"api": "python", "size": SIZE, "calls": BLOCK, "pairs": PAIRS},
            uri,
            memory,
            route,
            {
                "python_extra_us": (python_us - c_us, "us"),
                "python_read_4k_us": (python_us, "us"),
                "sync_read_4k_us": (c_us, "us"),
            },
        ),
    ]


def _sections(program: str, *arguments: str) -> tuple[callgrind.Profile, callgrind.Profile]:
    """The loop of reads and the loop without them, of a program that marks both."""
    # Nothing that differs from run to run may change what the interpreter does.
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    path = str(Path(__file__).with_name(program))
    sections = callgrind.run([sys.executable, path, *arguments], environment)
    if len(sections) != 4:
        raise CommandError(f"callgrind saw {len(sections) - 1} marks where there are 3: is {callgrind.MARK} called?")
    return sections[1], sections[2]


def _turns(profile: callgrind.Profile) -> tuple[int, int]:
    turns, cost = profile.called(TURN)
    if turns == 0:
        raise CommandError(f"callgrind saw no call of {TURN}: was the library stripped of its symbols?")
    return turns, cost


def c_instructions(uri: str, calls: int) -> tuple[float, float, float]:
    """Per uGDSRead: all instructions, those of the emulated controller's turns, and the number of turns."""
    reads, nothing = _sections("_c_reads.py", _core.library_path(), uri, str(calls))
    turns, cost = _turns(reads)
    return (reads.total - nothing.total) / calls, cost / calls, turns / calls


def python_instructions(uri: str, calls: int) -> float:
    """Per `ssd.read(buf, offset=0, size=4096)`: all instructions but those of an empty loop and of the controller."""
    reads, nothing = _sections("_python_reads.py", uri, str(calls))
    return (reads.total - nothing.total - _turns(reads)[1]) / calls


def batch_instructions(program: str, *arguments: str) -> float:
    """Per request of a batch of BATCH, submitted by one call and collected by one: all but the controller's."""
    reads, nothing = _sections(program, *arguments, str(BATCHES), str(BATCH))
    return (reads.total - nothing.total - _turns(reads)[1]) / (BATCHES * BATCH)


def times(uri: str) -> tuple[float, float, str, str]:
    """Microseconds of a read from Python and of the same read in C++, in turn; memory and route of the buffer."""
    with ugds.open(uri) as ssd, ugds.empty(SIZE) as buf:

        def python() -> int:
            before = time.perf_counter_ns()
            for _ in range(BLOCK):
                ssd.read(buf, offset=0, size=4096)
            read = time.perf_counter_ns()
            for _ in range(BLOCK):
                pass
            return 2 * read - before - time.perf_counter_ns()

        def native() -> int:
            return int(_core.time_reads(ssd, buf, BLOCK))

        python(), native()
        pairs = []
        for turn in range(PAIRS):
            first, second = (python, native) if turn % 2 == 0 else (native, python)
            one, other = first(), second()
            pairs.append((one, other) if turn % 2 == 0 else (other, one))
        c_us = statistics.median(c for _, c in pairs) / BLOCK / 1000
        extra_us = statistics.median(p - c for p, c in pairs) / BLOCK / 1000
        return c_us + extra_us, c_us, buf.memory, buf.route
