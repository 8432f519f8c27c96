# SPDX-License-Identifier: Apache-2.0
"""What callers and controllers do that they should not: nothing crashes, hangs, or passes for right."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time

import pytest
import ugds
import ugds.testing


def python(program: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout)


def test_a_buffer_is_held_while_an_unaligned_request_copies_to_it() -> None:
    with ugds.open("emulated:1MiB?latency=300ms") as ssd, ugds.register(bytearray(8192)) as buffer:
        thread = threading.Thread(target=ssd.read, args=(buffer, 1, 1000, 4096))
        thread.start()
        time.sleep(0.05)  # it has begun, and is far from done
        refused = 0
        while thread.is_alive():
            try:
                buffer.close()
            except ugds.Error as error:
                assert error.errno == errno.EBUSY
                refused += 1
                time.sleep(0.02)
            else:
                assert refused  # only after the request
                break
        thread.join()
        assert refused > 2


def test_a_completion_that_was_made_up_never_passes_for_a_right_one() -> None:
    wrong: list[int] = []
    told: list[int | None] = []
    # A latency over the time between two looks at the device: that is when the queue pair's distrust is seen.
    with ugds.open("emulated:1MiB?latency=300us", queues=1) as ssd:
        emulator = ugds.testing.emulator(ssd)
        emulator.poke(0, b"\x5a" * 4096)

        def read() -> None:
            with ugds.register(bytearray(4096)) as buffer:
                for _ in range(300):
                    buffer.owner[:] = bytes(4096)
                    try:
                        ssd.read(buffer)
                    except ugds.Error as error:
                        told.append(error.errno)
                    else:
                        if buffer.owner != b"\x5a" * 4096:
                            wrong.append(1)

        emulator.inject("unknown_id", skip=50, count=20)
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert set(told) <= {errno.ECANCELED}
        assert emulator.counters()["resets"] >= 1


@pytest.mark.parametrize("prefix", ["", "x", "xy", "xyz"])
@pytest.mark.parametrize("character", ["é", "日", "\N{PILE OF POO}"])
def test_text_of_callers_is_cut_at_characters_in_errors(prefix: str, character: str) -> None:
    with ugds.open("emulated:1MiB") as ssd, ugds.register(bytearray(4096)) as buffer:
        for length in range(20, 240, 3):
            with pytest.raises(ugds.Error) as caught:
                ssd.read(buffer, prefix + character * length)
            assert "\N{REPLACEMENT CHARACTER}" not in str(caught.value)
    with pytest.raises(ugds.Error) as caught:
        ugds.open("emulated:1MiB?" + prefix + character * 100)
    assert "\N{REPLACEMENT CHARACTER}" not in caught.value.device


def test_who_closes_second_waits_for_who_closes_first() -> None:
    ssd = ugds.open("emulated:1MiB?latency=300ms")
    buffer = ugds.register(bytearray(4096))
    reader = threading.Thread(target=ssd.read, args=(buffer,))
    reader.start()
    time.sleep(0.05)
    closers = [threading.Thread(target=ssd.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
        assert ssd.closed
        assert not reader.is_alive() or reader.join(1) is None
    buffer.close()  # nothing is in flight any more


def test_a_thread_in_a_read_that_never_ends_does_not_keep_the_process() -> None:
    done = python(
        "import threading, time, ugds, ugds.testing\n"
        "ssd = ugds.open('emulated:1MiB', deadline=1e9); buffer = ugds.register(bytearray(4096))\n"
        "ugds.testing.emulator(ssd).inject('hang')\n"
        "def read():\n"
        "    try: ssd.read(buffer)\n"
        "    except ugds.Error: pass\n"
        "threading.Thread(target=read, daemon=True).start()\n"
        "time.sleep(0.3)\n"
        "print('leaving')\n",
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (0, "leaving\n")


def test_dropping_a_device_that_another_thread_looks_into_does_not_deadlock() -> None:
    done = python(
        "import threading, ugds, ugds.testing\n"
        "for _ in range(20):\n"
        "    ssd = ugds.open('emulated:64MiB'); emulator = ugds.testing.emulator(ssd)\n"
        "    def look():\n"
        "        try:\n"
        "            for _ in range(20): emulator.peek(0, 1 << 20)\n"
        "        except ugds.Error: pass\n"
        "    thread = threading.Thread(target=look); thread.start()\n"
        "    del ssd\n"
        "    thread.join()\n"
        "print('done')\n"
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_device_made_by_hand_is_refused() -> None:
    with pytest.raises(TypeError):
        ugds.Device.read(ugds.Device.__new__(ugds.Device), bytearray(4096))
