# SPDX-License-Identifier: Apache-2.0
"""Awaiting requests: many at once, from many loops, cancelled, failing, and left behind in every way."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ugds
import ugds.testing
from ugds import _core

BLOCK, KIB, MIB = 4096, 1 << 10, 1 << 20
UNRECOVERED = 0x281
OpenSsd = Callable[..., ugds.Device]

DEVICES = {
    "polled": ("emulated:16MiB", {}),
    "interrupts": ("emulated:16MiB?latency=200us", {"interrupts": True}),
    "slow": ("emulated:16MiB?latency=1ms", {}),
    "one queue": ("emulated:16MiB?depth=8", {"queues": 1}),
    "pump": ("emulated:16MiB?pump=caller&clock=virtual&latency=10us", {}),
    "trapped": ("emulated:16MiB?doorbells=trapped", {"queues": 2}),
}


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled(expected: tuple[int, int] | None = None) -> tuple[int, int]:
    """What is held, when a thread that has ended is not seen any more."""
    gc.collect()
    until = time.monotonic() + (5 if expected else 0.2)
    while held() != expected and time.monotonic() < until:
        time.sleep(0.01)
    return held()


@pytest.mark.parametrize("kind", DEVICES)
def test_thousands_of_awaits_arrive_where_they_belong(open_ssd: OpenSsd, kind: str) -> None:
    uri, options = DEVICES[kind]
    ssd = open_ssd(uri, **options)
    emulator = ugds.testing.emulator(ssd)
    content = np.random.default_rng(1).integers(0, 256, 8 * MIB, "u1")
    emulator.poke(0, content.tobytes())
    memory = np.zeros(8 * MIB, "u1")

    async def main(buffer: ugds.Registration) -> None:
        order = np.random.default_rng(2).permutation(2048).tolist()
        sizes = await asyncio.gather(*(ssd.aread(buffer, at * BLOCK, BLOCK, at * BLOCK) for at in order))
        assert sizes == [BLOCK] * 2048
        assert np.array_equal(memory, content)
        await asyncio.gather(
            ssd.awrite(buffer, "8MiB", "3MiB"), ssd.awrite(buffer, 12 * MIB, MIB, "1MiB", durable=True), ssd.aflush()
        )
        assert emulator.peek(8 * MIB, 3 * MIB) == content[: 3 * MIB].tobytes()
        assert emulator.peek(12 * MIB, MIB) == content[MIB : 2 * MIB].tobytes()

    with ugds.register(memory) as buffer:
        asyncio.run(main(buffer))


def test_the_loop_goes_on_while_requests_wait(open_ssd: OpenSsd) -> None:
    """Also while many more are awaited than the device takes."""
    ssd = open_ssd("emulated:1MiB?latency=20ms", queues=2)

    async def main(buffer: ugds.Registration) -> None:
        longest, ended = 0.0, False

        async def tick() -> None:
            nonlocal longest
            while not ended:
                before = time.monotonic()
                await asyncio.sleep(0)
                longest = max(longest, time.monotonic() - before)

        ticking = asyncio.create_task(tick())
        start = time.monotonic()
        for _ in range(2):
            await asyncio.gather(*(ssd.aread(buffer) for _ in range(600)))
        assert time.monotonic() - start >= 6 * 0.02
        ended = True
        await ticking
        assert longest < 0.15

    with ugds.empty(BLOCK) as buffer:
        asyncio.run(main(buffer))


def test_requests_that_find_no_capacity_go_in_order(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:16MiB?latency=100us")
    ended: list[int] = []

    async def main(buffer: ugds.Registration) -> None:
        async def one(number: int) -> None:
            await ssd.aread(buffer, 0, BLOCK)
            ended.append(number)

        await asyncio.gather(*(one(i) for i in range(2000)))

    with ugds.empty(BLOCK) as buffer:
        asyncio.run(main(buffer))
    assert sorted(ended) == list(range(2000))
    # Nobody is passed by more than what is in flight.
    assert max(abs(place - number) for place, number in enumerate(ended)) <= 256


def test_errors_are_raised_where_they_are_awaited(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:16MiB?lba=4096")
    ugds.testing.emulator(ssd).inject("status", opcode=2, status=UNRECOVERED, lba=7, blocks=1)
    ugds.testing.emulator(ssd).inject("status", opcode=0, status=0x006)

    async def main(buffer: ugds.Registration) -> None:
        reads = [ssd.aread(buffer, i * BLOCK, BLOCK) for i in range(300)]
        results = await asyncio.gather(*reads, return_exceptions=True)
        assert [i for i, result in enumerate(results) if result != BLOCK] == [7]
        assert isinstance(results[7], ugds.Error) and results[7].status == UNRECOVERED
        assert (results[7].operation, results[7].device, results[7].offset) == ("read", ssd.uri, 7 * BLOCK)
        for call, code in (
            (lambda: ssd.aread(buffer, 1 << 40), errno.ERANGE),
            (lambda: ssd.aread(buffer, 1, BLOCK), errno.EINVAL),
            (lambda: ssd.aread(buffer, 0, 2 * MIB), errno.EINVAL),
            (lambda: ssd.aread(buffer, -1), errno.EINVAL),
            (lambda: ssd.awrite(buffer, 0, 1), errno.EINVAL),
            (lambda: ssd.aread(bytearray(BLOCK)), errno.EINVAL),
            (lambda: ssd.aflush(), errno.EIO),
        ):
            with pytest.raises(ugds.Error) as caught:
                await call()
            assert caught.value.errno == code, caught.value
        await ssd.aflush()
        with pytest.raises(TypeError):
            await ssd.aread(5)

    with ugds.empty(MIB) as buffer:
        asyncio.run(main(buffer))


def test_awaited_writes_are_durable_when_they_say_so(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?vwc=1")

    async def main() -> None:
        with ugds.register(bytearray(b"A" * BLOCK)) as buffer:
            await ssd.awrite(buffer, 0, durable=True)
            await ssd.awrite(buffer, BLOCK)
            await ssd.aflush()
            await ssd.awrite(buffer, 2 * BLOCK)

    asyncio.run(main())
    ugds.testing.power_cut(ssd)
    emulator = ugds.testing.emulator(ssd)
    assert emulator.peek(0, 2 * BLOCK) == b"A" * 2 * BLOCK
    assert emulator.peek(2 * BLOCK, BLOCK) == bytes(BLOCK)


def test_a_cancelled_request_runs_on_and_its_buffer_is_held_until_it_ends(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?latency=200ms")
    ugds.testing.emulator(ssd).poke(0, b"\x5a" * BLOCK)
    memory = np.zeros(BLOCK, "u1")

    async def main() -> None:
        buffer = ugds.register(memory)
        task = asyncio.create_task(ssd.aread(buffer))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ugds.Error) as caught:
            buffer.close()
        assert caught.value.errno == errno.EBUSY
        assert not memory.any()
        with ugds.empty(BLOCK) as other:
            await ssd.aread(other)
        assert (memory == 0x5A).all()
        buffer.close()
        with pytest.raises(asyncio.TimeoutError), ugds.empty(BLOCK) as other:
            try:
                await asyncio.wait_for(ssd.aread(other), 0.02)
            finally:
                await asyncio.sleep(0.3)

    asyncio.run(main())


def test_a_cancelled_request_that_the_device_was_not_given_is_never_sent(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?latency=700ms")

    async def main(buffer: ugds.Registration) -> None:
        before = ssd.stats().commands
        tasks = [asyncio.create_task(ssd.aread(buffer)) for _ in range(1000)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await ssd.aread(buffer)
        assert ssd.stats().commands - before <= 257

    with ugds.empty(BLOCK) as buffer:
        asyncio.run(main(buffer))


def test_a_buffer_that_nobody_holds_is_kept_while_it_is_awaited(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?latency=50ms")
    ugds.testing.emulator(ssd).poke(0, b"\x5a" * BLOCK)
    before = _core.open_registrations()
    memory = np.zeros(BLOCK, "u1")

    async def main() -> None:
        tasks = [asyncio.create_task(ssd.aread(ugds.register(memory)))]
        await asyncio.sleep(0)
        gc.collect()
        assert await asyncio.gather(*tasks) == [BLOCK]
        assert (memory == 0x5A).all()

    asyncio.run(main())
    ugds.empty(BLOCK).close()
    assert _core.open_registrations() == before


def test_a_progress_thread_does_nothing_while_nothing_is_in_flight(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?pump=caller")

    def cpu() -> int:
        """Ticks of all threads but this one."""
        total = 0
        for task in Path("/proc/self/task").iterdir():
            if task.name != str(threading.get_native_id()):
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total

    async def main(buffer: ugds.Registration) -> None:
        await ssd.aread(buffer)
        tasks, before = held()[1], cpu()
        await asyncio.sleep(0.5)
        assert cpu() - before <= 1
        await ssd.aread(buffer)
        assert held()[1] == tasks

    with ugds.empty(BLOCK) as buffer:
        asyncio.run(main(buffer))


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_long_wait_costs_little(open_ssd: OpenSsd, interrupts: bool) -> None:
    """Of the process: the device's own thread sleeps, and the progress thread naps or sleeps."""
    ssd = open_ssd("emulated:1MiB", interrupts=interrupts)
    ugds.testing.emulator(ssd).inject("late", count=1, delay_ns=500_000_000)

    async def main(buffer: ugds.Registration) -> None:
        await ssd.aread(buffer)
        own = time.process_time()
        await asyncio.sleep(0.5)
        idle = time.process_time() - own
        ugds.testing.emulator(ssd).inject("late", count=1, delay_ns=500_000_000)
        own = time.process_time()
        await ssd.aread(buffer)
        assert time.process_time() - own - idle < 0.15

    with ugds.empty(BLOCK) as buffer:
        asyncio.run(main(buffer))


def test_several_loops_in_several_threads_share_a_device(open_ssd: OpenSsd) -> None:
    ssd, second = open_ssd("emulated:16MiB"), open_ssd("emulated:16MiB?latency=100us")
    content = np.random.default_rng(1).integers(0, 256, MIB, "u1")
    for device in (ssd, second):
        ugds.testing.emulator(device).poke(0, content.tobytes())
    wrong: list[BaseException] = []

    async def main() -> None:
        for _ in range(3):
            with ugds.empty(MIB) as buffer:
                devices = (ssd, second)
                await asyncio.gather(
                    *(devices[i % 2].aread(buffer, i * BLOCK, BLOCK, i * BLOCK) for i in range(256)),
                )
                assert bytes(buffer) == content.tobytes()

    def body() -> None:
        try:
            for _ in range(3):
                asyncio.run(main())
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=body) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)


def test_nothing_is_left_of_loops_and_devices() -> None:
    async def main(ssd: ugds.Device, buffer: ugds.Registration) -> None:
        await asyncio.gather(*(ssd.aread(buffer) for _ in range(10)))

    with ugds.empty(BLOCK) as buffer:
        with ugds.open("emulated:1MiB") as ssd:
            asyncio.run(main(ssd, buffer))
        before = settled()
        for _ in range(20):
            with ugds.open("emulated:1MiB") as ssd:
                for _ in range(3):
                    asyncio.run(main(ssd, buffer))
        assert settled(before) == before
        with ugds.open("emulated:1MiB") as ssd:
            asyncio.run(main(ssd, buffer))
            before = settled()
            for _ in range(50):
                asyncio.run(main(ssd, buffer))
            assert settled(before) == before


def test_a_loop_that_is_closed_with_requests_in_flight_leaves_nothing(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?latency=50ms")
    registrations = _core.open_registrations()

    async def one(buffer: ugds.Registration) -> None:
        await ssd.aread(buffer)

    def leave() -> None:
        loop = asyncio.new_event_loop()
        buffer = ugds.empty(BLOCK)
        tasks = [loop.create_task(one(buffer)) for _ in range(300)]
        loop.run_until_complete(asyncio.sleep(0.005))
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()

    with ugds.empty(BLOCK) as buffer:
        asyncio.run(one(buffer))
        before = settled()
        for _ in range(5):
            leave()
        gc.collect()
        asyncio.run(one(buffer))
        while ssd.stats().in_flight:
            time.sleep(0.01)
        ugds.empty(BLOCK).close()  # collects what was held for the device
        assert settled(before) == before
    assert _core.open_registrations() == registrations


def test_closing_too_early_takes_nothing_from_a_request_that_was_just_submitted() -> None:
    """Whether or not the thread that tells of its end has come to it yet. In a process of its own: it crashed."""
    code = """
import asyncio, ugds
async def main():
    refused = closed = 0
    while refused < 1500 or closed < 3:
        ssd, buffer = ugds.open("emulated:1MiB?latency=1ms", queues=2), ugds.empty("4KiB")
        for turn in range(500):
            task = asyncio.ensure_future(ssd.aread(buffer))
            await asyncio.sleep(0)
            try:
                ssd.close(drain=0)
            except ugds.Error as error:
                assert error.errno == 16, error
                refused += 1
            assert await task == 4096
            if ssd.closed:
                break
        ssd.close()
        buffer.close()
        closed += 1
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("event", ["close", "drop", "remove", "hang", "power", "wedge"])
def test_what_happens_to_the_device_in_the_middle_is_raised(event: str) -> None:
    uri = "emulated:1MiB?latency=20ms&vwc=1"
    ssd = ugds.open(uri, deadline=0.3)
    emulator = ugds.testing.emulator(ssd)
    if event in ("hang", "wedge"):
        emulator.inject("hang", skip=5, count=1, abortable=event == "hang")
    if event == "wedge":
        emulator.inject("never_stopped", admin=True)
        emulator.inject("reset_fails")

    async def main(ssd: ugds.Device) -> list[object]:
        buffer = ugds.empty(BLOCK)
        reads = [asyncio.create_task(ssd.aread(buffer)) for _ in range(20 if event in ("hang", "wedge") else 600)]
        await asyncio.sleep(0.005)
        if event == "close":
            ssd.close()
        elif event == "remove":
            emulator.remove()
        elif event == "power":
            emulator.power_cut()
        elif event == "drop":
            _core.close_all()
        results = await asyncio.wait_for(asyncio.gather(*reads, return_exceptions=True), 30)
        if event in ("close", "drop", "remove"):
            with pytest.raises(ugds.Error) as caught:
                await ssd.aread(buffer)
            assert caught.value.errno == (errno.ENODEV if event == "remove" else errno.EBADF)
            with pytest.raises(ugds.Error):
                await ssd.aflush()
        elif event != "wedge":
            assert await ssd.aread(buffer) == BLOCK
        return results

    results = asyncio.run(main(ssd))
    codes = {result.errno for result in results if isinstance(result, ugds.Error)}
    right = sum(result == BLOCK for result in results)
    if event == "close":
        assert codes == set() and right == 600  # as every close, it waits for what runs
    elif event == "drop":
        assert codes <= {errno.ECANCELED, errno.EBADF} and codes
    elif event == "remove":
        assert codes == {errno.ENODEV}
    elif event == "power":
        assert codes == {errno.ECANCELED} and right >= 0
    elif event == "hang":
        assert codes == {errno.ETIMEDOUT} and right == 19
    else:
        assert codes and codes <= {errno.ETIMEDOUT, errno.EIO} and right >= 5, (codes, right)
    if event not in ("close", "drop"):
        if event != "wedge":
            assert emulator.violations() == []
        with_force = ssd.close
        try:
            with_force()
        except ugds.Error as error:
            assert error.errno == errno.EBUSY


def test_a_mode_of_the_devices_is_followed(open_ssd: OpenSsd) -> None:
    for mode in ("latency", "throughput", "priority", "adaptive"):
        ssd = open_ssd("emulated:16MiB?latency=50us", mode=mode)

        async def main(buffer: ugds.Registration, ssd: ugds.Device = ssd) -> None:
            reads = [ssd.aread(buffer, i * MIB, MIB) for i in range(8)]
            writes = [ssd.awrite(buffer, i * BLOCK, BLOCK) for i in range(100)]
            assert await asyncio.gather(*reads, *writes) == [MIB] * 8 + [BLOCK] * 100

        with ugds.empty(MIB) as buffer:
            asyncio.run(main(buffer))


PRELUDE = """
import asyncio, errno, gc, os, signal, sys, threading, time
import numpy as np, ugds, ugds.testing
"""


def run(code: str) -> str:
    """In a process of its own, which must end well and silently. That its loops were not closed is no fault of ours."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore::ResourceWarning",
        "-X",
        "faulthandler",
        "-c",
        PRELUDE + code,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_a_forked_child_is_told_so_and_can_await_its_own() -> None:
    printed = run("""
ssd = ugds.open("emulated:1MiB?latency=30ms")
buffer = ugds.empty("4KiB")
async def main():
    pending = [asyncio.create_task(ssd.aread(buffer)) for _ in range(300)]
    await asyncio.sleep(0.01)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.events._set_running_loop(None)
            asyncio.set_event_loop(None)
            async def child():
                said = []
                for call in (ssd.aread(buffer), ssd.awrite(buffer), ssd.aflush()):
                    try:
                        await call
                        said.append("worked")
                    except ugds.Error as error:
                        said.append(errno.errorcode[error.errno] + (" fork" if "fork" in str(error) else ""))
                with ugds.open("emulated:1MiB") as mine, ugds.empty("4KiB") as own:
                    return said == ["EBADF fork"] * 3 and await mine.aread(own) == 4096 or said
            said = asyncio.run(child())
            ssd.close()
            code = 0 if said is True else 2
            if code: print(said, flush=True)
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(status, set(await asyncio.gather(*pending)))
asyncio.run(main())
buffer.close()
ssd.close()
""")
    assert printed == "0 {4096}\n"


def test_a_forked_child_that_ends_by_itself_ends_well() -> None:
    printed = run("""
ssd = ugds.open("emulated:1MiB")
buffer = ugds.empty("4KiB")
asyncio.run(ssd.aread(buffer))
pid = os.fork()
if pid == 0:
    del ssd
    gc.collect()
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), asyncio.run(ssd.aread(buffer)))
""")
    assert printed == "0 4096\n"


@pytest.mark.parametrize(
    "end",
    [
        "",
        "del ssd",
        "del buffer",
        "ssd.close()",
        "loop.close()",
        "sys.modules['keep'] = (ssd, buffer, loop, tasks)",
        "ugds.testing.emulator(ssd).remove()",
        "threading.Thread(target=lambda: asyncio.run(forever()), daemon=True).start(); time.sleep(0.1)",
    ],
)
def test_the_interpreter_ends_silently_with_requests_in_flight(end: str) -> None:
    run(f"""
ssd = ugds.open("emulated:1MiB?latency=20ms")
buffer = ugds.empty("4KiB")
async def one():
    await ssd.aread(buffer)
async def forever():
    try:
        while True: await second.aread(other)
    except ugds.Error:
        pass
second, other = ugds.open("emulated:1MiB"), ugds.empty("4KiB")
loop = asyncio.new_event_loop()
tasks = [loop.create_task(one()) for _ in range(300)]
for task in tasks: task._log_destroy_pending = False
loop.run_until_complete(asyncio.sleep(0.005))
{end}
""")


def test_an_interrupt_reaches_the_loop() -> None:
    printed = run("""
ssd = ugds.open("emulated:1MiB?latency=1s")
buffer = ugds.empty("4KiB")
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    asyncio.run(ssd.aread(buffer))
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - start < 0.8)
print(asyncio.run(ssd.aread(buffer)), ugds.testing.emulator(ssd).violations())
buffer.close()
ssd.close()
""")
    assert printed.split("\n") == ["interrupted True", "4096 []", ""]


def test_importing_the_package_does_not_import_asyncio() -> None:
    assert run("") == ""
    code = "import sys, ugds; print('asyncio' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_it_needs_a_running_loop(ssd: ugds.Device) -> None:
    with ugds.empty(BLOCK) as buffer:
        coroutine: Any = ssd.aread(buffer)
        with pytest.raises(RuntimeError, match="running event loop"):
            coroutine.send(None)
