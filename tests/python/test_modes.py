# SPDX-License-Identifier: Apache-2.0
"""Modes: chosen by name, seen in what a device says of itself, and written in Python."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ugds
import ugds.testing
from ugds.mode import SIZES, Observed, Pacing, Plan, Settings, Way

BLOCK, MIB = 4096, 1 << 20
OpenSsd = Callable[..., ugds.Device]
ASLEEP = Settings(waiting=(Way(sleeps=True),) * len(SIZES))


def wakeups(ssd: ugds.Device) -> int:
    return sum(queue["wakeups"] for queue in ssd.stats().queues)


def test_the_librarys_own_modes_are_there() -> None:
    assert {"adaptive", "latency", "priority", "throughput"} <= set(ugds.modes())


def test_the_caller_stands_above_the_uri(open_ssd: OpenSsd) -> None:
    assert open_ssd().info.mode == "latency"
    assert open_ssd("emulated:1MiB?mode=throughput").info.mode == "throughput"
    ssd = open_ssd("emulated:1MiB?mode=throughput", mode="priority")
    assert ssd.info.mode == "priority"
    assert {queue["mode"] for queue in ssd.stats().queues} == {"priority"}


def test_an_unknown_mode_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ugds.Error, match="adaptive, latency") as caught:
        ugds.open("emulated:1MiB", mode="quick")
    assert caught.value.errno == errno.EINVAL


def test_the_deep_queue_is_the_batches(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB", queues=3)
    assert [queue["role"] for queue in ssd.stats().queues] == ["shared", "shared", "batch"]
    assert (ssd.info.depth, ssd.info.batch_depth) == (64, 512)
    assert ssd.stats().queues[2]["depth"] == 512
    assert "pages" in ssd.info.batch_memory and ssd.info.batch_memory in str(ssd.info)
    single = open_ssd("emulated:1MiB", queues=1)
    assert [queue["role"] for queue in single.stats().queues] == ["shared"]
    assert single.info.batch_depth == single.info.depth == 64
    with single.batch() as batch, ugds.empty(BLOCK) as buffer:
        batch.read(buffer, 0)
        assert batch.wait().results.tolist() == [BLOCK]


def test_a_mode_chooses_what_the_caller_left_open(open_ssd: OpenSsd) -> None:
    class Deep:
        def plan(self) -> Plan:
            return Plan(depth=32, interrupts=True)

        def begin(self) -> Settings:
            return Settings()

    ugds.register_mode("test-deep", Deep)
    assert "test-deep" in ugds.modes()
    ssd = open_ssd("emulated:1MiB", mode="test-deep")
    assert (ssd.info.depth, ssd.info.completion) == (32, "interrupt")
    ssd = open_ssd("emulated:1MiB", mode="test-deep", depth=16, interrupts=False)
    assert (ssd.info.depth, ssd.info.completion) == (16, "polling")


def test_waits_sleep_or_poll_as_a_foreign_mode_says(open_ssd: OpenSsd) -> None:
    ugds.register_mode("test-asleep", lambda: Fixed(ASLEEP))
    ugds.register_mode("test-awake", lambda: Fixed(Settings()))
    woken = {}
    for mode in ("test-asleep", "test-awake"):
        ssd = open_ssd("emulated:1MiB?latency=1ms", mode=mode)
        assert ssd.info.completion == "interrupt"
        with ugds.empty(BLOCK) as buffer:
            for _ in range(20):
                assert ssd.read(buffer) == BLOCK
        woken[mode] = wakeups(ssd)
    assert woken["test-asleep"] >= 15
    assert woken["test-awake"] == 0


class Interrupted:
    def plan(self) -> Plan:
        return Plan(interrupts=True)


class Fixed(Interrupted):
    """Begins with some settings and leaves them. Asks for interrupts itself: a caller who does wants to sleep."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def begin(self) -> Settings:
        return self.settings


def test_what_is_observed_reaches_a_foreign_mode_and_what_it_says_acts(open_ssd: OpenSsd) -> None:
    seen: list[Observed] = []

    class Changing(Interrupted):
        def begin(self) -> Settings:
            return Settings()

        def adjust(self, observed: Observed) -> Settings | None:
            seen.append(observed)
            return ASLEEP if len(seen) == 3 else None

    ugds.register_mode("test-changing", Changing)
    ssd = open_ssd("emulated:1MiB?latency=8ms", mode="test-changing")
    with ugds.empty(BLOCK) as buffer:
        for _ in range(2):
            ssd.read(buffer)
        assert wakeups(ssd) == 0
        until = time.monotonic() + 20
        while wakeups(ssd) < 5 and time.monotonic() < until:
            ssd.read(buffer)
    assert wakeups(ssd) >= 5
    assert len(seen) >= 3
    assert seen[0].commands_in_flight == 1
    assert seen[0].interrupts and len(seen[0].waiting) == len(SIZES)


def test_a_mode_may_put_writes_into_the_background(open_ssd: OpenSsd) -> None:
    """A moment after a small read one command of background requests is in flight; of normal ones there are many."""
    limited = Settings(background_writes=True, pacing=Pacing(0.0, 0.0, background_share=0.0))
    ugds.register_mode("test-background", lambda: Fixed(limited))
    taken = {}
    cases = (("test-background", None), ("test-background", "normal"), ("latency", None), ("latency", "background"))
    for mode, priority in cases:
        ssd = open_ssd("emulated:16MiB?latency=100us&pump=caller&clock=virtual", mode=mode)
        emulator = ugds.testing.emulator(ssd)
        with ugds.empty(MIB) as buffer, ssd.batch(64, priority=priority) as batch:
            ssd.read(buffer, 0, BLOCK)
            begun = emulator.virtual_now_ns()
            batch.write(buffer, [i * BLOCK for i in range(64)], BLOCK)
            batch.wait()
            taken[mode, priority] = emulator.virtual_now_ns() - begun
    assert taken["test-background", None] >= 900_000, taken
    assert taken["test-background", "normal"] < 300_000, taken
    assert taken["latency", None] < 300_000, taken
    assert taken["latency", "background"] >= 900_000, taken


def test_the_priority_of_a_request_stands_above_the_modes(open_ssd: OpenSsd) -> None:
    """Commands of a large write, in the background or not, right after a small read."""
    limited = Settings(background_writes=True, pacing=Pacing(0.0, 0.0, background_share=0.0))
    ugds.register_mode("test-background", lambda: Fixed(limited))
    taken = {}
    for mode, priority in (("test-background", None), ("test-background", "normal"), ("latency", "background")):
        ssd = open_ssd("emulated:16MiB?latency=100us&pump=caller&clock=virtual&mdts=5", mode=mode)
        emulator = ugds.testing.emulator(ssd)
        with ugds.empty(MIB) as buffer:
            ssd.read(buffer, 0, BLOCK)
            begun = emulator.virtual_now_ns()
            ssd.write(buffer, priority=priority)
            taken[mode, priority] = emulator.virtual_now_ns() - begun
    assert taken["test-background", None] >= 2 * taken["test-background", "normal"], taken
    assert taken["latency", "background"] >= 2 * taken["test-background", "normal"], taken


def test_priority_is_a_word_that_exists(ssd: ugds.Device) -> None:
    with ugds.empty(BLOCK) as buffer:
        for priority in (None, "normal", "background"):
            assert ssd.read(buffer, 0, priority=priority) == BLOCK
            assert ssd.write(buffer, 0, priority=priority) == BLOCK
            with ssd.batch(priority=priority) as batch:
                batch.write(buffer, 0)
                assert batch.wait().results.tolist() == [BLOCK]
        for wrong in ("high", 1):
            with pytest.raises(ugds.Error, match="background") as caught:
                ssd.read(buffer, 0, priority=wrong)  # type: ignore[arg-type]
            assert caught.value.errno == errno.EINVAL
            with pytest.raises(ugds.Error, match="priority"):
                ssd.batch(priority=wrong)  # type: ignore[arg-type]


def test_what_a_mode_raises_at_opening_is_raised_there() -> None:
    class Broken:
        def begin(self) -> Settings:
            raise LookupError("no settings today")

    class Wrong:
        def begin(self) -> Settings:
            return Settings(window=0)

    class Empty:
        pass

    def failing() -> Broken:
        raise KeyError("no mode today")

    for factory, error, words in (
        (Broken, LookupError, "no settings today"),
        (Wrong, ValueError, "window"),
        (Empty, TypeError, "begin"),
        (failing, KeyError, "no mode today"),
    ):
        ugds.register_mode("test-broken", factory)
        with pytest.raises(error, match=words):
            ugds.open("emulated:1MiB", mode="test-broken")


@pytest.mark.parametrize("raises", [True, False])
def test_what_adjust_does_wrong_is_reported_and_changes_nothing(
    open_ssd: OpenSsd, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    class Failing(Interrupted):
        def begin(self) -> Settings:
            return ASLEEP

        def adjust(self, observed: Observed) -> Settings | None:
            if raises:
                raise LookupError("nothing to say")
            return Settings(refill=-1)

    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    ugds.register_mode("test-failing", Failing)
    ssd = open_ssd("emulated:1MiB?latency=25ms", mode="test-failing")
    with ugds.empty(BLOCK) as buffer:
        until = time.monotonic() + 20
        while not reported and time.monotonic() < until:
            assert ssd.read(buffer) == BLOCK
        before = wakeups(ssd)
        for _ in range(10):
            assert ssd.read(buffer) == BLOCK
    assert isinstance(reported[0].exc_value, LookupError if raises else ValueError)
    assert wakeups(ssd) - before >= 7


def test_the_librarys_own_modes_stay_as_they_are() -> None:
    with pytest.raises(ugds.Error, match="own") as caught:
        ugds.register_mode("latency", lambda: Fixed(Settings()))
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(TypeError, match="callable"):
        ugds.register_mode("test-none", None)  # type: ignore[arg-type]


def test_modes_work_with_batches_and_awaits(open_ssd: OpenSsd) -> None:
    import asyncio

    asked = []

    class Asked:
        def begin(self) -> Settings:
            return ASLEEP

        def adjust(self, observed: Observed) -> None:
            asked.append(threading.current_thread())

    ugds.register_mode("test-asked", Asked)
    ssd = open_ssd("emulated:16MiB?latency=20ms", mode="test-asked")
    with ugds.empty(BLOCK) as buffer, ssd.batch() as batch:
        batch.read(buffer, [0, BLOCK], BLOCK, 0)
        assert batch.wait().results.tolist() == [BLOCK] * 2
        assert asked
        del asked[:]

        async def awaits() -> None:
            for _ in range(5):
                await ssd.aread(buffer, 0)

        asyncio.run(awaits())
        assert asked


def test_the_interpreter_ends_well_with_a_foreign_mode_at_work() -> None:
    code = """
import threading, time, ugds
from ugds.mode import Settings
class Mine:
    def begin(self): return Settings()
    def adjust(self, observed): return Settings()
ugds.register_mode("mine", Mine)
ssd = ugds.open("emulated:1MiB?latency=7ms", mode="mine")
buffer = ugds.empty(4096)
def forever():
    try:
        while True: ssd.read(buffer)
    except ugds.Error:
        pass
for _ in range(3): threading.Thread(target=forever, daemon=True).start()
time.sleep(0.2)
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
