# SPDX-License-Identifier: Apache-2.0
"""Loads of many callers on one emulated device, in virtual time (`core/simulation`): how scheduling is measured.

The engine and the controller are the real ones. Software costs nothing, so that figures say in which order requests
reached the device, and nothing of this machine: the same load gives the same figures anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy
from numpy.typing import NDArray

import ugds
from ugds import _core
from ugds._report import CommandError

#: The policy of the uGDS paper (2.5), to compare with.
CONTROL_MODE = "unpaced"
#: Of every device that is simulated, whatever machine this is: seven for synchronous requests, and that for batches.
QUEUES = 8


@dataclass(frozen=True)
class Load:
    """`count` callers that do the same (see core/simulation/simulation.hpp)."""

    operation: str
    size: int
    count: int = 1
    depth: int = 0  #: requests of a batch that are in flight at a time; 0: synchronous requests
    priority: str = ""
    pause_ns: int = 0
    holds_queue: bool = False

    def actors(self) -> list[dict[str, Any]]:
        fields = ("operation", "size", "depth", "priority", "pause_ns", "holds_queue")
        return [{name: getattr(self, name) for name in fields} for _ in range(self.count)]

    def held(self) -> Load:
        """The same by the paper's policy."""
        return replace(self, holds_queue=not self.depth)


@dataclass(frozen=True)
class Outcome:
    """What became of a load's requests."""

    bytes_per_s: float
    latencies_ns: NDArray[numpy.uint64]

    def latency_us(self, percent: float) -> float:
        if not len(self.latencies_ns):
            raise CommandError("a load had no request that ended: simulate a longer time")
        return float(numpy.percentile(self.latencies_ns, percent, method="higher")) / 1000


def simulated(uri: str, mode: str) -> str:
    """The address of a device with a mode, and what a simulation needs of it."""
    place, _, query = uri.partition("?")
    if not place.startswith("emulated:"):
        raise CommandError(f"{uri} cannot be simulated: give an emulated device", 2)
    theirs = [part for part in query.split("&") if part and part.partition("=")[0] not in ("pump", "clock", "mode")]
    return f"{place}?{'&'.join([*theirs, 'pump=caller', 'clock=virtual', f'mode={mode}'])}"


def run(uri: str, mode: str, loads: Mapping[str, Load], seconds: float, warm_up: float) -> dict[str, Outcome]:
    """The loads together on a new device, for so many virtual seconds after the warm-up. By the name of the load."""
    if mode == CONTROL_MODE:
        _core.register_control_mode()
    actors = [actor for load in loads.values() for actor in load.actors()]
    largest = max(load.size for load in loads.values())
    with ugds.open(simulated(uri, mode), queues=QUEUES, deadline=3600) as ssd, ugds.empty(largest) as buffer:
        found = _core.simulate(
            ssd, buffer, actors, duration_ns=round(seconds * 1e9), warm_up_ns=round(warm_up * 1e9), seed=1
        )
        _check(ssd)
    outcomes: dict[str, Outcome] = {}
    for name, load in loads.items():
        own, found = found[: load.count], found[load.count :]
        latencies = [numpy.frombuffer(one["latencies_ns"], numpy.uint64) for one in own]
        outcomes[name] = Outcome(sum(one["bytes"] for one in own) / seconds, numpy.concatenate(latencies))
    return outcomes


def _check(ssd: ugds.Device) -> None:
    violations = _core.emulator(ssd).violations()
    if violations:
        raise CommandError(f"the emulated controller saw violations of the protocol: {violations[:3]}")
