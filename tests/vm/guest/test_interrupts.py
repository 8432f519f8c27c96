# SPDX-License-Identifier: Apache-2.0
"""Waiting by interrupt: a waiter sleeps until the controller's MSI-X vector wakes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import support
import ugds
from host import Host
from support import KIB, MIB, noise

Open = Callable[..., ugds.Device]
Slow = Callable[[str, int], None]
pytestmark = pytest.mark.boot("iommufd", "debian")


@pytest.mark.parametrize("way", support.WAYS)
def test_interrupts_wake_waiters_and_are_counted(open_ssd: Open, host: Host, slow: Slow, way: str) -> None:
    planted = noise(MIB, 1)
    host.write_image("two1", 0, planted)
    with open_ssd("two", way, interrupts=True, queues=2) as ssd, ugds.empty(MIB) as buffer:
        assert ssd.info.completion == "interrupt"
        slow("two1", 4 * MIB)
        for _ in range(3):  # the throttle lets the first pass at once
            ssd.read(buffer)
        assert bytes(memoryview(buffer)) == planted
        queues = ssd.stats().queues
        assert {queue["completion"] for queue in queues} == {"interrupt"}
        assert sum(queue["wakeups"] for queue in queues) > 0


@pytest.mark.boot("iommufd")
def test_a_uri_can_ask_for_them_and_a_keyword_stands_above_it(uri_of: Callable[..., str]) -> None:
    uri = uri_of("two", interrupts=1)
    with ugds.open(uri) as ssd:
        assert ssd.info.completion == "interrupt"
    with ugds.open(uri, interrupts=False) as ssd:
        assert ssd.info.completion == "polling"


@pytest.mark.parametrize("interrupts", [True, False])
@pytest.mark.boot("iommufd", "debian")
def test_a_sleeping_waiter_leaves_the_processor_alone(open_ssd: Open, slow: Slow, interrupts: bool) -> None:
    with open_ssd("two", interrupts=interrupts, queues=1) as ssd, ugds.empty(256 * KIB) as buffer:
        slow("two1", 128 * KIB)
        ssd.read(buffer)  # what the throttle lets pass at once
        wall, busy = time.monotonic(), time.process_time()
        ssd.read(buffer)
        wall, busy = time.monotonic() - wall, time.process_time() - busy
    assert wall > 1
    assert (busy < 0.2 * wall) == interrupts, f"{busy:.2f} s of {wall:.2f} s"


@pytest.mark.boot("iommufd")
def test_many_sleepers_of_one_queue_all_wake(open_ssd: Open, host: Host) -> None:
    data = noise(16 * 16 * KIB, 3)
    host.write_image("small1", 0, data)
    with open_ssd("small", interrupts=True, queues=1) as ssd, ugds.empty(len(data)) as buffer:

        def work(number: int) -> None:
            for _ in range(3):
                ssd.read(buffer, number * 16 * KIB, 16 * KIB, number * 16 * KIB)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert bytes(memoryview(buffer)) == data
        assert ssd.info.completion == "interrupt"


@pytest.mark.boot("iommufd")
def test_more_queues_than_vectors_are_polled_and_that_is_said(open_ssd: Open, host: Host) -> None:
    # Five vectors: the admin queue's and four.
    with open_ssd("peered", interrupts=True, queues=4) as ssd:
        assert ssd.info.queues == 4
        assert ssd.info.completion == "interrupt"
    with open_ssd("many", interrupts=True, queues=4) as ssd, ugds.empty(64 * KIB) as buffer:
        assert ssd.info.queues == 4
        assert ssd.info.completion.startswith("interrupt on 1 of 4 queues: the device has 2 interrupt vectors")
        host.write_image("many1", 0, b"\x5a" * 64 * KIB)

        def work() -> None:
            for _ in range(8):
                ssd.read(buffer)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(memoryview(buffer)) == {0x5A}


@pytest.mark.boot("iommufd", "debian")
def test_interrupts_go_on_after_the_controller_was_reset(open_ssd: Open, host: Host, slow: Slow) -> None:
    with open_ssd("two", interrupts=True, queues=1, deadline=1.0) as ssd, ugds.empty(64 * KIB) as buffer:
        slow("two1", 1000)
        ssd.read(buffer, 0, 4 * KIB)
        with pytest.raises(ugds.Error):
            ssd.read(buffer)
        slow("two1", 256 * KIB)
        before = ssd.stats().queues[0]["wakeups"]
        host.write_image("two1", 0, b"\x77" * 64 * KIB)
        for _ in range(6):
            assert ssd.read(buffer) == 64 * KIB
        assert set(memoryview(buffer)) == {0x77}
        assert ssd.info.completion == "interrupt"
        assert ssd.stats().queues[0]["wakeups"] > before
