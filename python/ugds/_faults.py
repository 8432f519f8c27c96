# SPDX-License-Identifier: Apache-2.0
"""What `ugds doctor --last-fault` prints: the events that the last process that had some has left behind."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from ugds import _core
from ugds._report import CommandError

_FILES = ("faults.1.jsonl", "faults.jsonl")
_TRACE = "wedge.trace.json"
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


def last() -> list[Event]:
    """The events of the process that had the latest one, in their order."""
    where = folder()
    if where is None:
        return []
    events = [event for name in _FILES for event in _events(where / name)]
    if not events:
        return []
    process = (events[-1]["pid"], events[-1]["started_ns"])
    return [event for event in events if (event["pid"], event["started_ns"]) == process]


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
        blocks = f" of {event['blocks']} blocks from {event['lba']}" if "blocks" in event else ""
        where.append(f"{event['operation']}{blocks}")
    lines = [f"{event['time']}  {what}: {', '.join(where)}" if where else f"{event['time']}  {what}"]
    for name, label in (("status_text", "status"), ("detail", "why"), ("action", "done"), ("remedy", "remedy")):
        if event.get(name):
            lines.append(f"    {label:<7} {event[name]}")
    if event.get("left_out"):
        lines.append(f"    and {event['left_out']} more events before it, which were only counted")
    return "\n".join(map(_shown, lines))


def report(as_json: bool) -> int:
    """Prints them. Returns the exit status."""
    where = folder()
    if where is None:
        raise CommandError("faults are not kept: there is no home, or UGDS_STATE_DIR is empty")
    events = last()
    if as_json:
        for event in events:
            print(json.dumps(event))
        return 0
    if not events:
        print(f"no fault is known ({where})")
        return 0
    first = events[0]
    print(f"process {first['pid']} ({_shown(first.get('program', 'unknown'))}) had {len(events)} event(s):")
    device = None
    for event in events:
        if event.get("device") != device:
            device = event.get("device")
            print(f"\n{_shown(device)}")
        print(describe(event))
    path = trace()
    if path is not None and any(event["event"] == "wedged" for event in events):
        print(f"\nlast commands of the device that wedged: {path} (https://ui.perfetto.dev, or ugds.trace.read_chrome)")
    return 0
