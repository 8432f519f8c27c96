# SPDX-License-Identifier: Apache-2.0
"""The same loads on a file or block device through the kernel, by fio: what uGDS is compared with.

fio is run as a program. Its engine psync makes pread and pwrite, io_uring what its name says; either with O_DIRECT
where the file system has it. Latencies are fio's own, from issuing a request to its completion.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ugds import sizes as units
from ugds._report import CommandError
from ugds.bench.load import GIB, LARGEST, SPAN, Load, Result, Summary

ENGINES = {"posix": "psync", "io_uring": "io_uring"}
_PIECE = 4 << 20
# File systems that take O_DIRECT and keep the data in the page cache all the same.
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


def find() -> str:
    path = shutil.which("fio")
    if path is None:
        raise CommandError(
            "baselines of files are measured by fio, which is not installed\n"
            "  what to do: apt-get install fio (on other systems: the package of that name)"
        )
    return path


def run(options: Sequence[str], what: str, seconds: float) -> dict[str, Any]:
    """One job; its object of fio's JSON. `seconds` is how long it should take."""
    # Threads as ours are, and never a file that fio makes itself.
    command = [find(), "--output-format=json", "--name=ugds", "--thread", "--group_reporting", "--allow_file_create=0"]
    try:
        done = subprocess.run(
            [*command, *options], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds + 120
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"fio on {what} did not end within {seconds + 120:.0f} s") from None
    # Notes may stand before the object.
    start = done.stdout.find("{\n")
    try:
        job: dict[str, Any] = json.loads(done.stdout[start:])["jobs"][0] if start >= 0 else {}
    except (ValueError, LookupError):
        job = {}
    if done.returncode != 0 or not job or job.get("error"):
        said = done.stderr.strip() or done.stdout[: max(start, 0)].strip() or f"exit status {done.returncode}"
        hint = ""
        if "--ioengine=io_uring" in options:
            hint = "\n  what to do: see that this kernel allows io_uring (kernel.io_uring_disabled is 0), or use posix:"
        raise CommandError(f"fio on {what} failed:\n{said}{hint}")
    return job


def _side(found: dict[str, Any]) -> Summary | None:
    if not found["total_ios"]:
        return None
    latency = found["lat_ns"]
    percentiles = {float(name): value for name, value in latency["percentile"].items()}
    return Summary(
        found["bw_bytes"] / GIB,
        found["iops"],
        latency["mean"] / 1000,
        percentiles[50.0] / 1000,
        percentiles[99.0] / 1000,
    )


@dataclass
class FileTarget:
    """A file or block device to put loads on. As a context manager: a file that is not there is made, and removed at
    the end; one that is there is left as long as it was, and written only if `overwrite` allows it."""

    uri: str
    kind: str  #: posix or io_uring
    path: Path
    size: int | None = None  #: bytes of a file that has to be made
    depth: int = 1  #: requests in flight a thread, for io_uring
    overwrite: bool = False
    made: set[Path] = field(default_factory=set)  #: by whichever target of this run; it may be shared by several
    _made: int | None = None  # its descriptor, held so that no other file can be taken for it
    _span: int = 0
    _direct: bool = False

    def __enter__(self) -> FileTarget:
        find()
        if not os.path.lexists(self.path):
            self._make()
        try:
            self._span, self._direct = _look(self.path)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @property
    def memory(self) -> str:
        return "host"

    @property
    def route(self) -> str:
        return "direct" if self._direct else "buffered"

    def load(self, load: Load) -> Result:
        """Raises CommandError where fio fails, or where data of somebody's would be overwritten."""
        self._may_write(load.read_percent < 100)
        part = load.part(self._span)
        # As on a device: where the parts do not fit side by side, threads share them.
        apart = part * load.threads <= self._span
        kinds = {100: "read", 0: "write"}
        mixed = load.read_percent not in kinds
        options = [
            f"--rw={kinds.get(load.read_percent, 'rw')}",
            *([f"--rwmixread={load.read_percent}", "--unified_rw_reporting=both"] if mixed else []),
            f"--bs={load.size}",
            f"--numjobs={load.threads}",
            f"--size={part if apart else self._span // load.size * load.size}",
            *([f"--offset_increment={part}"] if apart else []),
            "--time_based",
            f"--runtime={round(load.seconds * 1000)}ms",
            f"--iodepth={self.depth}",
            "--clat_percentiles=0",
            "--lat_percentiles=1",
            "--percentile_list=50:99",
        ]
        job = self._run(options, load.seconds)
        reads, writes = _side(job["read"]), _side(job["write"])
        every = _side(job["mixed"]) if mixed else reads or writes
        if every is None:
            raise CommandError(f"fio on {self.uri} made no request within {load.seconds:g} s; give it more --seconds")
        return Result(every, reads, writes, self.memory, self.route)

    def fresh(self, loads: Iterable[Load]) -> list[Result]:
        """Each in a process of its own, as fio always is."""
        return [self.load(load) for load in loads]

    def batches(self, mode: str, size: int, batch: int, total: int) -> list[float]:
        """Seconds of each batch of `batch` requests, of a transfer of `total` bytes in a process of its own. By
        io_uring a batch is submitted in one call and waited for in full; by posix it is a request after another. What
        fio itself does between batches does not count."""
        self._may_write(mode != "read")
        # Requests that are submitted together are as slow as the last to complete; others add up.
        together = self.kind == "io_uring"
        depths = ("iodepth", "iodepth_batch_submit", "iodepth_batch_complete_min", "iodepth_batch_complete_max")
        with tempfile.TemporaryDirectory() as folder:
            options = [
                f"--rw={mode}",
                f"--bs={size}",
                f"--size={self._span // size * size}",
                f"--io_size={max(2, total // (size * batch)) * size * batch}",
                *([f"--{name}={batch}" for name in depths] + ["--iodepth_low=1"] if together else []),
                f"--write_lat_log={folder}/log",
            ]
            self._run(options, 60)
            lines = Path(folder, "log_lat.1.log").read_text().splitlines()
        latencies = [int(line.split(",")[1]) / 1e9 for line in lines]
        groups = [latencies[start : start + batch] for start in range(0, len(latencies), batch)]
        return [max(group) if together else sum(group) for group in groups]

    def _run(self, options: Sequence[str], seconds: float) -> dict[str, Any]:
        escaped = str(self.path).replace("\\", "\\\\").replace(":", "\\:")
        where = [f"--filename={escaped}", f"--ioengine={ENGINES[self.kind]}", f"--direct={int(self._direct)}"]
        return run([*where, *options], self.uri, seconds)

    def _may_write(self, writes: bool) -> None:
        if writes and self.path not in self.made and not self.overwrite:
            raise CommandError(
                f"this benchmark writes to {self.path}, which holds data\n"
                "  what to do: name a file that does not exist, or add --overwrite if that data can go",
                status=2,
            )

    def _make(self) -> None:
        size = SPAN if self.size is None else self.size
        parent = self.path.parent
        try:
            room = os.statvfs(parent)
            if size > room.f_bavail * room.f_frsize:
                free = units.format(room.f_bavail * room.f_frsize)
                raise CommandError(
                    f"{self.path} is to be made with {units.format(size)}, and {free} are free in {parent}\n"
                    "  what to do: name another folder, or a smaller ?size="
                )
            self._made = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            self.made.add(self.path)
            try:
                _write_random(self._made, size)
            except BaseException:
                self._remove()
                raise
        except OSError as error:
            raise CommandError(f"cannot make {self.path}: {error.strerror}") from None

    def _remove(self) -> None:
        """Whatever stands under the path by now, only what was made here is removed."""
        made, self._made = self._made, None
        if made is None:
            return
        self.made.discard(self.path)
        try:
            if os.path.samestat(os.lstat(self.path), os.fstat(made)):
                os.unlink(self.path)
        except FileNotFoundError:
            pass
        finally:
            os.close(made)


def _write_random(fd: int, size: int) -> None:
    """Real bytes: a file of holes would be read without its device."""
    data = np.random.default_rng(3).integers(0, 256, _PIECE, np.uint8)
    for offset in range(0, size, _PIECE):
        data[:8] = np.frombuffer(offset.to_bytes(8, "little"), np.uint8)
        left = data.data[: min(_PIECE, size - offset)]
        while left:
            left = left[os.write(fd, left) :]
    os.fsync(fd)


def _look(path: Path) -> tuple[int, bool]:
    """Bytes of it to go over, and whether it can be reached without the page cache."""
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            raise CommandError(f"{path} is neither a regular file nor a block device", status=2)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.lseek(fd, 0, os.SEEK_END)
        finally:
            os.close(fd)
        direct = _takes_direct(path)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}", status=2) from None
    if size < LARGEST:
        raise CommandError(f"{path} holds less than {units.format(LARGEST)}, which this needs", status=2)
    return min(size, SPAN), direct


def _takes_direct(path: Path) -> bool:
    if file_system(path) in _IN_MEMORY:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            return os.preadv(fd, [page], 0) > 0
    except OSError:
        return False
    finally:
        os.close(fd)


def file_system(path: Path) -> str | None:
    """Its type, such as ext4; None where that cannot be found out."""
    where = os.stat(path)
    if stat.S_ISBLK(where.st_mode):
        return None
    device = f"{os.major(where.st_dev)}:{os.minor(where.st_dev)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue (proc(5))
        before, _, after = line.partition(" - ")
        if before.split()[2] == device:
            return after.split()[0]
    return None
