# SPDX-License-Identifier: Apache-2.0
"""`ugds serve`, in a process of its own, by its output, its socket and its exit status."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ugds
import vfio_user_client as vu
from vfio_user_client import PAGE, Client

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `ugds serve`, and ends what is left of it."""
    running: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ugds", "serve", *map(str, arguments)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def event(process: subprocess.Popen[str]) -> dict[str, Any]:
    loaded = json.loads(line(process))
    assert isinstance(loaded, dict)
    return loaded


def fails(process: subprocess.Popen[str], *parts: str, status: int = 1) -> None:
    out, error = process.communicate(timeout=60)
    assert process.returncode == status
    assert out == ""
    assert "Traceback" not in error
    for part in parts:
        assert part in error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_serves_and_ends_when_told_to(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "s"
    server = start("emulated:4MiB", "--socket", path)
    assert line(server) == f"serving emulated:4MiB at {path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with vu.drive(str(path)) as drive:
        drive.write(0, b"a" * PAGE)
        assert line(server) == f"client {os.getpid()} connected"
        server.send_signal(number)
        assert server.wait(20) == 0
        assert drive.client.socket.recv(1) == b""
    assert line(server) == "stopped after 1 client"
    assert not path.exists()
    assert server.stderr is not None
    assert server.stderr.read() == ""


def test_events_are_json_lines(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = start("emulated:4MiB", "--socket", path, "--json")
    assert event(server) == {"event": "serving", "uri": "emulated:4MiB", "path": str(path), "process": server.pid}
    with vu.drive(str(path)) as drive:
        assert event(server) == {"event": "connected", "process": os.getpid()}
        with pytest.raises(vu.Refused):
            Client(str(path))
        told = event(server)
        assert (told["event"], told["process"], "again" in told) == ("refused", os.getpid(), False)
        for _ in range(20):  # told of as a number, in the end
            with pytest.raises(vu.Refused):
                Client(str(path))
        drive.io.submit(0x02, 1, 0xDEAD000)
        assert drive.io.wait()[0] == 0x004
    told = event(server)
    assert (told["event"], told["process"], told["reason"]) == ("disconnected", os.getpid(), "the client left")
    assert [violation["rule"] for violation in told["violations"]] == ["unmapped-access"]
    server.terminate()
    told = event(server)
    assert (told["event"], told["again"], told["process"]) == ("refused", 20, os.getpid())
    assert event(server) == {"event": "stopped", "clients": 1}


def test_a_folder_gets_a_socket_called_cntrl(start: Start, tmp_path: Path) -> None:
    assert line(start("emulated:1MiB", "--socket", tmp_path)).endswith(f" at {tmp_path}/cntrl")
    Client(str(tmp_path / "cntrl")).close()
    (tmp_path / "more").mkdir()
    assert line(start("emulated:1MiB", "--socket", f"{tmp_path}/more/")).endswith("/more/cntrl")


def test_the_mode_can_be_chosen(start: Start, tmp_path: Path) -> None:
    line(start("emulated:1MiB", "--socket", tmp_path / "s", "--mode", "660"))
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660
    fails(start("emulated:1MiB", "--socket", tmp_path / "t", "--mode", "1777"), "octal", status=2)
    fails(start("emulated:1MiB", "--socket", tmp_path / "t", "--mode", "68"), "octal", status=2)


def test_a_live_servers_socket_is_left_alone_and_a_dead_ones_replaced(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = start("emulated:1MiB", "--socket", path)
    line(first)
    fails(start("emulated:1MiB", "--socket", path), "another server is there", str(path))
    with vu.drive(str(path)) as drive:  # and nobody was disturbed
        fails(start("emulated:1MiB", "--socket", path), "another server is there")
        assert drive.read(0, PAGE) == bytes(PAGE)
    first.kill()
    first.wait()
    assert path.exists()
    line(start("emulated:1MiB", "--socket", path))
    Client(str(path)).close()


def test_of_many_that_start_at_once_one_serves(tmp_path: Path) -> None:
    servers: list[ugds.Server] = []
    codes: list[int | None] = []

    def serve() -> None:
        try:
            servers.append(ugds.serve("emulated:1MiB", str(tmp_path / "s")))
        except ugds.Error as error:
            codes.append(error.errno)

    for round_ in range(10):
        (tmp_path / "s").unlink(missing_ok=True)
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(str(tmp_path / "s"))
        dead.close()
        threads = [threading.Thread(target=serve) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(servers) == 1, round_
        assert set(codes) == {errno.EADDRINUSE}
        Client(servers[0].path).close()
        servers.pop().close()
        assert not (tmp_path / "s").exists()
        codes.clear()


def test_another_servers_socket_is_not_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = ugds.serve("emulated:1MiB", str(path))
    path.rename(tmp_path / "moved")
    second = ugds.serve("emulated:1MiB", str(path))
    first.close()
    Client(str(path)).close()
    second.close()
    assert not path.exists()
    (tmp_path / "moved").unlink()


@pytest.mark.parametrize(
    ("uri", "path", "code", "words"),
    [
        ("emulated:1MiB", "missing/s", errno.ENOENT, "make the folder first"),
        ("emulated:1MiB", "missing/", errno.ENOENT, "make the folder first"),
        ("emulated:1MiB", "x" * 108, errno.ENAMETOOLONG, "107"),
        ("emulated:1MiB", "file", errno.EEXIST, "no socket"),
        ("emulated:1MiB", "file/s", errno.ENOTDIR, "folder"),
        ("emulated:1MiB", "", errno.EINVAL, "empty"),
        ("emulated:1MiB?lbaa=512", "s", errno.EINVAL, "did you mean"),
        ("emulated:1MiB?pump=caller", "s", errno.EINVAL, "pump=caller"),
        ("vfio:0000:01:00.0", "s", errno.EINVAL, "no other can be served"),
        ("1GiB", "s", errno.EINVAL, ""),
    ],
)
def test_what_cannot_be_served_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, path: str, code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(ugds.Error) as caught:
        ugds.serve(uri, path)
    assert caught.value.errno == code
    assert words in str(caught.value)
    assert os.listdir() == ["file"]  # no socket is left


def test_a_longest_path_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ugds.serve("emulated:1MiB", "x" * 107) as server:
        Client(server.path).close()


def test_an_image_is_locked_while_it_is_served(start: Start, tmp_path: Path) -> None:
    image = f"emulated:{tmp_path}/image?size=1MiB"
    line(start(image, "--socket", tmp_path / "s"))
    fails(start(image, "--socket", tmp_path / "t"), "image")
    assert not (tmp_path / "t").exists()


def test_a_server_that_nobody_closes_ends_with_the_interpreter(tmp_path: Path) -> None:
    program = f"import ugds; server = ugds.serve('emulated:1MiB', {str(tmp_path / 's')!r}); print(server.path)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "s").exists()


def test_a_server_without_work_uses_no_processor_to_speak_of(start: Start, tmp_path: Path) -> None:
    server = start("emulated:1MiB", "--socket", tmp_path / "s")
    line(server)

    def used() -> float:
        fields = Path(f"/proc/{server.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(0.3)
    before = used()
    time.sleep(1)
    assert used() - before <= 0.05
