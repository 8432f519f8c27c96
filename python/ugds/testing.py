# SPDX-License-Identifier: Apache-2.0
"""Testing without hardware: the emulated NVMe controller from behind.

Every device opened with an `emulated:` URI is a strict software controller. What a real one would corrupt silently (a
command that reads memory which is not mapped, a list that lies about its length, an identifier used twice) it records
as a *violation*; faults can be planted, the power can be cut, and the stored bytes can be seen and changed.

    ssd = ugds.open("emulated:64MiB")
    with ugds.testing.strict(ssd) as emulator:  # fails at its end if the driver did what no driver may
        emulator.inject("status", opcode=2, status=0x281)  # the next read: unrecovered read error
        ...

`Emulator` (from `emulator(device)`) has

- `violations()` as (rule, what happened) pairs, `clear_violations()`;
- `counters()`: what only the device can know, by name (commands, doorbells, mapped_bytes, …);
- `inject(kind, *, opcode=-1, admin=False, skip=0, count=1, status=0, delay_ns=0, lba=0, blocks=None, abortable=True,
  value=0, at=None, width=1, cns=-1)`: plays the fault `kind` (see `FAULTS`) on the next `count` commands that match,
  after `skip` that match have passed; opcode -1 is any (1 is write, 2 is read), `lba` and `blocks` narrow it to a
  range; `clear_faults()` ends it, and `faults_at_open` plants faults before a device is opened;
- `power_cut(survive=0.0, seed=1)`: what was not made durable is lost, and the next request finds the controller reset;
- `remove()` takes the device from the bus, `plug()` brings it back;
- `peek(offset, size, namespace=1)` and `poke(offset, data, namespace=1)`: the stored bytes, behind the protocol's back;
- `stored_bytes()`: memory or file that the data takes up;
- `virtual_now_ns()` and `advance_ns(ns)`, with `clock=virtual` in the URI.

Everything here is thread-safe unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ugds import _core
from ugds._core import Device, Emulator, forget_subsystem

__all__ = [
    "FAULTS",
    "Emulator",
    "Parameter",
    "emulator",
    "failing_step",
    "faults_at_open",
    "forget_subsystem",
    "parameters",
    "power_cut",
    "setup_steps",
    "strict",
]

#: The kinds of fault that `Emulator.inject` takes, and what each does to a command that it matches.
FAULTS: dict[str, str] = {
    "status": "completes with `status`; no data moves",
    "hang": "is fetched, and completes only when aborted (if `abortable`) or never",
    "late": "completes after `delay_ns` more",
    "late_write": "hangs, and its data is written to host memory again and again until the controller stops",
    "duplicate": "its completion is posted twice",
    "unknown_id": "a completion with an identifier that is not in flight is posted before its own",
    "corrupt": "completes with success, and the data differs in one bit",
    "ignored": "completes with success, and nothing was done",
    "wrong_sq_head": "its completion carries an impossible submission queue head",
    "never_ready": "at register level: CSTS.RDY does not follow CC.EN",
    "never_stopped": "at register level: CSTS.RDY stays 1 after CC.EN is cleared",
    "fatal": "CSTS.CFS is set when the command is fetched, and the controller stops",
    "remove": "the device leaves the bus when the command is fetched",
    "lost_interrupt": "no interrupt is sent for its completion",
    "reset_fails": "at bus level: a reset of the function fails, and nothing stops",
    "lost": "is executed, and its completion is never posted",
    "wrong_phase": "its completion is posted with the phase of the round before",
    "torn": "the last dword of its completion is there `delay_ns` before the rest, which reads as ones until then",
    "result": "its completion has `value` in dword 0, whatever it did",
    "identify": "of an Identify of `cns` (-1: any): `width` bytes of the data, from byte `at`, are `value`",
    "abort_lies": "of an Abort: it answers that the command was aborted, and leaves it alone",
    "abort_denies": "of an Abort: it answers that the command was not aborted, and has aborted it",
    "double_interrupt": "two interrupts are sent for its completion",
    "spurious_interrupt": "an interrupt is sent when the command is fetched, with nothing to tell",
    "all_ones": "at register level: a read of the register at `at` (None: of any) gives all ones",
    "reads_as": "at register level: a read of the register at `at` gives `value`",
}


class Parameter(NamedTuple):
    """One parameter of an `emulated:` URI."""

    name: str
    values: str  #: what it accepts, and its default
    meaning: str


def emulator(device: Device) -> Emulator:
    """The controller behind `device`. Raises ugds.Error (EINVAL) where the device is not emulated."""
    return _core.emulator(device)


def parameters() -> list[Parameter]:
    """Everything that an `emulated:` URI can set, in the order of its documentation."""
    return [Parameter(*row) for row in _core.emulator_parameters()]


def power_cut(device: Device, survive: float = 0.0, seed: int = 1) -> None:
    """Takes the power away from the device: its controller resets, and of what was written and not flushed each block
    survives with probability `survive` (0 to 1), chosen by `seed`. Requests in flight fail."""
    emulator(device).power_cut(survive, seed)


@contextmanager
def strict(device: Device) -> Iterator[Emulator]:
    """Raises AssertionError at the end of the block if the controller saw a violation since the device was opened (or
    since `clear_violations()`), with every one of them. An exception that leaves the block is not hidden by it."""
    controller = emulator(device)
    yield controller
    if violations := controller.violations():
        lines = "\n".join(f"  {rule}: {what}" for rule, what in violations)
        raise AssertionError(f"{device.uri} saw {len(violations)} violation(s) of the NVMe protocol:\n{lines}")


@contextmanager
def faults_at_open(*faults: dict[str, Any]) -> Iterator[None]:
    """Plants faults in every emulated device that the block opens, from its first register access: each a dictionary
    with `kind` and whatever else `Emulator.inject` takes. A device keeps those that were not played. One at a time in a
    process."""
    try:
        for fault in faults:
            _core.inject_at_open(**fault)
        yield
    finally:
        _core.clear_faults_at_open()


@contextmanager
def setup_steps() -> Iterator[list[str]]:
    """Collects the names of the set-up steps taken by the block, in any thread, into the list that it gives; the list
    is filled when the block ends. One at a time in a process."""
    names: list[str] = []
    _core.record_steps()
    try:
        yield names
    finally:
        names += _core.recorded_steps()


@contextmanager
def failing_step(nth: int) -> Iterator[list[bool]]:
    """Makes the `nth` set-up step (from 0) of the block fail once with ENOMEM, in whatever thread takes it. Gives a
    list that holds, when the block has ended, whether that step was reached. One at a time in a process."""
    reached: list[bool] = []
    _core.arm_step(nth)
    try:
        yield reached
    finally:
        reached.append(_core.disarm_steps())
