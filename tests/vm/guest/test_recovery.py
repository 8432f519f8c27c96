# SPDX-License-Identifier: Apache-2.0
"""Commands that hang or fail, and processes that are killed: what comes after is right."""

from __future__ import annotations

import errno
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import support
import ugds
from devices import Controller
from host import Host
from support import KIB, MIB, Guarded, noise, write_and_read

Open = Callable[..., ugds.Device]
Slow = Callable[[str, int], None]
UriOf = Callable[..., str]
UNRECOVERED_READ, WRITE_FAULT = 0x281, 0x280
pytestmark = pytest.mark.boot("iommufd", "debug")


@pytest.mark.parametrize("way", support.CHECKED_WAYS)
def test_a_hung_command_is_ended_by_a_reset_and_the_device_goes_on(
    open_ssd: Open, host: Host, slow: Slow, way: str
) -> None:
    planted = noise(64 * KIB, 1)
    host.write_image("two1", 0, planted)
    with open_ssd("two", way, deadline=1.0) as ssd, Guarded(64 * KIB) as buffer:
        slow("two1", 1000)
        ssd.read(buffer.registration, 0, 4 * KIB, support.GUARD)  # what the throttle lets pass at once
        start = time.monotonic()
        with pytest.raises(ugds.Error) as ended:
            ssd.read(buffer.registration, 0, 64 * KIB, support.GUARD)
        assert 0.9 < time.monotonic() - start < 20
        assert ended.value.errno in (errno.ETIMEDOUT, errno.ECANCELED)
        assert ended.value.completed < 64 * KIB
        assert ended.value.hint
        # From here on the buffer is the caller's: nothing may come late.
        then = buffer.got()
        slow("two1", 0)
        time.sleep(0.5)
        assert buffer.got() == then
        buffer.put(bytes(64 * KIB))
        assert ssd.read(buffer.registration, 0, 64 * KIB, support.GUARD) == 64 * KIB
        assert buffer.got() == planted
        assert ssd.state == "ready"
        assert ssd.stats().in_flight == 0


@pytest.mark.boot("iommufd")
def test_a_registration_is_held_as_long_as_the_controller_holds_a_command_on_it(
    open_ssd: Open, host: Host, slow: Slow
) -> None:
    host.write_image("two1", 0, b"\x42" * 64 * KIB)
    with open_ssd("two") as ssd:
        buffer = ugds.register(memory := bytearray(64 * KIB))
        slow("two1", 32 * KIB)
        ssd.read(buffer)  # what the throttle lets pass at once
        memory[:] = bytes(64 * KIB)
        reader = threading.Thread(target=ssd.read, args=(buffer,))
        reader.start()
        while ssd.stats().in_flight == 0:
            time.sleep(0.01)
        with pytest.raises(ugds.Error) as busy:
            buffer.close()
        assert busy.value.errno == errno.EBUSY
        reader.join(60)
        assert set(memory) == {0x42}
        buffer.close()
        memory[:] = bytes(64 * KIB)
        assert set(memory) == {0}


@pytest.mark.boot("iommufd")
def test_a_reset_ends_other_callers_commands_too_and_all_can_go_on(open_ssd: Open, slow: Slow) -> None:
    ended: list[str] = []
    with open_ssd("two", queues=2, deadline=1.5) as ssd, ugds.empty(4 * 64 * KIB) as buffer:
        slow("two1", 1000)

        def work(number: int) -> None:
            try:
                ssd.write(buffer, number * MIB, 64 * KIB, number * 64 * KIB)
                ended.append("done")
            except ugds.Error as error:
                ended.append(error.cause)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(ended) == 4
        assert set(ended) != {"done"}
        slow("two1", 0)
        write_and_read(ssd, 16 * MIB, 64 * KIB, seed=2)


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("way", support.CHECKED_WAYS[:1])
def test_a_block_that_cannot_be_moved_is_told_with_what_came_before_it(
    open_ssd: Open, host: Host, way: str, verb: str
) -> None:
    broken, planted = 8 * MIB, noise(2 * MIB, 3)
    host.write_image("broken1", broken - MIB, planted)
    with open_ssd("broken", way) as ssd, Guarded(2 * MIB) as buffer:
        new = noise(2 * MIB, 4)
        buffer.put(new)
        with pytest.raises(ugds.Error) as failed:
            getattr(ssd, verb)(buffer.registration, broken - MIB, 2 * MIB, support.GUARD)
        error = failed.value
        assert error.errno == errno.EIO
        assert error.status is not None
        assert error.status & 0x7FF == (UNRECOVERED_READ if verb == "read" else WRITE_FAULT)
        assert error.status_text
        assert error.completed <= MIB
        if verb == "read":
            assert buffer.got()[: error.completed] == planted[: error.completed]
        else:
            assert host.read_image("broken1", broken - MIB, error.completed) == new[: error.completed]
        # Beside it all is well.
        buffer.put(bytes(2 * MIB))
        assert ssd.read(buffer.registration, broken + 512, MIB - 512, support.GUARD) == MIB - 512
        assert ssd.state == "ready"
        assert ssd.stats().errors >= 1


WRITE_GENERATIONS = """
import sys, ugds
size, slots = 16384, 8
with ugds.open(sys.argv[1], interrupts=sys.argv[2] == "1") as ssd, ugds.empty(size * slots) as buffer:
    memory = memoryview(buffer)
    generation = 0
    while True:
        generation = generation % 250 + 1
        memory[:] = bytes([generation]) * len(memory)
        for slot in range(slots):
            ssd.write(buffer, slot * size, size, slot * size)
        print(generation, flush=True)
"""


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return iter(process.stdout)


@pytest.mark.parametrize("interrupts", ["0", "1"])
@pytest.mark.parametrize("way", support.CHECKED_WAYS)
def test_after_a_kill_during_writes_all_that_was_acknowledged_is_there(
    uri_of: UriOf, open_ssd: Open, host: Host, way: str, interrupts: str
) -> None:
    with support.child(WRITE_GENERATIONS, uri_of("two", way), interrupts) as writer:
        acknowledged = 0
        for line in lines_of(writer):
            if line.strip().isdigit():
                acknowledged = int(line)
            if acknowledged == 5:
                break
        time.sleep(0.05)
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read() if writer.stdout else ""
        acknowledged = max([acknowledged, *(int(line) for line in rest.split() if line.isdigit())])
        assert writer.wait(30) == -signal.SIGKILL
    with open_ssd("two", way) as ssd, ugds.empty(8 * 16 * KIB) as buffer:
        ssd.read(buffer)
        data = bytes(memoryview(buffer))
        assert host.read_image("two1", 0, len(data)) == data
        for at in range(0, len(data), 512):
            block = data[at : at + 512]
            assert block in (bytes([acknowledged]) * 512, bytes([acknowledged + 1]) * 512), f"at {at}"
        write_and_read(ssd, MIB, 64 * KIB, seed=5)


READ_SLOWLY = """
import sys, ugds
with ugds.open(sys.argv[1]) as ssd, ugds.empty("4MiB") as buffer:
    print("reading", flush=True)
    ssd.read(buffer)
"""


@pytest.mark.parametrize("way", support.CHECKED_WAYS)
def test_a_kill_while_the_controller_holds_commands_leaves_nothing_behind(
    uri_of: UriOf, controllers: dict[str, Controller], open_ssd: Open, host: Host, slow: Slow, way: str
) -> None:
    uri, two = uri_of("two", way), controllers["two"]
    host.write_image("two1", 0, b"\x66" * 4 * MIB)
    slow("two1", 64 * KIB)
    with support.child(READ_SLOWLY, uri) as reader:
        assert any("reading" in line for line in lines_of(reader))
        time.sleep(0.7)
        # Whoever gets the pages that it had must not see the data of its commands arrive.
        reader.send_signal(signal.SIGKILL)
        assert reader.wait(30) == -signal.SIGKILL
    pages = [bytearray(MIB) for _ in range(16)]
    slow("two1", 0)
    assert not two.bus_master()
    time.sleep(0.5)
    assert not any(any(page) for page in pages)
    with open_ssd("two", way) as ssd:
        write_and_read(ssd, 0, MIB, seed=6)


@pytest.mark.parametrize("way", support.CHECKED_WAYS[:1])
def test_a_process_may_end_without_closing(uri_of: UriOf, controllers: dict[str, Controller], way: str) -> None:
    program = "import sys, ugds\nssd = ugds.open(sys.argv[1])\nbuffer = ugds.empty(65536)\nprint(ssd.read(buffer))"
    for _ in range(3):
        status, said = support.run_child(program, uri_of("two", way))
        assert (status, said.strip()) == (0, "65536")
    assert not controllers["two"].bus_master()
