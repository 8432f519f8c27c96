# SPDX-License-Identifier: Apache-2.0
"""What `ugds serve` does: starts a server, tells what happens, and ends it when it is told to."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

import ugds


@contextlib.contextmanager
def _stop_signals() -> Iterator[int]:
    """A descriptor that is readable once SIGINT or SIGTERM has come. `select` waits for it with the rest: a handler
    that raises would be run too late where the signal comes just before the wait, and be lost where it interrupts a
    finaliser."""
    asked, tell = os.pipe()
    os.set_blocking(tell, False)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda _number, _frame: None) for number in numbers}
    woken = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    try:
        yield asked
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(asked)
        os.close(tell)


def _tell(as_json: bool, text: str, **event: Any) -> None:
    print(json.dumps(event) if as_json else text, flush=True)


class _Refusals:
    """Who is refused and tries again is told of once, and afterwards as a number. A client tries for some seconds."""

    SECONDS = 10.0

    def __init__(self) -> None:
        self.known: dict[tuple[int, str], tuple[float, int]] = {}

    def is_new(self, process: int, reason: str) -> bool:
        since, again = self.known.get((process, reason), (None, 0))
        if since is None:
            self.known[process, reason] = time.monotonic(), 0
        else:
            self.known[process, reason] = since, again + 1
        return since is None

    def over(self, every: bool = False) -> list[tuple[int, str, int]]:
        """Those that were told of long enough ago, with how often they came again since."""
        now = time.monotonic()
        ended = {key: one for key, one in self.known.items() if every or now - one[0] > self.SECONDS}
        for key in ended:
            del self.known[key]
        return [(*key, again) for key, (_, again) in ended.items() if again]


def _tell_again(refusals: _Refusals, as_json: bool, every: bool = False) -> None:
    for process, reason, again in refusals.over(every):
        who = f"client {process}" if process else "a client"
        text = f"{who} was refused {again} more time{'s' * (again != 1)}: {reason}"
        _tell(as_json, text, event="refused", process=process, reason=reason, again=again)


def _tell_events(server: ugds.Server, as_json: bool, refusals: _Refusals) -> None:
    for kind, process, reason in server.events():
        if kind == "refused" and not refusals.is_new(process, reason):
            continue
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
    with _stop_signals() as asked, ugds.serve(uri, socket, mode=mode) as server:
        line = f"serving {server.uri} at {server.path}"
        _tell(as_json, line, event="serving", uri=server.uri, path=server.path, process=os.getpid())
        watched: list[Any] = [server, asked]
        ready: list[Any] = []
        refusals = _Refusals()
        while asked not in ready:
            ready, _, _ = select.select(watched, [], [], refusals.SECONDS if refusals.known else None)
            _tell_events(server, as_json, refusals)
            _tell_again(refusals, as_json)
        _tell_again(refusals, as_json, every=True)
        clients = server.clients
        server.close()
        _tell(as_json, f"stopped after {clients} client{'' if clients == 1 else 's'}", event="stopped", clients=clients)
    return 0
