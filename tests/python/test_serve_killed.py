# SPDX-License-Identifier: Apache-2.0
"""Clients of a server that are killed at any moment, and devices that lose their power then: the next client finds what
was acknowledged, and the server is as it was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import journal_client
import pytest
import ugds
from journal_client import SLOT, SLOTS, Journal
from vfio_user_client import idle

#: `./test --endurance` asks for more.
KILLS = int(os.environ.get("UGDS_KILLS", "40"))
Kill = Callable[[str, Journal, int, float, bool], None]


def wait(journal: Journal, after: float, early: bool) -> None:
    start = time.monotonic()
    while not early and not journal.has_opened():
        assert time.monotonic() - start < 20, "the client does not open the device"
        time.sleep(0.001)
    time.sleep(after)


@pytest.fixture
def kill_c(tmp_path: Path) -> Kill:
    """Runs the client in C, and kills it so many seconds after it has opened the device, or after its start."""
    program = journal_client.compile_client(tmp_path)

    def kill(uri: str, journal: Journal, seed: int, after: float, early: bool) -> None:
        command = [str(program), uri, str(journal.path), str(seed), str(journal.next)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as client:
            wait(journal, after, early)
            client.kill()
            _, words = client.communicate(timeout=20)
            assert client.returncode == -signal.SIGKILL, words

    return kill


@pytest.fixture
def kill_python() -> Iterator[Kill]:
    """The same with the client in Python, which writes durably too."""
    command = [sys.executable, journal_client.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None

        def kill(uri: str, journal: Journal, seed: int, after: float, early: bool) -> None:
            assert forks.stdin is not None
            assert forks.stdout is not None
            print(uri, journal.path, seed, journal.next, file=forks.stdin, flush=True)
            client = int(forks.stdout.readline())
            wait(journal, after, early)
            os.kill(client, signal.SIGKILL)
            assert forks.stdout.readline() == "ended\n"

        yield kill
        forks.stdin.close()


def look(uri: str) -> bytes:
    """What the next client finds."""
    with ugds.open(uri) as ssd, ugds.empty(SLOTS * SLOT) as buffer:
        assert ssd.state == "ready"
        assert ssd.read(buffer) == SLOTS * SLOT
        return bytes(memoryview(buffer))


def footprint() -> dict[str, int]:
    """What this process has, the server in it included."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {"files": len(os.listdir("/proc/self/fd")), "memfds": sum("memfd:" in line for line in maps)}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def kill_many(server: ugds.Server, journal: Journal, kill: Kill, times: int, seed: int, every: int) -> None:
    """Kills clients of a server, cuts the power every so many times, and compares after each."""
    uri, rng = f"vfio-user:{server.path}", random.Random(seed)
    for turn in range(times):
        # Most while they write, some while they start.
        kill(uri, journal, rng.randrange(1 << 30), rng.random() * 0.03, rng.random() < 0.2)
        lost_power = turn % every == every - 1
        if lost_power:
            server.emulator.power_cut(survive=rng.choice([0.0, 0.0, 0.5]), seed=turn + 1)
        journal.take()
        journal.check(look(uri), lost_power=lost_power)


@pytest.mark.slow
def test_what_was_flushed_is_there_after_any_kill_and_the_server_is_as_it_was(
    tmp_path: Path, kill_c: Kill, kill_python: Kill
) -> None:
    # Slow enough that some commands are under way whenever it happens.
    with ugds.serve("emulated:16MiB?latency=50us", str(tmp_path / "s")) as server:
        journal = Journal(tmp_path / "told")
        for kill in (kill_c, kill_python):
            kill_many(server, journal, kill, 3, 1, 2)
        idle(server)
        before, memory, start = footprint(), resident(), time.monotonic()
        for part, kill in enumerate((kill_c, kill_python)):
            kill_many(server, journal, kill, KILLS // 2, part + 2, 10)
        idle(server)
        assert footprint() == before
        assert resident() < memory + (8 << 20)
        counters = server.emulator.counters()
        assert counters["mapped_bytes"] == counters["mapped_ranges"] == 0
        assert server.emulator.violations() == []
        assert server.clients >= KILLS
        assert journal.opened > KILLS * 0.7
        assert min(journal.writes, journal.flushes, journal.durable_writes) > KILLS
        print(
            f"\n{KILLS // 2 * 2} kills in {time.monotonic() - start:.1f} s: {journal.opened} clients had opened the "
            f"device, {journal.writes} writes, {journal.durable_writes} durable writes, {journal.flushes} flushes"
        )


@pytest.mark.slow
@pytest.mark.parametrize("opcode", [0, 1], ids=["flush", "write"])
def test_a_flush_or_a_write_that_does_nothing_is_found(tmp_path: Path, kill_c: Kill, opcode: int) -> None:
    with ugds.serve("emulated:16MiB?latency=50us", str(tmp_path / "s")) as server:
        server.emulator.inject("ignored", opcode=opcode, count=1 << 40)
        with pytest.raises(AssertionError, match=r"^slot \d+ holds write"):
            kill_many(server, Journal(tmp_path / "told"), kill_c, 20, 5, 1)
