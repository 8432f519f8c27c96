# SPDX-License-Identifier: Apache-2.0
"""The host, as a guest's test sees it (see ../rpc.py)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

JOB = Path("/job")


class HostError(Exception):
    """What the host answered instead of a result."""


class Host:
    """Asks the host over the serial port named ugds.rpc. Not thread-safe, and not for a forked child."""

    def __init__(self) -> None:
        port = next(
            Path("/dev", name.parent.name)
            for name in Path("/sys/class/virtio-ports").glob("*/name")
            if name.read_text().strip() == "ugds.rpc"
        )
        self._port = port.open("r+b", buffering=0)

    def call(self, name: str, *arguments: Any) -> Any:
        self._port.write(json.dumps({"call": name, "arguments": arguments}).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            part = self._port.read(65536)
            if not part:  # the host has not connected yet, or has gone
                time.sleep(0.05)
            answer += part or b""
        decoded = json.loads(answer)
        if "error" in decoded:
            raise HostError(decoded["error"])
        return decoded["result"]

    def qmp(self, command: str, **arguments: Any) -> Any:
        """A command of QEMU's machine protocol."""
        return self.call("qmp", command, {name.replace("_", "-"): value for name, value in arguments.items()})

    def hmp(self, line: str) -> str:
        """A line of QEMU's human monitor, and what it prints."""
        return str(self.call("hmp", line))

    def event_count(self) -> int:
        """How many events QEMU has sent: from where `wait_event` is to look."""
        return int(self.call("event_count"))

    def wait_event(self, name: str, since: int, seconds: float = 20.0, **data: Any) -> dict[str, Any] | None:
        """The first such event with all of `data`, from number `since` on; None if none comes in time."""
        event: dict[str, Any] | None = self.call("wait_event", name, data, since, seconds)
        return event

    def throttle(self, drive: str, bytes_a_second: int) -> None:
        """Makes a drive that slow from now on; 0 is as fast as it can be. Only a reset of the controller lets go of
        commands that wait."""
        self.qmp("qom-set", path=f"/objects/limit_{drive}", property="limits", value={"bps-total": bytes_a_second})

    def read_image(self, drive: str, offset: int, size: int) -> bytes:
        """Bytes of a disk image, read on the host."""
        return self._answered("read_image", drive, offset, size)

    def write_image(self, drive: str, offset: int, data: bytes) -> None:
        """Puts bytes into a disk image, on the host."""
        assert self.call("write_image", drive, offset, self._blob(data)) == len(data)

    def hash_image(self, drive: str, offset: int, size: int) -> str:
        """The SHA-256 of bytes of a disk image, made on the host."""
        return str(self.call("hash_image", drive, offset, size))

    def read_peer(self, offset: int, size: int) -> bytes:
        """Bytes of the peer device's memory, read on the host from the file behind it."""
        return self._answered("read_peer", offset, size)

    def write_peer(self, offset: int, data: bytes) -> None:
        assert self.call("write_peer", offset, self._blob(data)) == len(data)

    def _answered(self, name: str, *arguments: Any) -> bytes:
        return Path(JOB, self.call(name, *arguments)).read_bytes()

    def close(self) -> None:
        self._port.close()

    def _blob(self, data: bytes) -> str:
        (JOB / "from-guest").write_bytes(data)
        return "from-guest"
