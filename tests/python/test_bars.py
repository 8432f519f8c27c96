# SPDX-License-Identifier: Apache-2.0
"""The figures that the project promises (`ugds.bench.bars`), held to by the commands that print them."""

import json
import statistics
import subprocess
import sys

import pytest
from ugds.bench.bars import BARS

pytestmark = pytest.mark.slow


def figures(*command: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "ugds", "bench", *command, "--json"], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = {}
    for line in done.stdout.splitlines():
        found.update((name, figure["value"]) for name, figure in json.loads(line)["figures"].items())
    return found


def test_a_read_costs_few_instructions_in_c_and_few_more_in_python() -> None:
    got = figures("overhead", "--calls", "500")
    for name in ("sync_read_4k_instructions", "python_extra_instructions", "python_extra_us"):
        assert BARS[name].holds(got[name]), f"{name} is {got[name]}, and not {BARS[name]}"


def test_the_first_byte_is_there_within_five_milliseconds() -> None:
    # The median of a command's own processes; the best of a few commands, since the machine may have other work.
    name = "open_to_first_read_ms"
    assert BARS[name].holds(min(figures("setup")[name] for _ in range(3)))


def test_reads_of_an_emulated_device_are_as_fast_as_the_copy_that_it_makes() -> None:
    # Run by the caller, so that the figure is not one of how threads are scheduled.
    command = ("sync", "--sizes", "1MiB", "--threads", "1", "--device", "emulated:1GiB?pump=caller")
    name = "ratio_to_memcpy"
    assert BARS[name].holds(statistics.median(figures(*command)[name] for _ in range(3)))


def test_a_thread_that_sleeps_for_interrupts_leaves_its_processor_to_others() -> None:
    name = "interrupt_cpu_percent"
    assert BARS[name].holds(min(figures("completion")[name] for _ in range(3)))
