# SPDX-License-Identifier: Apache-2.0
"""What `ugds doctor` prints of failures: events that processes have left behind, by itself those of the last one."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from ugds import _core
from ugds._report import CommandError

_FILES = ("faults.1.jsonl", "faults.jsonl")
_TRACE, _OLDER_TRACE = "wedge.trace.json", "wedge.1.trace.json"
_MOST_BYTES = 1 << 20  # of a file; the library's have an eighth of it
Event = dict[str, Any]


def folder() -> Path | None:
    """Where events are kept; None where they are not."""
    name = _core.state_folder()
    return Path(name) if name else None


def _read(path: Path) -> str:
    """The text of a file as the library leaves it: of nothing else, which might not end or keep us waiting."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        return os.read(descriptor, _MOST_BYTES).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


def _events(path: Path) -> list[Event]:
    """Those of one file, in their order. What a full disk has cut is passed over."""
    found = []
    for line in _read(path).split("\n"):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and {"time", "event", "pid", "started_ns"} <= event.keys():
            found.append(event)
    return found


def kept() -> list[Event]:
    """All that is kept, in the order of writing."""
    where = folder()
    return [event for name in _FILES for event in _events(where / name)] if where is not None else []


def _process(event: Event) -> tuple[Any, Any]:
    return event["pid"], event["started_ns"]


def last() -> list[Event]:
    """The events of the process that had the latest one, in their order."""
    return _of_last(kept())


def _of_last(events: list[Event]) -> list[Event]:
    return [event for event in events if _process(event) == _process(events[-1])]


def why_not_kept(where: Path) -> str:
    """Why nothing can be kept in a folder; "" where it can."""
    there = where
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return f"{there} is no folder"
    if there == where:
        status = where.stat()
        if where.is_symlink():
            return "it is a link"
        if status.st_uid != os.geteuid():
            return "it belongs to somebody else"
        if stat.S_IMODE(status.st_mode) & 0o022:
            return "others may write to it"
    try:
        os.rmdir(tempfile.mkdtemp(dir=there))  # what the mode of a folder says is not all
    except OSError as error:
        return f"{there} cannot be written to: {error.strerror}"
    return ""


def trace() -> Path | None:
    """The last commands of the device that wedged last, for `ugds.trace.read_chrome` and for https://ui.perfetto.dev;
    None where there is none."""
    where = folder()
    return where / _TRACE if where is not None and (where / _TRACE).is_file() else None


def _shown(text: object) -> str:
    """Text of whoever had the events, such as a URI, without what a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def describe(event: Event) -> str:
    """An event in words."""
    what = str(event["event"]).replace("_", " ")
    where = [f"queue {event['queue']}"] if "queue" in event else []
    where += [f"command {event['command']}"] if "command" in event else []
    if "operation" in event:
        blocks = ""
        if "blocks" in event:
            blocks = f" of {event['blocks']} block{'s' * (event['blocks'] != 1)} from LBA {event['lba']}"
        where.append(f"{event['operation']}{blocks}")
    lines = [f"{event['time']}  {what}: {', '.join(where)}" if where else f"{event['time']}  {what}"]
    for name, label in (("status_text", "status"), ("detail", "why"), ("action", "done"), ("remedy", "remedy")):
        if event.get(name):
            lines.append(f"    {label:<7} {event[name]}")
    if event.get("left_out"):
        lines.append(f"    and {event['left_out']} more events before it, which were only counted")
    return "\n".join(map(_shown, lines))


def report(as_json: bool, *, every: bool = False, pid: int | None = None, device: str | None = None) -> int:
    """Prints those of the last process that had some; of `every` one, or of those with this `pid`; where `device` is
    given, of devices whose URI has that text, and the last process that had such. Returns the exit status."""
    where = folder()
    if where is None:
        raise CommandError(
            "faults are not kept: there is no home, or UGDS_STATE_DIR is empty; name a folder in UGDS_STATE_DIR"
        )
    if why := why_not_kept(where):
        raise CommandError(f"faults cannot be kept in {where}: {why}; name another folder in UGDS_STATE_DIR")
    everything = kept()
    events = [event for event in everything if device is None or device in str(event.get("device", ""))]
    if pid is not None:
        events = [event for event in events if event["pid"] == pid]
    elif not every:
        events = _of_last(events)
    if as_json:
        for event in events:
            print(json.dumps(event))
        return 0
    if not events:
        print(f"no fault is known ({where})" if not everything else f"no such fault is known ({where})")
        return 0
    seen: dict[tuple[Any, Any], list[Event]] = {}
    for event in events:
        seen.setdefault(_process(event), []).append(event)
    print("\n\n".join(_told(process) for process in seen.values()))
    if len(everything) > len(events):
        print(f"\n{len(everything) - len(events)} other event(s) are kept: ugds doctor --last-fault --all")
    return 0


def _told(events: list[Event]) -> str:
    """The events of one process, in words."""
    first = events[0]
    lines = [f"process {first['pid']} ({_shown(first.get('program', 'unknown'))}) had {len(events)} event(s):"]
    device = None
    for event in events:
        if event.get("device") != device:
            device = event.get("device")
            lines.append(f"\n{_shown(device)}")
        lines.append(describe(event))
    path = trace()
    if path is not None and any(event["event"] == "wedged" for event in events):
        lines.append(
            f"\nlast commands of the device that wedged last: {path}, and of the one before {_OLDER_TRACE} beside it "
            "(https://ui.perfetto.dev, or ugds.trace.read_chrome)"
        )
    return "\n".join(lines)
