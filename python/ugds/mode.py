# SPDX-License-Identifier: Apache-2.0
"""Modes: what a device is to be good at, and how to write one (docs/modes.md).

`ugds.open(uri, mode="throughput")`, or `?mode=throughput` in the URI, chooses one; `ugds.modes()` lists them. A mode of
your own is an object with

- `begin() -> Settings`: what to begin with. Called once, when a device is opened;
- `adjust(observed: Observed) -> Settings | None`, if it has one: new settings, or None to leave them. Called while
  requests wait, every 5 ms at most, in the thread of a waiter, or of the device's awaits, which takes the interpreter's
  lock for it. It may not call into the device. What it raises goes to `sys.unraisablehook`, and changes nothing;
- `plan() -> Plan | None`, if it has one: what the caller of `open` left open. Called before `begin`.

    class Careful:
        def begin(self):
            return Settings(background_writes=True, window=4)

    ugds.register_mode("careful", Careful)
    ssd = ugds.open("emulated:1GiB", mode="careful")

The factory, here the class, is called for every device that is opened with the mode, so each has an object of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["SIZES", "Mode", "Observed", "Pacing", "Plan", "Seen", "Settings", "Way"]

#: Largest request, in bytes, of each class of sizes that waiting is chosen for; the last has none.
SIZES: tuple[int | None, ...] = (16 << 10, 64 << 10, 256 << 10, 1 << 20, None)


@dataclass(frozen=True)
class Plan:
    """What the caller of `open` left open; None leaves it to the library."""

    depth: int | None = None  #: entries of a queue
    interrupts: bool | None = None  #: whether waits can sleep until the device interrupts


@dataclass(frozen=True)
class Way:
    """How requests of one class of sizes wait."""

    sleeps: bool = False  #: until the device interrupts, where it can; otherwise they poll
    explore: int = 0  #: one request in so many goes the other way, to see what that takes; 0: none


@dataclass(frozen=True)
class Pacing:
    """How much large requests (above 64 KiB) may have in flight while small requests come, and what background requests
    get while any others do."""

    latency_low: float = 1.4  #: as many bytes as keep the latency of a large command, over that of an idle device, ...
    latency_high: float = 1.75  #: ... between these two; 0 for both: no limit
    background_share: float = 0.15  #: of the bytes that the device can move in a time, what background requests get
    memory: float = 1.0  #: seconds for which small requests are protected after the last of them


@dataclass(frozen=True)
class Settings:
    """What a mode decides. Whatever is left out is as in mode "latency"."""

    waiting: tuple[Way, ...] = (Way(),) * len(SIZES)  #: for each class of `SIZES`
    pacing: Pacing = field(default_factory=Pacing)
    window: int = 16  #: commands that one request keeps in flight, at most half of what its queue holds
    refill: int = 1  #: commands of a batch that wait for room are given by as many at a time at least
    background_writes: bool = False  #: writes that do not say otherwise are background requests


@dataclass(frozen=True)
class Seen:
    """What was observed of one class of sizes. Times are typical ones."""

    requests: int  #: that could have chosen either way
    polled_ns: int  #: nanoseconds of one that polled; 0: not known
    slept_ns: int  #: nanoseconds of one that slept; 0: not known
    polled_samples: int
    slept_samples: int


@dataclass(frozen=True)
class Observed:
    """What a mode may decide by."""

    waiting: tuple[Seen, ...]  #: for each class of `SIZES`
    commands_in_flight: int
    large_in_flight: int  #: bytes of large and background requests
    large_limit: int  #: bytes that they may have
    small_requests: bool  #: whether small ones have come lately
    interrupts: bool  #: whether waits can sleep


class Mode(Protocol):
    """What a factory gives to `register_mode`; `plan` and `adjust` may be missing."""

    def begin(self) -> Settings: ...
