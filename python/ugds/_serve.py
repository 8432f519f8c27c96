# SPDX-License-Identifier: Apache-2.0
"""What `ugds serve` does: starts a server, tells what happens, and ends it when it is told to."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from types import FrameType
from typing import Any

import ugds


class _Stop(BaseException):
    pass


def _stop(_number: int, _frame: FrameType | None) -> None:
    # Once: a second signal must not end the ending.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise _Stop


def _tell(as_json: bool, text: str, **event: Any) -> None:
    print(json.dumps(event) if as_json else text, flush=True)


def _tell_events(server: ugds.Server, as_json: bool) -> None:
    for kind, process, reason in server.events():
        found = []
        if kind == "disconnected":
            found = server.emulator.violations()
            server.emulator.clear_violations()
        who = f"client {process}" if process else "a client"
        text = {"connected": f"{who} connected", "refused": f"{who} was refused: {reason}"}.get(
            kind, f"{who}: {reason}"
        )
        event: dict[str, Any] = {"event": kind, "process": process}
        if kind != "connected":
            event["reason"] = reason
        if kind == "disconnected":
            event["violations"] = [{"rule": rule, "what": what} for rule, what in found]
        _tell(as_json, "\n".join([text, *(f"  violation {rule}: {what}" for rule, what in found)]), **event)


def run(uri: str, socket: str, mode: int, as_json: bool) -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit status."""
    clients = 0
    before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.suppress(_Stop), ugds.serve(uri, socket, mode=mode) as server:
            try:
                line = f"serving {server.uri} at {server.path}"
                _tell(as_json, line, event="serving", uri=server.uri, path=server.path, process=os.getpid())
                while True:
                    select.select([server], [], [])
                    _tell_events(server, as_json)
            finally:
                clients = server.clients
                server.close()
        _tell(as_json, f"stopped after {clients} clients", event="stopped", clients=clients)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0
