# SPDX-License-Identifier: Apache-2.0
"""What a guest's tests can ask of the host, as lines of JSON over a serial port: QEMU's monitors, and the bytes of disk
images and of the peer memory as the host sees them. Larger data goes by a file in the shared folder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qemu import Qmp, connect


class Server:
    """Answers one guest, in a thread of its own, until the guest has gone. Each public method of the table in `_serve`
    is a request; what it raises is the guest's answer."""

    def __init__(self, port: Path, qmp: Qmp, share: Path, images: Path, peer: Path) -> None:
        self._qmp, self._share, self._images, self._peer = qmp, share, images, peer
        self._link = connect(port, 20)
        self._served: dict[str, Callable[..., Any]] = {
            "qmp": lambda command, arguments: qmp.call(command, arguments),
            "hmp": qmp.monitor,
            "event_count": lambda: len(qmp.events()),
            "wait_event": qmp.wait_event,
            "read_image": lambda drive, offset, size: self._read(self._image(drive), offset, size),
            "write_image": lambda drive, offset, name: self._write(self._image(drive), offset, name),
            "hash_image": lambda drive, offset, size: self._hash(self._image(drive), offset, size),
            "read_peer": lambda offset, size: self._read(self._peer, offset, size),
            "write_peer": lambda offset, name: self._write(self._peer, offset, name),
        }
        threading.Thread(target=self._serve, daemon=True).start()

    def _image(self, drive: str) -> Path:
        path = self._images / f"{drive}.img"
        if path.parent != self._images or not path.exists():
            raise ValueError(f"there is no drive {drive}")
        return path

    def _read(self, path: Path, offset: int, size: int) -> str:
        """Puts bytes of a file into a new one in the shared folder, and gives its name."""
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(size)
        blob = self._share / "from-host"
        blob.write_bytes(data)
        return blob.name

    def _write(self, path: Path, offset: int, name: str) -> int:
        data = (self._share / name).read_bytes()
        with path.open("r+b") as file:
            file.seek(offset)
            return file.write(data)

    def _hash(self, path: Path, offset: int, size: int) -> str:
        with path.open("rb") as file:
            file.seek(offset)
            return hashlib.sha256(file.read(size)).hexdigest()

    def _serve(self) -> None:
        with self._link, self._link.makefile("rwb") as stream:
            try:
                for line in stream:
                    stream.write(json.dumps(self._answer(line)).encode() + b"\n")
                    stream.flush()
            except OSError:
                pass  # the guest has gone

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            result = self._served[request["call"]](*request["arguments"])
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"result": result}

    def close(self) -> None:
        self._link.close()
