# SPDX-License-Identifier: Apache-2.0
"""What is told of failures: a line for each event, in the program's log, on standard error, in a file for afterwards,
and the last commands of a device that wedges."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ugds
import ugds.testing
import ugds.trace
from ugds import _core

URI = "emulated:1MiB?lba=512&mdts=1&timeout=1"
ALWAYS = {"time", "level", "event", "device", "pid", "started_ns", "program"}
SOMETIMES = {"queue", "command", "operation", "lba", "blocks", "status", "status_text", "action", "detail", "remedy"}
SOMETIMES |= {"left_out"}

WEDGE = f"""
import os, sys, ugds, ugds.testing
ssd = ugds.open("{URI}", deadline=0.2, queues=1)
emulator = ugds.testing.emulator(ssd)
buffer = ugds.empty("64KiB")
for number in range(5):
    ssd.read(buffer, number * 512, 512)
emulator.inject("status", opcode=1, status=0x281)
try:
    ssd.write(buffer, 8192, 1024)
except ugds.Error:
    pass
emulator.inject("hang", opcode=2, abortable=False)
emulator.inject("never_stopped", count=100)
emulator.inject("reset_fails", count=100)
try:
    ssd.read(buffer, 4096, 1024)
except ugds.Error as error:
    print(ssd.state)
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("UGDS_LOG", "XDG_STATE_HOME")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**env, **environment}
    )


def events(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    for event in found:
        assert ALWAYS <= event.keys() <= ALWAYS | SOMETIMES, event
    return found


@pytest.fixture
def told() -> Iterator[list[dict[str, Any]]]:
    """What the logger `ugds` is given, by event."""
    found: list[dict[str, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields = record.ugds  # type: ignore[attr-defined]
            assert json.loads(record.getMessage()) == fields
            assert record.levelname.lower() == fields["level"]
            found.append(fields)

    _core.flush_events(5.0)  # type: ignore[attr-defined]  # of what was before
    logger, handler = logging.getLogger("ugds"), Handler()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield found
    logger.removeHandler(handler)


def test_a_recovery_is_told_step_by_step(told: list[dict[str, Any]]) -> None:
    with ugds.open(URI, deadline=0.2, queues=1) as ssd, ugds.empty("4KiB") as buffer:
        ugds.testing.emulator(ssd).inject("hang", opcode=2, abortable=False)
        with pytest.raises(ugds.Error):
            ssd.read(buffer)
        # Everything was logged before the error was raised.
        assert [event["event"] for event in told] == ["overdue", "abort", "reset", "recovered"]
        overdue, abort, reset, recovered = told
        assert all(event["device"] == URI and event["pid"] == os.getpid() for event in told)
        assert (overdue["queue"], overdue["command"], overdue["action"]) == (1, abort["command"], "abort")
        assert "the deadline is 0.200 s" in overdue["detail"] and "raise the deadline" in overdue["remedy"]
        assert "did not abort" in abort["detail"] or "not answered" in abort["detail"]
        assert abort["action"] == "the controller is reset"
        assert reset["action"] == "controller reset (CC.EN)"
        assert "a command is overdue; commands in flight that it ended: 1" in reset["detail"]
        assert recovered["level"] == "info" and " ms " in recovered["detail"]
        told.clear()
        ugds.testing.emulator(ssd).inject("hang", opcode=2)
        with pytest.raises(ugds.Error):
            ssd.read(buffer)
        assert [event["event"] for event in told if event["event"] != "command_failed"] == ["overdue", "abort"]
        assert told[-1]["action"] == "none: the command has ended"


@pytest.mark.parametrize(
    ("faults", "told_of"),
    [
        ((), ["abort: the controller is reset", "reset: controller reset (CC.EN)", "recovered: requests go on"]),
        (
            ("never_stopped",),
            ["abort: the controller is reset", "reset: function reset", "recovered: requests go on"],
        ),
        (("never_stopped", "reset_fails"), ["abort: the controller is reset", "wedged: what its commands may"]),
    ],
)
def test_each_step_follows_where_the_one_before_did_not_help(
    told: list[dict[str, Any]], faults: tuple[str, ...], told_of: list[str]
) -> None:
    ssd = ugds.open(URI, deadline=0.2, queues=1)
    emulator = ugds.testing.emulator(ssd)
    emulator.inject("late_write", opcode=2, abortable=False)
    for fault in faults:
        emulator.inject(fault, count=10)
    with ugds.empty("64KiB") as buffer:
        with pytest.raises(ugds.Error):
            ssd.read(buffer)
        steps = [f"{event['event']}: {event['action']}" for event in told]
        assert steps[0] == "overdue: abort"
        assert len(steps) == 1 + len(told_of)
        assert all(step.startswith(words) for step, words in zip(steps[1:], told_of, strict=True)), steps
        emulator.clear_faults()
        if ssd.state == "ready":
            assert ssd.read(buffer) == 64 << 10
        ssd.close()


def test_a_command_that_fails_is_told_with_its_range_and_status(told: list[dict[str, Any]]) -> None:
    with ugds.open(URI, queues=1) as ssd, ugds.empty("4KiB") as buffer:
        ugds.testing.emulator(ssd).inject("status", opcode=2, status=0x281)
        with pytest.raises(ugds.Error) as caught:
            ssd.read(buffer, 8192, 2048)
    (event,) = told
    assert (event["event"], event["operation"], event["lba"], event["blocks"]) == ("command_failed", "read", 16, 4)
    assert (event["status"], event["queue"], event["status_text"]) == (0x281, 1, caught.value.status_text)
    assert event["remedy"] == caught.value.hint


@pytest.mark.parametrize(
    ("kind", "name"),
    [("fatal", "reset"), ("unknown_id", "protocol_error"), ("remove", "lost"), ("never_ready", "failed")],
)
def test_each_kind_of_failure_has_its_event(told: list[dict[str, Any]], kind: str, name: str) -> None:
    ssd = ugds.open(URI, deadline=0.3, queues=1)
    emulator = ugds.testing.emulator(ssd)
    if kind == "never_ready":
        emulator.inject("hang", opcode=2, abortable=False)
        emulator.inject(kind, count=100)
    elif kind == "remove":
        emulator.remove()
    else:
        emulator.inject(kind, opcode=2)
    with ugds.empty("4KiB") as buffer:
        end = time.monotonic() + 10
        while not any(event["event"] == name for event in told) and time.monotonic() < end:
            with contextlib.suppress(ugds.Error):
                ssd.read(buffer)
        ssd.close()
    (event,) = (one for one in told if one["event"] == name)
    assert event["device"] == URI
    assert event["level"] == ("error" if name in ("lost", "failed") else "warning")
    assert event["action"]


def test_many_failures_are_counted_and_a_few_told(told: list[dict[str, Any]]) -> None:
    with ugds.open(URI, queues=1) as ssd, ugds.empty("4KiB") as buffer:
        ugds.testing.emulator(ssd).inject("status", opcode=2, status=0x281, count=500)
        with ssd.batch(512) as batch:
            batch.read(buffer, [0] * 500, 512, [0] * 500)
            assert len(batch.completed(500, timeout=20).errors) == 500
    _core.flush_events(5.0)  # type: ignore[attr-defined]
    assert {event["event"] for event in told} <= {"command_failed", "left_out"}
    failures = [event for event in told if event["event"] == "command_failed"]
    assert len(failures) < 500 / 4  # 16 a second, and the machine may be slow
    assert len(failures) + sum(event.get("left_out", 0) for event in told) == 500


def test_a_handler_that_uses_the_library_or_fails_harms_nothing(told: list[dict[str, Any]]) -> None:
    class Bad(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with ugds.empty("4KiB") as mine:
                assert other.read(mine) == 4096
            if len(seen) < 3:
                seen.append(record.getMessage())
            raise ValueError("of the handler")

    seen: list[str] = []
    handler = Bad()
    logging.getLogger("ugds").addHandler(handler)
    unraisable: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, unraisable.append
    try:
        with ugds.open("emulated:1MiB") as other, ugds.open(URI, deadline=0.2) as ssd, ugds.empty("4KiB") as buffer:
            ugds.testing.emulator(ssd).inject("hang", opcode=2, abortable=False)
            with pytest.raises(ugds.Error) as caught:
                ssd.read(buffer)
            assert caught.value.errno == errno.ETIMEDOUT
            logging.getLogger("ugds").removeHandler(handler)
            assert ssd.read(buffer) == 4096
    finally:
        sys.unraisablehook = hook
        logging.getLogger("ugds").removeHandler(handler)
    assert seen


def test_events_of_other_threads_are_logged_while_one_holds_the_interpreter(told: list[dict[str, Any]]) -> None:
    """Failures in awaits' thread, whose events Python logs later: nobody waits for anybody."""
    import asyncio

    async def many(ssd: ugds.Device, buffer: ugds.Registration) -> list[Any]:
        return await asyncio.gather(*(ssd.aread(buffer) for _ in range(20)), return_exceptions=True)

    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        with ugds.open(URI, deadline=0.3) as ssd, ugds.empty("4KiB") as buffer:
            for _ in range(3):
                ugds.testing.emulator(ssd).inject("hang", opcode=2, abortable=False)
                assert any(isinstance(one, ugds.Error) for one in asyncio.run(many(ssd, buffer)))
    finally:
        stop.set()
        thread.join()
    _core.flush_events(5.0)  # type: ignore[attr-defined]
    assert [event["event"] for event in told].count("recovered") == 3


def test_nothing_is_logged_in_the_middle_of_what_the_main_thread_does(tmp_path: Path) -> None:
    """It may have a lock that a handler takes, as that of a QueueHandler's queue."""
    done = python(
        f"""
import logging, threading, time, ugds, ugds.testing
lock, seen = threading.Lock(), []
class Handler(logging.Handler):
    def emit(self, record):
        with lock:
            seen.append(record.ugds["event"])
logging.getLogger("ugds").addHandler(Handler())
def fail():
    with ssd.batch(1) as batch:
        batch.read(buffer, 0, 512)
        assert batch.completed(1, timeout=20).errors  # told here, and so nothing is raised
with ugds.open("{URI}") as ssd, ugds.empty("4KiB") as buffer:
    ugds.testing.emulator(ssd).inject("status", opcode=2, status=0x281)
    thread = threading.Thread(target=fail)
    with lock:
        thread.start()
        while thread.is_alive():
            pass
        for _ in range(1000):
            pass  # by now the interpreter has been asked
    while not seen or threading.active_count() > 1:  # nothing of it stays
        time.sleep(0.01)
    print(seen)
""",
        UGDS_STATE_DIR=str(tmp_path),
    )
    assert (done.stdout, done.stderr) == ("['command_failed']\n", "")


def test_a_reader_that_is_slow_is_told_what_matters_all_the_same(told: list[dict[str, Any]]) -> None:
    goes_on = threading.Event()

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            goes_on.wait(60)

    handler = Slow()
    logging.getLogger("ugds").addHandler(handler)
    try:
        with contextlib.ExitStack() as stack:
            ssds = [stack.enter_context(ugds.open(URI, queues=1)) for _ in range(20)]
            bad = stack.enter_context(ugds.open(URI, deadline=0.2, queues=1))
            buffer = stack.enter_context(ugds.empty("4KiB"))
            for ssd in ssds:
                ugds.testing.emulator(ssd).inject("status", opcode=2, status=0x281, count=16)
                batch = stack.enter_context(ssd.batch(16))
                batch.read(buffer, [0] * 16, 512, [0] * 16)
                assert len(batch.completed(16, timeout=20).errors) == 16
            ugds.testing.emulator(bad).inject("fatal", opcode=2)
            with stack.enter_context(bad.batch(1)) as batch:
                batch.read(buffer, 0, 512)
                assert len(batch.completed(1, timeout=20).errors) == 1
            goes_on.set()
    finally:
        goes_on.set()
        logging.getLogger("ugds").removeHandler(handler)
    _core.flush_events(5.0)  # type: ignore[attr-defined]
    assert [event["event"] for event in told if event["event"] in ("reset", "recovered")] == ["reset", "recovered"]
    assert sum(event.get("left_out", 0) for event in told) > 0  # there was no room for all of them


@pytest.mark.parametrize("retry", [0, 1])
def test_events_are_logged_while_the_main_thread_waits(retry: int) -> None:
    """Whatever it waits in: here a lock that nobody gives back. The record has the event's time."""
    arrived = threading.Event()
    records: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)
            if record.ugds["event"] == "recovered":  # type: ignore[attr-defined]
                arrived.set()

    handler = Handler()
    logging.getLogger("ugds").addHandler(handler)
    logging.getLogger("ugds").setLevel(logging.DEBUG)
    try:
        with ugds.open(URI, deadline=0.2, queues=1, retry=retry) as ssd, ugds.empty("4KiB") as buffer:
            ugds.testing.emulator(ssd).inject("hang", opcode=2, abortable=False)
            ended = threading.Event()

            def read() -> None:
                with contextlib.suppress(ugds.Error):
                    ssd.read(buffer)
                ended.set()

            before = time.time()
            threading.Thread(target=read).start()
            # In one call, in which the interpreter runs nothing in this thread.
            assert arrived.wait(20)
            assert ended.wait(20)
            for record in records:
                assert before - 0.001 <= record.created <= time.time()
                told_at = datetime.fromisoformat(record.ugds["time"].replace("Z", "+00:00"))  # type: ignore[attr-defined]
                assert record.created == told_at.timestamp() and record.msecs == told_at.microsecond // 1000
            assert [r.ugds["event"] for r in records] == ["overdue", "abort", "reset", "recovered"]  # type: ignore[attr-defined]
    finally:
        logging.getLogger("ugds").removeHandler(handler)


def test_an_overdue_command_is_told_with_its_request(told: list[dict[str, Any]]) -> None:
    with ugds.open(URI, deadline=0.2, queues=1) as ssd, ugds.empty("4KiB") as buffer:
        ugds.testing.emulator(ssd).inject("hang", opcode=1)
        with pytest.raises(ugds.Error):
            ssd.write(buffer, 8192, 2048)
    told = [event for event in told if event["event"] != "command_failed"]
    assert [event["event"] for event in told[:2]] == ["overdue", "abort"]
    for event in told[:2]:
        assert (event["operation"], event["lba"], event["blocks"]) == ("write", 16, 4)


def test_a_long_uri_is_whole_and_a_longer_one_is_marked(told: list[dict[str, Any]]) -> None:
    for length, whole in ((150, True), (400, False)):
        uri = f"{URI}&name={'n' * length}"
        with ugds.open(uri, queues=1) as ssd, ugds.empty("4KiB") as buffer:
            ugds.testing.emulator(ssd).inject("status", opcode=2, status=0x281)
            with pytest.raises(ugds.Error) as caught:
                ssd.read(buffer)
        ugds.testing.forget_subsystem("n" * length)
        for text in (caught.value.device, told[-1]["device"]):
            assert text == uri if whole else (text.endswith("...") and uri.startswith(text[:-3]))


# --- Standard error and the file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "names"),
    [
        ("", set()),
        ("0", set()),
        ("error", {"wedged"}),
        ("warning", {"command_failed", "overdue", "abort", "wedged"}),
        ("info", {"command_failed", "overdue", "abort", "wedged"}),
    ],
)
def test_standard_error_has_what_the_environment_asks_for(tmp_path: Path, level: str, names: set[str]) -> None:
    done = python(WEDGE, UGDS_LOG=level, UGDS_STATE_DIR="")
    assert (done.returncode, done.stdout) == (0, "wedged\n")
    assert {event["event"] for event in events(done.stderr)} == names
    assert list(tmp_path.iterdir()) == []


def doctor(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "XDG_STATE_HOME"}
    command = [sys.executable, "-m", "ugds", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**env, **environment})


def test_the_last_fault_is_printed_with_what_to_do_and_the_last_commands_are_kept(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert doctor("--last-fault", UGDS_STATE_DIR=str(state)).stdout.startswith("no fault is known")
    earlier = python("import ugds, ugds.testing\n" + WEDGE.split("\n", 2)[2], UGDS_STATE_DIR=str(state))
    last = python(WEDGE, UGDS_STATE_DIR=str(state))
    assert (earlier.stdout, last.stdout, last.stderr) == ("wedged\n", "wedged\n", "")
    assert stat.S_IMODE((state / "faults.jsonl").stat().st_mode) == 0o600
    assert stat.S_IMODE((state / "wedge.trace.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    kept = events((state / "faults.jsonl").read_text())
    processes = {(event["pid"], event["started_ns"]) for event in kept}
    assert len(processes) == 2

    done = doctor("--last-fault", "--json", UGDS_STATE_DIR=str(state))
    printed = events(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert [event["event"] for event in printed] == ["command_failed", "overdue", "abort", "wedged"]
    assert {event["pid"] for event in printed} == {kept[-1]["pid"]}

    done = doctor("--last-fault", UGDS_STATE_DIR=str(state))
    for words in (
        URI,
        "wedged",
        "media error",
        "remedy",
        "close it, which resets",
        "wedge.trace.json",
        "queue 1, command ",
    ):
        assert words in done.stdout, words

    (trace,) = ugds.trace.read_chrome(state / "wedge.trace.json")
    assert (trace.device, trace.transport) == (URI, "emulated")
    commands = [(int(r["opcode"]), int(r["offset"]), int(r["bytes"]), int(r["status"])) for r in trace.records[-7:]]
    assert commands == [
        *((2, number * 512, 512, 0) for number in range(5)),
        (1, 8192, 1024, 0x281),
        (2, 4096, 1024, 0x371),
    ]
    assert (np.diff(trace.records["staged"].astype("i8")) >= 0).all()
    content = json.loads((state / "wedge.trace.json").read_text())
    assert '"in flight when the device wedged"' in json.dumps(content["traceEvents"][-4:])
    phases = [event["ph"] for event in content["traceEvents"]]
    assert phases.count("b") == phases.count("e") == len(trace.records)


def test_other_faults_than_the_last_are_found_by_process_and_device(tmp_path: Path) -> None:
    state = tmp_path / "state"
    other = WEDGE.replace("1MiB", "2MiB")
    for code in (WEDGE, other, other.split('emulator.inject("hang')[0]):
        assert python(code, UGDS_STATE_DIR=str(state)).returncode == 0
    environment = {"UGDS_STATE_DIR": str(state)}
    assert (state / "wedge.trace.json").is_file() and (state / "wedge.1.trace.json").is_file()

    def asked(*options: str) -> list[str]:
        return [event["event"] for event in events(doctor("--last-fault", "--json", *options, **environment).stdout)]

    assert asked() == ["command_failed"]
    whole = ["command_failed", "overdue", "abort", "wedged"]
    assert asked("--device", "emulated:1MiB") == whole
    assert asked("--all") == [*whole, *whole, "command_failed"]
    assert asked("--all", "--device", "emulated:2MiB") == [*whole, "command_failed"]
    first = events(doctor("--last-fault", "--json", "--all", **environment).stdout)[0]["pid"]
    assert asked("--pid", str(first)) == whole
    printed = doctor("--last-fault", **environment).stdout
    assert "write of 2 blocks from LBA 16" in printed and "8 other event(s) are kept" in printed
    assert "no such fault" in doctor("--last-fault", "--device", "nothing", **environment).stdout


def test_a_doctor_says_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("/proc/nothing/here", str(tmp_path / "file"), str(tmp_path / "file" / "below")):
        done = doctor("--last-fault", UGDS_STATE_DIR=place)
        assert done.returncode != 0 and "cannot be kept" in done.stderr, place
    assert doctor("--last-fault", UGDS_STATE_DIR=str(tmp_path / "new" / "one")).returncode == 0


def test_nothing_is_kept_in_a_folder_that_others_may_write_to_or_that_is_no_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    file = tmp_path / "file"
    file.write_text("a file")
    link = tmp_path / "link"
    target = tmp_path / "target"
    target.mkdir(0o700)
    link.symlink_to(target)
    inside = tmp_path / "inside"
    inside.mkdir(0o700)
    (inside / "faults.jsonl").symlink_to(file)
    for place in (shared, file, link, inside, Path("/proc/nothing/here"), Path("/dev/null")):
        done = python(WEDGE, UGDS_STATE_DIR=str(place))
        assert (done.returncode, done.stdout, done.stderr) == (0, "wedged\n", ""), place
    assert list(shared.iterdir()) == [] and list(target.iterdir()) == [] and file.read_text() == "a file"


def test_a_full_disk_a_limit_and_no_home_are_silent(tmp_path: Path) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    begin, end = WEDGE.split("for number")  # memory of ours is a file too
    done = python(f"{begin}{limit}for number{end}", UGDS_STATE_DIR=str(tmp_path / "limited"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "wedged\n", "")
    if Path("/dev/full").exists():
        full = f"import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n{WEDGE}"
        done = python(full, UGDS_LOG="info", UGDS_STATE_DIR=str(tmp_path / "s"))
        assert (done.returncode, done.stdout) == (0, "wedged\n")
    closed = python("import os\nos.close(2)\n" + WEDGE, UGDS_LOG="info", UGDS_STATE_DIR=str(tmp_path / "c"))
    assert (closed.returncode, closed.stdout) == (0, "wedged\n")
    env = {
        name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_STATE_HOME", "UGDS_STATE_DIR")
    }
    done = subprocess.run([sys.executable, "-c", WEDGE], capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "wedged\n", "")


def test_the_folder_is_that_of_states_at_home(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("XDG_STATE_HOME", "UGDS_STATE_DIR")}
    for extra, where in (
        ({"HOME": str(tmp_path / "home")}, tmp_path / "home/.local/state/ugds"),
        ({"XDG_STATE_HOME": str(tmp_path / "xdg")}, tmp_path / "xdg/ugds"),
    ):
        done = subprocess.run([sys.executable, "-c", WEDGE], capture_output=True, text=True, env={**env, **extra})
        assert (done.returncode, done.stdout, done.stderr) == (0, "wedged\n", "")
        assert events((where / "faults.jsonl").read_text())[-1]["event"] == "wedged"


def test_the_file_stays_small(tmp_path: Path) -> None:
    code = f"""
import ugds, ugds.testing
from ugds import _core
ssd = ugds.open("{URI}", deadline=5, queues=1)
emulator = ugds.testing.emulator(ssd)
buffer = ugds.empty("4KiB")
for number in range(400):
    emulator.inject("fatal", opcode=2)
    try:
        ssd.read(buffer)
    except ugds.Error:
        pass
    if number % 50 == 49:
        _core.flush_events(10.0)
"""
    assert python(code, UGDS_STATE_DIR=str(tmp_path / "s")).returncode == 0
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "s").iterdir()}
    assert set(sizes) == {"faults.jsonl", "faults.1.jsonl"}
    assert all(size <= 128 << 10 for size in sizes.values())
    found = events((tmp_path / "s/faults.1.jsonl").read_text() + (tmp_path / "s/faults.jsonl").read_text())
    assert found[-1]["event"] == "recovered"


def test_lines_that_are_cut_are_passed_over(tmp_path: Path) -> None:
    assert python(WEDGE, UGDS_STATE_DIR=str(tmp_path)).stdout == "wedged\n"
    file = tmp_path / "faults.jsonl"
    file.write_bytes(b'{"time": "2026\n\xff\xfe\n[1]\n\n{}\n' + file.read_bytes() + b'{"time": "cut')
    done = doctor("--last-fault", "--json", UGDS_STATE_DIR=str(tmp_path))
    assert events(done.stdout)[-1]["event"] == "wedged"


@pytest.mark.parametrize("limit", ["RLIMIT_NOFILE", "RLIMIT_AS"])
def test_a_failure_is_told_where_there_are_no_descriptors_or_no_memory_left(tmp_path: Path, limit: str) -> None:
    done = python(
        f"""
import os, resource, sys, ugds, ugds.testing
class Handler:
    level = 0
    def handle(self, record):
        print(record.ugds["event"], flush=True)
def listen():
    sys.modules["logging"].getLogger("ugds").handlers.append(Handler())
ssd, buffer = ugds.open("{URI}"), ugds.empty("4KiB")
ugds.testing.emulator(ssd).inject("status", opcode=2, status=0x281)
listen()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
most = used if "{limit}" == "RLIMIT_AS" else 3
resource.setrlimit(resource.{limit}, (most, most))
try:
    ssd.read(buffer)
except ugds.Error as error:
    print(error.status)
""",
        UGDS_STATE_DIR=str(tmp_path),
    )
    assert (done.stdout, done.stderr) == ("command_failed\n641\n", "")


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "endless", "deep"])
def test_a_doctor_reads_nothing_but_what_the_library_leaves(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "faults.jsonl"
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    elif kind == "endless":
        with file.open("wb") as sparse:
            sparse.truncate(1 << 40)
    else:
        file.write_text("[" * 100000 + "\n")
    done = doctor("--last-fault", UGDS_STATE_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "no fault is known" in done.stdout


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\x1b]0;title\x07\x1b[2J", "a\\x1b]0;title\\x07\\x1b[2J"),
        ("a\x9b31m\x7f", "a\\x9b31m\\x7f"),
        ("a\u2028b\u2029c\x85d", "a\\u2028b\\u2029c\\x85d"),
        ("x" * 43 + "\u20ac" * 70, "x" * 43 + "\u20ac" * 60 + "..."),
    ],
)
def test_text_of_callers_neither_commands_a_terminal_nor_hides_an_event(tmp_path: Path, name: str, shown: str) -> None:
    done = python(
        f"""
import ugds, ugds.testing
with ugds.open("emulated:1MiB?lba=512&name=" + {name!a}) as ssd, ugds.empty("4KiB") as buffer:
    ugds.testing.emulator(ssd).inject("status", opcode=2, status=0x281)
    try:
        ssd.read(buffer)
    except ugds.Error:
        pass
""",
        UGDS_STATE_DIR=str(tmp_path),
        UGDS_LOG="warning",
    )
    kept = (tmp_path / "faults.jsonl").read_text("utf-8")
    for line in (done.stderr, kept):
        assert line.endswith("\n") and line[:-1].isprintable(), ascii(line)
        cut = name
        if len(name) > 100:  # what does not fit is left out by whole characters, and that is marked
            cut = name.encode()[: 252 - len("emulated:1MiB?lba=512&name=")].decode("utf-8", "ignore") + "..."
        assert json.loads(line)["device"] == "emulated:1MiB?lba=512&name=" + cut
    printed = doctor("--last-fault", UGDS_STATE_DIR=str(tmp_path)).stdout
    assert f"\nemulated:1MiB?lba=512&name={shown}\n" in printed
    assert printed.replace("\n", "").isprintable()


def test_a_doctor_without_a_question_says_what_can_be_asked() -> None:
    done = doctor()
    assert (done.returncode, done.stdout) == (2, "")
    assert "--last-fault" in done.stderr
    assert "UGDS_STATE_DIR" in doctor("--last-fault", UGDS_STATE_DIR="").stderr


def test_a_failed_request_on_a_file_is_told_with_its_range_and_the_systems_words(
    told: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with ugds.open(f"file:{path}?readonly=1") as device, ugds.empty("16KiB") as buffer:
        assert device.read(buffer) == 8192  # its end is no failure
        with pytest.raises(ugds.Error):
            device.write(buffer, 100, 4000)
    (event,) = told
    assert (event["event"], event["device"]) == ("command_failed", f"file:{path}?readonly=1")
    assert (event["operation"], event["lba"], event["blocks"]) == ("write", 100, 4000)
    assert event["status_text"] == "operating system: Bad file descriptor"
