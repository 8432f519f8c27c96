# SPDX-License-Identifier: Apache-2.0
"""Between a vfio-user client and a real server: passes messages and descriptors on, and changes replies as told."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

HEADER = struct.Struct("<HHIII")
VERSION, DMA_MAP, REGION_INFO, SET_IRQS, REGION_READ = 1, 2, 5, 8, 9
REPLY, ERROR = 1, 0x20

# (number, command, reply, descriptors) to the bytes to send instead; they may be sent in pieces by `Proxy.send`.
Change = Callable[[int, int, bytes, list[int]], "bytes | None"]


class Proxy:
    """One client's. `change` gives what to send for a reply: the reply itself, something else, or None for nothing."""

    def __init__(self, path: Path, server: Path, change: Change) -> None:
        self.change = change
        self.uri = f"vfio-user:{path}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(1)
        self.server = socket.socket(socket.AF_UNIX)
        self.path = server
        self.client: socket.socket | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            self.client, _ = self.listener.accept()
            self.listener.close()
            self.server.connect(str(self.path))
            while (request := receive(self.client)) is not None:
                message, descriptors = request
                send(self.server, message, descriptors)
                reply = receive(self.server)
                if reply is None:
                    break
                message, descriptors = reply
                number, command = HEADER.unpack_from(message)[:2]
                changed = self.change(number, command, message, descriptors)
                if changed is not None:
                    send(self.client, changed, descriptors)

    def close(self) -> None:
        for one in (self.client, self.listener, self.server):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()


def refusal(number: int, command: int, error: int) -> bytes:
    return HEADER.pack(number, command, HEADER.size, REPLY | ERROR, error)


def send(to: socket.socket, message: bytes, descriptors: list[int]) -> None:
    sent = socket.send_fds(to, [message], descriptors) if descriptors else to.send(message)
    to.sendall(message[sent:])
    for one in descriptors:
        os.close(one)


def receive(source: socket.socket) -> tuple[bytes, list[int]] | None:
    message, descriptors, _, _ = socket.recv_fds(source, HEADER.size, 16)
    if not message:
        return None
    while len(message) < HEADER.size:
        message += source.recv(HEADER.size - len(message))
    size = HEADER.unpack(message)[2]
    while len(message) < size:
        message += source.recv(size - len(message))
    return message, list(descriptors)
