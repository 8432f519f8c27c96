# SPDX-License-Identifier: Apache-2.0
"""A process with one libcufile (`_cufile_child`), and which libraries there are."""

from __future__ import annotations

import contextlib
import json
import os
import select
import site
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ugds import _run
from ugds._report import CommandError

#: Until a process has started, with its GPU; and until it has answered.
_START_S, _ANSWER_S = 60.0, 60.0


class Stuck(CommandError):
    """A process that did not answer in time, and was killed."""


class Died(CommandError):
    """A process that ended by itself."""


def ours() -> Path:
    """Raises CommandError where the package has none."""
    return _run.library()


def find_theirs(named: str | None) -> Path | None:
    """The library that is named, or NVIDIA's: of its package, or of the CUDA toolkit. Raises CommandError (status 2)
    for a name that is none."""
    if named is not None:
        if not Path(named).is_file():
            raise CommandError(f"--library: {named} is no file", status=2)
        return Path(named).resolve()
    folders = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
    for folder in dict.fromkeys(Path(each) for each in folders if each):
        for found in sorted(folder.glob("nvidia/*/lib/libcufile.so.0")):
            return found
    for found in sorted(Path("/usr/local").glob("cuda*/**/libcufile.so.0")):
        return found
    return None


class Process:
    """It runs until `kill`. Not thread-safe."""

    def __init__(self, library: Path, gpu: int) -> None:
        """Raises CommandError where it does not start: with status 2 where there is no such GPU."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the process
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 -- as long as the process
        # NVIDIA's library without its kernel driver, and its log aside. Ours has neither.
        environment = {"CUFILE_ALLOW_COMPAT_MODE": "true", "CUFILE_FORCE_COMPAT_MODE": "true", **os.environ}
        environment["CUFILE_LOGFILE_PATH"] = self._log.name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ugds.bench._cufile_child", str(library), str(gpu)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )
        self._library = library
        self._left = b""
        try:
            self.hello = self._answer("start", _START_S)
        except CommandError:
            self.kill()
            raise
        if "refused" in self.hello:
            self.kill()
            if "hint" in self.hello:
                remedy = f"\n  what to do: {self.hello['hint']}" if self.hello["hint"] else ""
                raise CommandError(f"this measures GPU memory, and {self.hello['refused']}{remedy}", status=2)
            raise CommandError(f"{library} cannot be used: {self.hello['refused']}", status=2)

    def ask(self, what: str, patience: float | None = None, _refusable: bool = False, **request: Any) -> dict[str, Any]:
        """Its answer. Raises CommandError for a refusal, unless `_refusable`; Died, Stuck."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **request}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died(what) from None
        answer = self._answer(what, patience or _ANSWER_S)
        if "refused" in answer and (logged := Path(self._log.name).read_text(errors="replace").splitlines()):
            answer["refused"] += f" (its log: {logged[-1].strip()})"
        if "refused" in answer and not _refusable:
            raise CommandError(f"{what} by {self._library} failed: {answer['refused']}")
        return answer

    def _answer(self, what: str, limit: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        until = time.monotonic() + limit
        while b"\n" not in self._left:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self.kill()
                raise Stuck(f"the process with {self._library} did not answer in {limit:g} s ({what})")
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                raise self._died(what)
            self._left += read
        line, _, self._left = self._left.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self, what: str) -> Died:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        status = self._process.poll()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()[-5:]
        return Died("\n  ".join([f"the process with {self._library} died ({status}) at {what}", *said]))

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # what the kernel does not give back is left
            self._process.wait(10)
        for each in (self._process.stdin, self._process.stdout, self._errors, self._log):
            with contextlib.suppress(BrokenPipeError):
                if each is not None:
                    each.close()
