# SPDX-License-Identifier: Apache-2.0
"""Waiting by interrupt: chosen in three ways, visible, right without interrupts, and cheap."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable

import pytest
import ugds
import ugds.testing

BLOCK = 4096
OpenSsd = Callable[..., ugds.Device]


def wakeups(ssd: ugds.Device) -> int:
    return sum(queue["wakeups"] for queue in ssd.stats().queues)


def test_a_waiter_sleeps_until_the_controller_interrupts(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:16MiB?latency=2ms", interrupts=True)
    assert ssd.info.completion == "interrupt"
    ugds.testing.emulator(ssd).poke(0, b"\x5a" * BLOCK)
    with ugds.empty(BLOCK) as buffer:
        worked = time.thread_time()
        for _ in range(50):
            assert ssd.read(buffer) == BLOCK
        worked = time.thread_time() - worked
        assert bytes(memoryview(buffer)) == b"\x5a" * BLOCK
    assert wakeups(ssd) >= 45
    assert worked < 0.03, "50 reads of 2 ms each took more than 30 ms of the thread's time"
    assert ugds.testing.emulator(ssd).counters()["interrupts"] >= 50


def test_polling_is_the_default_and_sends_no_interrupts(ssd: ugds.Device) -> None:
    assert ssd.info.completion == "polling"
    with ugds.empty(BLOCK) as buffer:
        ssd.read(buffer)
    assert wakeups(ssd) == 0
    assert {queue["completion"] for queue in ssd.stats().queues} == {"polling"}


@pytest.mark.parametrize(
    ("environment", "query", "argument", "expected"),
    [
        (None, "", None, "polling"),
        ("1", "", None, "interrupt"),
        ("0", "", None, "polling"),
        ("", "", None, "polling"),
        (None, "?interrupts=1", None, "interrupt"),
        ("1", "?interrupts=0", None, "polling"),
        (None, "?interrupts=0", True, "interrupt"),
        ("1", "?interrupts=1", False, "polling"),
    ],
)
def test_the_caller_stands_above_the_uri_and_the_uri_above_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: str | None, query: str, argument: bool | None, expected: str
) -> None:
    if environment is None:
        monkeypatch.delenv("UGDS_INTERRUPT_MODE", raising=False)
    else:
        monkeypatch.setenv("UGDS_INTERRUPT_MODE", environment)
    with ugds.open("emulated:1MiB" + query, interrupts=argument) as ssd:
        assert ssd.info.completion == expected


@pytest.mark.parametrize("value", ["2", "sometimes", ""])
def test_a_bad_value_in_the_uri_is_named(value: str) -> None:
    with pytest.raises(ugds.Error, match="interrupts") as caught:
        ugds.open(f"emulated:1MiB?interrupts={value}")
    assert caught.value.errno == errno.EINVAL


def test_a_bad_value_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UGDS_INTERRUPT_MODE", "perhaps")
    with pytest.raises(ugds.Error, match="UGDS_INTERRUPT_MODE"):
        ugds.open("emulated:1MiB")


@pytest.mark.parametrize(
    ("query", "queues", "expected"),
    [
        ("vectors=0", 2, "polling: the device has no interrupt vectors"),
        ("vectors=3&queues=4", 4, "interrupt on 2 of 4 queues: the device has 3 interrupt vectors"),
        ("vectors=2", 1, "interrupt"),
        ("vectors=1", 1, "interrupt"),
        ("vectors=1", 2, "interrupt on 1 of 2 queues"),
        ("pump=caller", 1, "polling: the controller is run by its callers (pump=caller)"),
    ],
)
def test_queues_without_a_vector_are_polled_and_it_shows(
    open_ssd: OpenSsd, query: str, queues: int, expected: str
) -> None:
    ssd = open_ssd(f"emulated:1MiB?{query}", interrupts=True, queues=queues)
    assert ssd.info.completion == expected
    with ugds.empty(BLOCK) as buffer:
        for _ in range(20):
            assert ssd.read(buffer) == BLOCK


def test_a_read_whose_interrupt_is_lost_ends_all_the_same(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?latency=1ms", interrupts=True, queues=1)
    ugds.testing.emulator(ssd).inject("lost_interrupt", count=3)
    with ugds.empty(BLOCK) as buffer:
        start = time.monotonic()
        for _ in range(10):
            assert ssd.read(buffer) == BLOCK
        assert time.monotonic() - start < 2
    assert ssd.info.completion == "interrupt"


def test_a_queue_that_never_hears_an_interrupt_is_polled_from_then_on(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?latency=1ms", interrupts=True, queues=1)
    ugds.testing.emulator(ssd).inject("lost_interrupt", count=1000)
    with ugds.empty(BLOCK) as buffer:
        for _ in range(30):
            assert ssd.read(buffer) == BLOCK
    assert ssd.info.completion == "polling: interrupts of completions were missed"
    assert ssd.stats().queues[0]["completion"] == "polling"


@pytest.mark.parametrize("notify", ["every", "adaptive"])
def test_threads_that_share_a_queue_wake_one_another(open_ssd: OpenSsd, notify: str) -> None:
    ssd = open_ssd(f"emulated:16MiB?latency=300us&notify={notify}", interrupts=True, queues=1)
    slowest: list[float] = []

    def work(seed: int) -> None:
        with ugds.empty(64 * 1024) as buffer:
            pattern = bytes([seed]) * len(buffer)
            view = memoryview(buffer)
            for _ in range(60):
                view[:] = pattern
                start = time.monotonic()
                ssd.write(buffer, seed * len(buffer))
                view[:] = bytes(len(buffer))
                ssd.read(buffer, seed * len(buffer))
                slowest.append(time.monotonic() - start)
                assert view == pattern
            view.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(slowest) == 8 * 60, "a thread failed"
    assert ssd.info.completion == "interrupt"
    # A sleeper that nobody woke would have slept for 10 ms; on a busy machine some take that long all the same.
    assert sorted(slowest)[len(slowest) // 2] < 0.01


def test_interrupts_go_on_after_a_reset_of_the_controller(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?latency=1ms", interrupts=True, queues=2, deadline=0.3)
    ugds.testing.emulator(ssd).inject("hang", abortable=False)
    with ugds.empty(BLOCK) as buffer:
        with pytest.raises(ugds.Error) as caught:
            ssd.read(buffer)
        assert caught.value.errno == errno.ETIMEDOUT
        assert ugds.testing.emulator(ssd).counters()["resets"] == 1
        before = wakeups(ssd)
        for _ in range(20):
            assert ssd.read(buffer) == BLOCK
    assert wakeups(ssd) - before >= 15
    assert ssd.info.completion == "interrupt"


def test_a_sleeping_read_of_a_removed_device_ends(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?latency=5s", interrupts=True)
    with ugds.empty(BLOCK) as buffer:
        told: list[ugds.Error] = []

        def read() -> None:
            with pytest.raises(ugds.Error) as caught:
                ssd.read(buffer)
            told.append(caught.value)

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.1)
        ugds.testing.emulator(ssd).remove()
        thread.join(5)
        assert not thread.is_alive()
        assert told[0].errno == errno.ENODEV
        assert ssd.state == "lost"


def test_every_uri_can_name_a_namespace(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?namespaces=2&ns=2")
    ugds.testing.emulator(ssd).poke(0, b"\x02" * BLOCK, namespace=2)
    assert ssd.info.namespace == 2
    with ugds.empty(BLOCK) as buffer:
        ssd.read(buffer)
        assert bytes(memoryview(buffer)) == b"\x02" * BLOCK
    with pytest.raises(ugds.Error, match="no namespace 3"):
        ugds.open("emulated:1MiB?namespaces=2&ns=3")
    with pytest.raises(ugds.Error, match="ns"):
        ugds.open("emulated:1MiB?ns=0")


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_command_that_hangs_is_noticed_while_others_complete_on_its_queue(
    open_ssd: OpenSsd, interrupts: bool
) -> None:
    ssd = open_ssd("emulated:1MiB?latency=2ms", interrupts=interrupts, queues=1, deadline=0.5)
    stop = threading.Event()

    def others() -> None:
        with ugds.empty(BLOCK) as buffer:
            while not stop.is_set():
                with contextlib.suppress(ugds.Error):  # a reset ends theirs too
                    ssd.read(buffer, 8 * BLOCK)

    threads = [threading.Thread(target=others) for _ in range(2)]
    for thread in threads:
        thread.start()
    ugds.testing.emulator(ssd).inject("hang", lba=0, blocks=1)
    with ugds.empty(BLOCK) as buffer:
        start = time.monotonic()
        with pytest.raises(ugds.Error) as caught:
            ssd.read(buffer, 0)
        took = time.monotonic() - start
    stop.set()
    for thread in threads:
        thread.join()
    assert caught.value.errno == errno.ETIMEDOUT
    assert took < 5


@pytest.mark.parametrize("interrupts", [False, True])
def test_requests_that_get_on_are_not_ended_by_the_deadline_of_their_commands(
    open_ssd: OpenSsd, interrupts: bool
) -> None:
    # Each takes longer than the deadline, and none of its commands does.
    ssd = open_ssd("emulated:16MiB?latency=20ms", interrupts=interrupts, queues=1, depth=4, deadline=1.0)
    failed: list[ugds.Error] = []

    def read() -> None:
        with ugds.empty("8MiB") as buffer:
            try:
                assert ssd.read(buffer) == len(buffer)
            except ugds.Error as error:
                failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start > 1.2
    assert not failed
