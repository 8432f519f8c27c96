# SPDX-License-Identifier: Apache-2.0
"""Every step of set-up fails once: nothing of it is left, and the next try works."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ugds
import ugds.testing
from ugds import _core

Sight = dict[str, Any]


def registrations() -> int:
    return int(_core.open_registrations())  # type: ignore[attr-defined]


def sight(device: ugds.Device | None = None) -> Sight:
    """What a process can see of what it holds."""
    gc.collect()
    counters = ugds.testing.emulator(device).counters() if device else {}
    return {
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if alive(fd)),
        "threads": len(os.listdir("/proc/self/task")),
        "registrations": registrations(),
        "mapped_ranges": counters.get("mapped_ranges"),
        "mapped_bytes": counters.get("mapped_bytes"),
    }


def alive(fd: str) -> bool:
    try:
        return not os.readlink(f"/proc/self/fd/{fd}").startswith("/proc/")
    except OSError:
        return False


def every_step(attempt: Callable[[], contextlib.AbstractContextManager[Any]], device: ugds.Device | None) -> list[str]:
    """Makes each step of `attempt` fail once. Returns the steps' names."""
    with attempt():
        pass  # what is made once and kept
    with ugds.testing.setup_steps() as names, attempt():
        pass
    assert names
    before = sight(device)
    for nth, name in enumerate(names):
        if name.startswith("register:") and "attach" in names[:nth] and "bounce: allocate" not in names[:nth]:
            # An older registration that cannot be mapped to a new device is left out of it.
            with ugds.testing.failing_step(nth) as reached, contextlib.suppress(ugds.Error), attempt():
                pass
            assert reached == [True], name
            assert sight(device) == before, name
            continue
        with ugds.testing.failing_step(nth) as reached, pytest.raises(ugds.Error) as caught, attempt():
            raise AssertionError(f"step {nth}, {name!r}, did not fail")
        assert reached == [True], name
        assert caught.value.errno == errno.ENOMEM, (name, str(caught.value))
        assert name in str(caught.value)
        assert sight(device) == before, name
        with attempt():  # the next try works
            pass
        assert sight(device) == before, name
    with ugds.testing.failing_step(len(names) + 5) as reached, attempt():
        pass
    assert reached == [False]
    return names


@pytest.mark.parametrize("query", ["", "&shadow=1&queues=3&doorbells=trapped", "&pump=caller&mpsmin=2&lba=512"])
def test_an_open_that_fails_at_any_step_leaves_nothing(query: str) -> None:
    memory = np.zeros(100_000, "u1")
    with ugds.register(memory) as buffer:

        @contextlib.contextmanager
        def attempt() -> Any:
            with ugds.open(f"emulated:1MiB?serial=steps{query}", depth=8) as ssd:
                yield
                # Registered before: mapped to every device that did open.
                with contextlib.suppress(ugds.Error):  # left out: see below
                    assert ssd.write(buffer, 0, 4096) == ssd.read(buffer, 0, 4096) == 4096
                assert ugds.testing.emulator(ssd).violations() == []

        names = every_step(attempt, None)
    for expected in ("open: handle", "open: device", "dma memory: map", "controller: create queue", "attach"):
        assert any(expected in name for name in names), expected


def test_an_open_by_name_or_file_that_fails_holds_neither(tmp_path: Any) -> None:
    uri = f"emulated:{tmp_path}/image?size=1MiB&name=half-open"

    def attempt() -> contextlib.AbstractContextManager[Any]:
        return ugds.open(uri, queues=1)

    every_step(attempt, None)
    assert ugds.testing.forget_subsystem("half-open")


@pytest.mark.parametrize("devices", [1, 3])
def test_a_registration_that_fails_at_any_step_leaves_nothing(devices: int) -> None:
    memory = np.zeros(50_000, "u1")
    with contextlib.ExitStack() as stack:
        ssds = [stack.enter_context(ugds.open("emulated:1MiB")) for _ in range(devices)]
        names = every_step(lambda: ugds.register(memory), ssds[0])
        assert names.count("register: map") == devices
        # A failure at the last device undid the first ones: none holds a mapping that another lacks.
        for ssd in ssds:
            emulator = ugds.testing.emulator(ssd)
            with ugds.register(memory) as buffer:
                assert ssd.write(buffer, 0, 4096) == 4096
            assert emulator.violations() == []


def test_new_memory_that_fails_at_any_step_leaves_nothing() -> None:
    with ugds.open("emulated:1MiB") as ssd:
        names = every_step(lambda: ugds.empty("3MiB"), ssd)
        assert "host memory: allocate" in names
        assert ugds.testing.emulator(ssd).violations() == []


def is_left_out(ssd: ugds.Device, buffer: ugds.Registration) -> bool:
    with ugds.empty("4KiB") as other:
        assert ssd.read(other) == 4096
    errors = []
    for call in (ssd.read, ssd.write):
        try:
            call(buffer, 0, 4096)
        except ugds.Error as error:
            assert error.errno == errno.ENXIO
            assert "not mapped" in str(error)
            errors.append(error)
    assert len(errors) in (0, 2)
    return bool(errors)


@pytest.mark.parametrize("step", ["register: page table", "register: map"])
def test_a_registration_that_cannot_be_mapped_to_a_new_device_is_left_out_of_it(step: str) -> None:
    """The device opens, and I/O on that pair says why it cannot be done."""
    memory = np.zeros(8192, "u1")
    with ugds.register(memory) as buffer:
        with ugds.testing.setup_steps() as names, ugds.open("emulated:1MiB"):
            pass
        left_out = 0
        # Before ours or after it those are mapped that something in this process has registered and never given back,
        # and at last the device's own, without which it does not open.
        for at in [at for at, name in enumerate(names) if name == step]:
            try:
                with ugds.testing.failing_step(at), ugds.open("emulated:1MiB") as ssd:
                    left_out += is_left_out(ssd, buffer)
            except ugds.Error as error:
                assert (error.errno, error.operation) == (errno.ENOMEM, "open")
        assert left_out == 1
        with ugds.open("emulated:1MiB") as ssd:
            assert ssd.read(buffer) == 8192
