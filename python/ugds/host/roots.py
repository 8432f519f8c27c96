# SPDX-License-Identifier: Apache-2.0
"""Where the kernel is asked and told: the roots of its file systems. Everything of this package that touches the
machine goes through one `Roots`, so that a test can lay out a machine of its own."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ugds.host._errors import why

# Programs for the administrator are in folders that the PATH of other people lacks.
_ADMIN_PATH = os.pathsep.join(filter(None, (os.environ.get("PATH"), "/usr/sbin", "/sbin")))


class Roots:
    """The machine, or a copy of one below other folders."""

    def __init__(
        self,
        sys: Path = Path("/sys"),
        proc: Path = Path("/proc"),
        dev: Path = Path("/dev"),
        modules: Path = Path("/lib/modules"),
    ) -> None:
        self.sys, self.proc, self.dev, self.modules = sys, proc, dev, modules

    def write(self, path: Path, value: str) -> None:
        """One write, as sysfs takes it. Raises OSError with what the kernel answers."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            os.close(fd)

    def modprobe(self, module: str) -> None:
        """Loads a kernel module. Raises OSError with what modprobe says."""
        done = self.program(["modprobe", module], seconds=60)
        if done.returncode != 0:
            said = done.stderr.strip() or f"modprobe ended with {done.returncode}"
            raise OSError(done.returncode, said)

    def program(self, command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
        """Runs a program of the system's. Raises OSError where there is none, or where it takes too long."""
        found = shutil.which(command[0], path=_ADMIN_PATH)
        if found is None:
            raise FileNotFoundError(2, "no such program", command[0])
        try:
            return subprocess.run(
                [found, *command[1:]],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                env={**os.environ, "LC_ALL": "C"},
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(110, f"no answer within {seconds:.0f} s", command[0]) from None

    def open(self, path: Path, *, exclusive: bool) -> int:
        """Opens a block device for reading. Exclusively, it keeps mounts and the like away while it is open; OSError
        with EBUSY where something else has it so."""
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_EXCL if exclusive else 0))

    def is_node_of(self, fd: int, number: str) -> bool:
        """True if the open file is the block device with this "major:minor": a name in /dev proves nothing."""
        status = os.fstat(fd)
        return stat.S_ISBLK(status.st_mode) and device_number(status.st_rdev) == number

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Keeps others that move the same controller out. Raises BlockingIOError while one does."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(fd)


class Reader:
    """Reads what may be absent: a fact is a value, or None with its reason in `unknown`."""

    def __init__(self) -> None:
        self.unknown: dict[str, str] = {}

    def text(self, fact: str, path: Path) -> str | None:
        try:
            return read(path)
        except OSError as error:
            self.unknown[fact] = why(error)
            return None


def device_number(rdev: int) -> str:
    return f"{os.major(rdev)}:{os.minor(rdev)}"


def read(path: Path) -> str:
    """The text of a small file, without surrounding blanks. Raises OSError."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_or(path: Path, default: str) -> str:
    try:
        return read(path)
    except OSError:
        return default


def entries(path: Path) -> list[Path]:
    """What a folder holds, in order; nothing where it cannot be read."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def link_name(path: Path) -> str | None:
    """The last part of what a link points to; None where there is no link."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None
