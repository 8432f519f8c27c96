# SPDX-License-Identifier: Apache-2.0
"""Other people's tests in processes of their own, each watched by what its witness (witness.py) writes: one that hangs
or falls costs the test that it was in, and no other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: From a process's start to its first test, and from its last test to its end.
STARTING_S, ENDING_S = 120.0, 60.0


@dataclass
class Part:
    """What became of some of the tests over one library."""

    outcomes: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    libraries: set[str] = field(default_factory=set)
    #: What `ugds run` reported, of each process.
    reports: list[dict[str, Any]] = field(default_factory=list)
    #: What went wrong outside of every test.
    problems: list[str] = field(default_factory=list)

    def add(self, other: Part) -> None:
        self.outcomes |= other.outcomes
        self.words |= other.words
        self.libraries |= other.libraries
        self.reports += other.reports
        self.problems += other.problems


def report_in(output: str) -> dict[str, Any] | None:
    """What `ugds run --json` said last; it may stand behind the dots of a pytest that was killed."""
    if (at := output.rfind('{"command": [')) < 0:
        return None
    report: dict[str, Any] = json.JSONDecoder().raw_decode(output[at:])[0]
    return report


class Log:
    """What the witness of one process has written, as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def new(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class Plan:
    """How the tests of a suite are run, whichever the library."""

    suite: Path
    scratch: Path
    logs: Path
    arguments: Sequence[str]
    jobs: int
    test_limit: float
    deadline: float
    udev: bool = True


class Runner:
    """One part of the tests over one library: processes, one after another, until every test has its outcome."""

    def __init__(
        self, plan: Plan, side: str, number: int, before: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.plan, self.side, self.number, self.before = plan, side, number, before
        self.environment = environment
        self.part = Part()
        self.running: str | None = None
        self.pid = 0
        self.kept: list[str] = []
        self.finished = False

    def run(self) -> None:
        for turn in range(10_000):
            if time.monotonic() > self.plan.deadline:
                self.part.problems.append("there was no time left for all tests")
                return
            if not self._process(turn):
                return

    def _process(self, turn: int) -> bool:
        """Runs what has no outcome yet. Whether a test ended it, so that others may be left."""
        name = f"{self.side}-{self.number}-{turn}"
        scratch = self.plan.scratch / f"part{self.number}"
        for folder in ("work", "temporary"):
            (scratch / folder).mkdir(parents=True, exist_ok=True)
        done = scratch / "done"
        done.write_text("\n".join(self.part.outcomes))
        witnessed = self.plan.logs / f"{name}.jsonl"
        witnessed.unlink(missing_ok=True)
        environment = {
            **self.environment,
            "TMPDIR": str(scratch / "temporary"),
            "WITNESS_LOG": str(witnessed),
            "WITNESS_DONE": str(done),
            "WITNESS_PART": f"{self.number}/{self.plan.jobs}",
        }
        configuration = self.plan.suite / "pytest.ini"
        if not configuration.exists():
            configuration = scratch / "pytest.ini"
            configuration.write_text("[pytest]\n")
        command = [*self.before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "witness"]
        command += ["-c", str(configuration), "--rootdir", str(self.plan.suite), "--continue-on-collection-errors"]
        command += ["-o", f"faulthandler_timeout={max(self.plan.test_limit - 5, 1)}", "--basetemp", f"{scratch}/pytest"]
        command += [str(self.plan.suite), *self.plan.arguments]
        self.running, self.pid, self.kept, self.finished = None, 0, [], False
        output = self.plan.logs / f"{name}.log"
        with output.open("wb") as to:
            process = subprocess.Popen(
                command,
                cwd=scratch / "work",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=to,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            killed = self._watch(process, Log(witnessed))
        return self._ended(process.returncode, killed, output)

    def _watch(self, process: subprocess.Popen[bytes], log: Log) -> bool:
        """Until the process ends, by itself or because it did not go on. Whether it was killed."""
        last, limit = time.monotonic(), STARTING_S
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
            ended = process.returncode is not None
            for line in log.new():
                self._note(line)
                last = time.monotonic()
                limit = ENDING_S if "finished" in line else self.plan.test_limit if "start" in line else STARTING_S
            if ended:
                return False
            if time.monotonic() > min(last + limit, self.plan.deadline):
                self._kill(process)
                for line in log.new():
                    self._note(line)
                return True

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """The tests' process first: `ugds run` then still tells what went through it."""
        if self.pid not in (0, process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _note(self, line: Mapping[str, Any]) -> None:
        part = self.part
        self.pid = line.get("pid", self.pid)
        self.kept = line.get("kept", self.kept)
        self.finished = self.finished or "finished" in line
        part.libraries |= set(line.get("libraries", ()))
        if "start" in line:
            self.running = line["start"]
        elif "end" in line:
            self.running = None
        elif "test" in line and part.outcomes.get(line["test"]) != "failed":
            # A failure while setting up or cleaning up is the test's.
            part.outcomes[line["test"]] = line["outcome"]
            if line["words"]:
                part.words[line["test"]] = line["words"]

    def _ended(self, status: int, killed: bool, output: Path) -> bool:
        text = output.read_text(errors="replace")
        if (report := report_in(text)) is not None:
            self.part.reports.append(report)
        tail = " | ".join(text.strip().splitlines()[-3:])[-400:]
        if self.running is not None and killed and time.monotonic() > self.plan.deadline:
            self.part.problems.append(f"{output.name}: the time was over in {self.running}")
            return False
        if self.running is not None:
            how = "was killed" if killed else f"ended with {status}"
            self.part.outcomes[self.running] = "hung" if killed else "crashed"
            self.part.words[self.running] = f"the process {how}: {output.name}: {tail}"
            return True
        if killed or not self.finished or status not in (0, 1, 5):
            how = "did not go on outside of a test" if killed else f"ended with {status}"
            self.part.problems.append(f"{output.name}: it {how}: {tail}")
        return False


def run_side(plan: Plan, side: str, before: Sequence[str], environment: Mapping[str, str]) -> Part:
    """All tests over one library, `jobs` processes at a time."""
    runners = [Runner(plan, side, number, before, environment) for number in range(plan.jobs)]
    threads = [threading.Thread(target=runner.run) for runner in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = Part()
    for runner in runners:
        whole.add(runner.part)
        for test in runner.kept:
            whole.outcomes.setdefault(test, "not run")
    return whole
