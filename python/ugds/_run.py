# SPDX-License-Identifier: Apache-2.0
"""What `ugds run` does: starts a program in which our libcufile.so.0 stands for NVIDIA's, sees that no other one gets
in, and tells what went through it.

The name alone does not decide which library a program gets: PyTorch's is found by a path inside its package, and
NVIDIA's bindings look there too. So ours is loaded before the program begins (LD_PRELOAD), and every later search for
`libcufile.so.0` finds that it is there already; who opens another by its path is given ours
(core/capi/cufile/redirect.c). Each process keeps a page of counters (core/capi/cufile/run_page.hpp)
in a folder of this command's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ugds import _core, _report
from ugds._report import CommandError

#: The numbers of a page, in their order; two names of 512 bytes follow.
COUNTERS = (
    "driver_opens",
    "handles",
    "buffers",
    "reads",
    "read_bytes",
    "writes",
    "written_bytes",
    "batches",
    "batch_requests",
    "stream_requests",
    "errors",
)
_PAGE = struct.Struct(f"={2 + len(COUNTERS)}Q512s512s")
_MAGIC = 0x31656C6966756375

#: Between two looks at the processes.
_INTERVAL_S = 1.0
#: After which a program without our library is stopped.
_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Page:
    """What one process says of itself."""

    pid: int
    counters: Mapping[str, int]
    library: str
    foreign: str

    @property
    def was_used(self) -> bool:
        return any(self.counters.values())


def read_page(path: Path) -> Page | None:
    """A process's page; None where the file is none, as while it is being made."""
    try:
        with path.open("rb") as file:
            data = file.read(_PAGE.size)
    except OSError:
        return None
    if len(data) != _PAGE.size:
        return None
    magic, pid, *numbers, library, foreign = _PAGE.unpack(data)
    if magic != _MAGIC:
        return None
    names = [name.split(b"\0", 1)[0].decode(errors="replace") for name in (library, foreign)]
    return Page(pid, dict(zip(COUNTERS, numbers, strict=True)), *names)


def read_pages(folder: Path) -> list[Page]:
    # A process that became another user's has a page of that user's besides: PID-UID.
    ordered = sorted(folder.iterdir(), key=lambda path: tuple(map(int, path.name.split("-"))))
    return [page for page in map(read_page, ordered) if page is not None]


def library() -> Path:
    """Our libcufile.so.0. Raises CommandError where the package has none, or the loader could not be told of it."""
    path = Path(_core.library_path()).resolve().parent / "compat" / "libcufile.so.0"
    if not path.is_file():
        raise CommandError(f"{path} is missing: install the package again")
    if set(str(path)) & set(": \t\n;"):
        raise CommandError(f"{path} has a blank or a colon in it, by which LD_PRELOAD separates names")
    return path


def environment(ours: Path, folder: Path, before: Mapping[str, str]) -> dict[str, str]:
    """The program's environment."""
    made = dict(before)
    for name, added in (
        ("LD_LIBRARY_PATH", [str(ours.parent), str(ours.parent.parent)]),
        ("LD_PRELOAD", [str(ours), str(ours.parent / "libugds_redirect.so")]),
    ):
        made[name] = ":".join([*added, *([before[name]] if before.get(name) else [])])
    made["UGDS_RUN_DIR"] = str(folder)
    # KvikIO does without cuFile where /run/udev is missing, and without its streams where there is no cufile.json.
    # NVIDIA's library needs both; ours neither.
    if not Path("/run/udev").is_dir():
        made.setdefault("KVIKIO_COMPAT_MODE", "OFF")
    if not Path("/etc/cufile.json").exists():
        made.setdefault("CUFILE_ENV_PATH_JSON", str(ours.parent / "cufile.json"))
    return made


def foreign_in(pid: int, ours: Path) -> str:
    """Another libcufile that a process has mapped; "" where there is none, or nobody may look."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return ""
    for line in maps.splitlines():
        path = line[73:] if len(line) > 73 else ""
        if os.path.basename(path).startswith("libcufile.so") and os.path.dirname(path) != str(ours.parent):
            return path
    return ""


def find_foreign(pages: Sequence[Page], pids: set[int], ours: Path) -> tuple[int, str] | None:
    """A process with another libcufile, and which: by its own words, or as the system sees it."""
    for page in pages:
        if page.foreign:
            return page.pid, page.foreign
    for pid in pids | {page.pid for page in pages}:
        if found := foreign_in(pid, ours):
            return pid, found
    return None


@contextlib.contextmanager
def _signals_go_to(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Who ends this command ends the program. A terminal's Ctrl-C has reached it already."""

    def forward(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _watch(child: subprocess.Popen[bytes], folder: Path, ours: Path) -> None:
    """Waits for the program's end. Raises CommandError, with the program stopped, where our library is not the one."""
    start = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_INTERVAL_S)
        pages = read_pages(folder)
        ended = child.returncode is not None
        if found := find_foreign(pages, set() if ended else {child.pid}, ours):
            _stop(child)
            raise CommandError(
                f"another libcufile got into process {found[0]}: {found[1]}\n  ours is {ours}\n"
                "  what the program read by that one did not go through uGDS; take it out of LD_PRELOAD, or of what "
                "the program loads by a path"
            )
        if pages and (ended or any(page.pid == child.pid for page in pages)):
            if ended:
                return
            continue
        if ended or time.monotonic() - start > _PATIENCE_S:
            _stop(child)
            raise CommandError(
                "our libcufile did not get into the program: it is linked statically, or runs with rights that its "
                "caller does not have, so that the loader does not heed LD_PRELOAD"
            )


def _summary(pages: Sequence[Page]) -> dict[str, int]:
    return {name: sum(page.counters[name] for page in pages) for name in COUNTERS}


def _tell(pages: Sequence[Page], command: Sequence[str], status: int, ours: Path, as_json: bool) -> None:
    used = [page for page in pages if page.was_used]
    totals = _summary(used)
    if as_json:
        told = {
            "command": list(command),
            "status": status,
            "library": str(ours),
            "totals": totals,
            "processes": [{"pid": page.pid, **page.counters} for page in used],
        }
        print(json.dumps(told), flush=True)
        return
    console = _report.console(stderr=True)
    if not used:
        console.print(
            "Nothing that could be counted went through uGDS: the program did not use cuFile, or said that it could "
            "not be counted."
        )
        return
    columns = ("", *(f"process {page.pid}" for page in used), *(["all"] if len(used) > 1 else []))
    shown = [page.counters for page in used] + ([totals] if len(used) > 1 else [])
    rows = [(name.replace("_", " "), *(str(counters[name]) for counters in shown)) for name in COUNTERS]
    console.print(_report.table("What went through uGDS", columns, rows))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Where the pages are made, also by processes that change their user. Nobody else knows its name, or can list it.
    Raises CommandError."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="ugds-run-", ignore_cleanup_errors=True))
            os.chmod(made, 0o1733)
        except OSError as error:
            raise CommandError(
                f"there is no folder that may be written to for what is counted ({error.strerror or error}); name one "
                "by TMPDIR"
            ) from None
        yield Path(made)


def run(command: Sequence[str], summary: bool, as_json: bool) -> int:
    """Runs the program to its end. Returns its exit status; 128 and the signal's number where one ended it."""
    if not command:
        raise CommandError("name a program\n  for example: ugds run -- python app.py", status=2)
    ours = library()
    with _folder() as folder:
        try:
            child = subprocess.Popen(command, env=environment(ours, folder, os.environ))
        except FileNotFoundError:
            raise CommandError(f"there is no program {command[0]}", status=127) from None
        except PermissionError:
            raise CommandError(f"{command[0]} may not be run", status=126) from None
        except OSError as error:  # no program at all, or its arguments are too long
            raise CommandError(f"{command[0]} cannot be run: {error.strerror}", status=126) from None
        with _signals_go_to(child):
            _watch(child, folder, ours)
        status = child.returncode if child.returncode >= 0 else 128 - child.returncode
        if summary or as_json:
            sys.stdout.flush()
            _tell(read_pages(folder), command, status, ours, as_json)
    return status
