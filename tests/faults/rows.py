# SPDX-License-Identifier: Apache-2.0
"""What a row of the fault table says. The table itself is in table.py and recovery_table.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WAYS = ("sync", "batch", "stream", "asyncio")
#: The way of what happens while a device is opened, before there is a request.
OPEN = "open"

#: The request of every cell: four commands of 8 KiB. In a batch each is a request of its own.
COMMAND, COMMANDS = 8192, 4
URI = "emulated:1MiB?lba=512&mdts=1&timeout=1"
WRITE, READ = 1, 2
#: Seconds: of rows whose command does not come back, and of all others, where a busy machine must not matter.
SHORT, LONG = 0.25, 20.0


@dataclass(frozen=True)
class Row:
    """One fault, and what each way in must give.

    A result is `ok`, meaning that the bytes are right, or the error's name; `a|b` allows either, where time decides. Of
    a batch it is that of the request that the fault meets; after a `/` stands the error that the others may have, which
    are right without it. None: the fault means nothing there, and is not counted.
    """

    name: str
    plant: tuple[Mapping[str, Any], ...]
    results: Mapping[str, str | None]
    after: str = "ready"  #: the device's state: ready (and it works), failed, lost or wedged
    resets: str = "0"  #: of the controller by the end of the request: 0, 1 (at least), or any
    uri: str = URI
    options: Mapping[str, Any] = field(default_factory=dict)  #: of ugds.open
    at_open: tuple[Mapping[str, Any], ...] = ()  #: planted before
    op: str = "read"
    hit: int = 2  #: which command, from 0
    deadline: float = LONG
    bound: float = 8.0  #: seconds that the request may take
    scene: str = "request"  #: what is done (cell.py)
    size: int = COMMAND * COMMANDS
    violations: tuple[str, ...] = ()  #: which a device that lies may make of what is right
    group: str = ""


def four(result: str, batch: str | None = None) -> dict[str, str | None]:
    """The same by every way; `batch` where that is told request by request."""
    return {"sync": result, "batch": batch or result, "stream": result, "asyncio": result}


def inject(kind: str, **how: Any) -> dict[str, Any]:
    return {"kind": kind, **how}


def read(kind: str, **how: Any) -> dict[str, Any]:
    """A fault of the third read, unless it says otherwise."""
    return inject(kind, **{"opcode": READ, "skip": 2, **how})


def write(kind: str, **how: Any) -> dict[str, Any]:
    return inject(kind, **{"opcode": WRITE, "skip": 2, **how})


def admin(kind: str, opcode: int, **how: Any) -> dict[str, Any]:
    return inject(kind, admin=True, opcode=opcode, **how)


ABORT, SET_FEATURES, IDENTIFY, CREATE_CQ, CREATE_SQ, SHADOW = 0x08, 0x09, 0x06, 0x05, 0x01, 0x7C
ALWAYS = 1 << 40
CAP, VS, CC, CSTS = 0x00, 0x08, 0x14, 0x1C
