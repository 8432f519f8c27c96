# SPDX-License-Identifier: Apache-2.0
"""Opening vfio-user: devices of servers that are absent, broken or hostile: a clear error within a bound, no leak."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ugds

VERSION, DEVICE_INFO, REGION_INFO, IRQ_INFO, REGION_READ, REGION_WRITE = 1, 4, 5, 7, 9, 10
HEADER = struct.Struct("<HHIII")
REPLY, ERROR = 1, 0x20

Answer = Callable[[int, int, bytes], "bytes | None"]


class Server:
    """One client's server: answers each message by `answer(number, command, payload)`, a whole message; None hangs up.
    By itself it is a PCI device of NVMe's class whose registers read as zeros."""

    def __init__(self, path: Path, change: Answer | None = None) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(1)
        self.change = change
        self.commands: list[int] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self.listener.accept()
            with client:
                while header := self._exactly(client, HEADER.size):
                    number, command, size, _flags, _error = HEADER.unpack(header)
                    payload = self._exactly(client, size - HEADER.size)
                    self.commands.append(command)
                    message = self.answer(number, command, payload)
                    if message is None:
                        return
                    client.sendall(message)

    @staticmethod
    def _exactly(client: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size and (part := client.recv(size - len(data))):
            data += part
        return data if len(data) == size else b""

    def answer(self, number: int, command: int, payload: bytes) -> bytes | None:
        if self.change is not None:
            changed = self.change(number, command, payload)
            if changed != b"":
                return changed
        return reply(number, command, self.usual(command, payload))

    def usual(self, command: int, payload: bytes) -> bytes:
        if command == VERSION:
            return struct.pack("<HH", 0, 1) + b'{"capabilities":{"max_msg_fds":4}}\0'
        if command == DEVICE_INFO:
            return struct.pack("<IIII", 16, 3, 9, 5)
        if command == REGION_INFO:
            return struct.pack("<IIIIQQ", 32, 3, 0, 0, 0x4000, 0)
        if command == IRQ_INFO:
            return struct.pack("<IIII", 16, 1, 2, 9)
        if command in (REGION_READ, REGION_WRITE):
            offset, region, count = struct.unpack_from("<QII", payload)
            if command == REGION_WRITE:
                return payload[:16]
            data = {8: struct.pack("<I", 0x01080200)}.get(offset, b"\0" * 8) if region == 7 else b"\0" * 8
            return payload[:16] + data[:count]
        return b""

    def close(self) -> None:
        self.listener.close()


def reply(number: int, command: int, payload: bytes, *, flags: int = REPLY, error: int = 0, size: int = -1) -> bytes:
    return HEADER.pack(number, command, HEADER.size + len(payload) if size < 0 else size, flags, error) + payload


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Answer | None], str]]:
    servers: list[Server] = []

    def start(change: Answer | None = None) -> str:
        path = tmp_path / f"s{len(servers)}"
        servers.append(Server(path, change))
        return f"vfio-user:{path}"

    yield start
    for server in servers:
        server.close()


def refused(uri: str) -> ugds.Error:
    descriptors = len(os.listdir("/proc/self/fd"))
    start = time.monotonic()
    with pytest.raises(ugds.Error) as caught:
        ugds.open(uri)
    assert time.monotonic() - start < 10
    # The server is in this process too: it closes its end a little later.
    while len(os.listdir("/proc/self/fd")) > descriptors and time.monotonic() - start < 12:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert caught.value.operation == "open"
    assert caught.value.device.startswith("vfio-user:")
    assert caught.value.cause
    return caught.value


def test_a_socket_that_is_not_there_is_named(tmp_path: Path) -> None:
    error = refused(f"vfio-user:{tmp_path}/none")
    assert error.errno == errno.ENOENT
    assert "ugds serve" in error.hint


def test_a_socket_without_a_server_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    assert refused(f"vfio-user:{tmp_path}/dead").errno == errno.ECONNREFUSED


@pytest.mark.parametrize("path", ["", "/x" * 60])
def test_a_path_that_no_socket_can_have_is_refused(path: str) -> None:
    assert refused(f"vfio-user:{path}").errno == errno.EINVAL


def test_an_unknown_parameter_is_refused_with_the_nearest(tmp_path: Path) -> None:
    assert "interrupts" in refused(f"vfio-user:{tmp_path}/x?interupts=1").hint


def test_a_folder_is_taken_for_the_socket_in_it(tmp_path: Path) -> None:
    server = Server(tmp_path / "cntrl")
    error = refused(f"vfio-user:{tmp_path}")  # gets as far as the controller, whose registers are all zero
    assert VERSION in server.commands
    assert error.errno == errno.EOPNOTSUPP
    server.close()


@pytest.mark.parametrize("at", range(8))
def test_a_server_that_hangs_up_at_any_message_is_an_error(serve: Callable[..., str], at: int) -> None:
    seen: list[int] = []

    def hang_up(number: int, command: int, payload: bytes) -> bytes | None:
        seen.append(command)
        return None if len(seen) > at else b""

    refused(serve(hang_up))
    assert len(seen) > min(at, 5)


def bad(wanted: int, make: Callable[[int, int], bytes]) -> Answer:
    return lambda number, command, payload: make(number, command) if command == wanted else b""


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        pytest.param(bad(VERSION, lambda n, c: reply(n, c, b"")), errno.EPROTO, id="empty version"),
        pytest.param(bad(VERSION, lambda n, c: reply(n, c, struct.pack("<HH", 7, 0))), errno.EPROTO, id="version 7"),
        pytest.param(bad(VERSION, lambda n, c: reply(n, c, b"", flags=REPLY | ERROR, error=22)), errno.EPROTO, id="no"),
        pytest.param(bad(VERSION, lambda n, c: reply(n + 1, c, b"\0\0\1\0")), errno.EBUSY, id="another's reply"),
        pytest.param(bad(VERSION, lambda n, c: reply(n, c + 1, b"\0\0\1\0")), errno.EBUSY, id="another command"),
        pytest.param(bad(VERSION, lambda n, c: reply(n, c, b"", flags=0)), errno.EBUSY, id="a command for a reply"),
        pytest.param(bad(VERSION, lambda n, c: reply(n, c, b"", size=3)), errno.EBUSY, id="smaller than its header"),
        pytest.param(bad(VERSION, lambda n, c: reply(n, c, b"", size=0xFFFFFFFF)), errno.EBUSY, id="4 GiB of reply"),
        pytest.param(bad(VERSION, lambda n, c: b"HTTP/1.1 400 Bad Request\r\n\r\n"), errno.EBUSY, id="a web server"),
        pytest.param(bad(DEVICE_INFO, lambda n, c: reply(n, c, b"\0" * 8)), errno.EPROTO, id="half an information"),
        pytest.param(bad(DEVICE_INFO, lambda n, c: reply(n, c, b"\0" * 16)), errno.ENODEV, id="no PCI device"),
        pytest.param(bad(REGION_INFO, lambda n, c: reply(n, c, b"\0" * 32)), errno.EPROTO, id="an empty BAR0"),
        pytest.param(bad(REGION_INFO, lambda n, c: reply(n, c, b"\0" * 9)), errno.EPROTO, id="half a BAR0"),
        pytest.param(bad(IRQ_INFO, lambda n, c: reply(n, c, b"\0" * 3)), errno.EPROTO, id="half an interrupt"),
        pytest.param(bad(REGION_READ, lambda n, c: reply(n, c, b"\0" * 999)), errno.EIO, id="a read's long reply"),
        pytest.param(bad(REGION_READ, lambda n, c: reply(n, c, b"")), errno.EIO, id="a read without data"),
    ],
)
def test_a_reply_that_is_wrong_is_an_error(serve: Callable[..., str], answer: Answer, code: int) -> None:
    assert refused(serve(answer)).errno == code


def test_another_class_of_device_is_no_controller(serve: Callable[..., str]) -> None:
    def network(number: int, command: int, payload: bytes) -> bytes:
        if command == REGION_READ:
            return reply(number, command, payload[:16] + struct.pack("<I", 0x02000000))
        return b""

    error = refused(serve(network))
    assert error.errno == errno.ENODEV
    assert "not an NVMe controller" in error.cause


def test_a_server_that_does_not_answer_is_given_up(serve: Callable[..., str]) -> None:
    quiet = threading.Event()

    def silent(number: int, command: int, payload: bytes) -> bytes | None:
        quiet.wait(30)
        return None

    threading.Timer(6, quiet.set).start()
    error = refused(serve(silent))
    assert error.errno == errno.EBUSY
    assert "does not answer" in error.cause
