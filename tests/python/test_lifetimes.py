# SPDX-License-Identifier: Apache-2.0
"""What holds what: releasing in the wrong order is refused by name, and nothing that is left behind (by an exception, a
fork, a thread that ends, a collection) is released early or kept for ever."""

from __future__ import annotations

import asyncio
import copy
import errno
import gc
import os
import pickle
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

OpenSsd = Callable[..., ugds.Device]
KIB = 1 << 10
#: Where the fake driver is, for streams without a GPU.
FAKE = os.environ.get("FAKE_CUDA_LIBRARY", "")

PRELUDE = """
import asyncio, errno, gc, multiprocessing, os, sys, threading, time, warnings
import numpy, ugds, ugds.testing
"""


def run(code: str, timeout: float = 60, **environment: str) -> str:
    """Runs Python code in a process of its own, which must end well and silently; gives what it printed."""
    command = [sys.executable, "-c", PRELUDE + code]
    env = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ugds.Error) as caught:
        call()
    assert caught.value.errno == errno.EBUSY
    for word in words:
        assert word in str(caught.value), str(caught.value)


def reading(device: ugds.Device, buffer: ugds.Registration) -> threading.Thread:
    """A read that is at the device."""
    thread = threading.Thread(target=device.read, args=(buffer,))
    thread.start()
    while device.stats().in_flight == 0:
        time.sleep(0.001)
    return thread


# --- The wrong order ----------------------------------------------------------------------------------------------


def test_closing_names_what_is_in_flight_and_drains_for_as_long_as_is_asked() -> None:
    ssd = ugds.open("emulated:1MiB?latency=700ms", queues=1)
    with ugds.empty("4KiB") as buffer:
        thread = reading(ssd, buffer)
        refused(lambda: ssd.close(drain=0), "1 call is running; 1 command is in flight on queue 1", "drain=")
        refused(lambda: ssd.close(drain=0.1), "1 command is in flight on queue 1")
        refused(buffer.close, f"1 command on queue 1 of {ssd.uri}")
        assert not ssd.closed and not buffer.closed
        ssd.close(drain=30)
        assert ssd.closed
        thread.join()


def test_closing_names_the_batch_and_how_many_requests_it_has() -> None:
    ssd = ugds.open("emulated:1MiB?latency=500ms", queues=2)
    with ugds.empty("64KiB") as buffer, ssd.batch(64) as batch:
        batch.read(buffer, np.arange(5) * 4096, 4096, np.arange(5) * 4096)
        refused(lambda: ssd.close(drain=0), "5 commands are in flight on queue 2", "5 requests of batch 0 are not coll")
        refused(buffer.close, f"5 commands on queue 2 of {ssd.uri}")
        batch.wait()
        ssd.close(drain=0)  # an idle batch holds nothing


def test_closing_names_what_is_awaited(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?latency=500ms", queues=2)

    async def close_too_early() -> None:
        with ugds.empty("4KiB") as buffer:
            task = asyncio.ensure_future(ssd.aread(buffer))
            await asyncio.sleep(0.1)
            refused(lambda: ssd.close(drain=0), "1 command is in flight on queue 2", "1 request of batch")
            assert await task == 4096
            assert await ssd.aread(buffer) == 4096  # it was not closed, and goes on

    asyncio.run(close_too_early())


STREAM = """
from ugds.bench import cuda
gpu = cuda.gpu(0)
stream, memory = gpu.stream(), gpu.memory(65536)
ssd = ugds.open("emulated:16MiB?latency=700ms", queues=2)
buffer = ugds.register(memory, require="staged")
"""


@pytest.fixture
def fake() -> dict[str, str]:
    """The environment of a process that has a GPU, which it only believes."""
    if not FAKE:
        pytest.skip("FAKE_CUDA_LIBRARY does not name the driver without a GPU")
    return {"UGDS_CUDA_LIBRARY": FAKE}


def test_closing_names_the_operations_on_streams(fake: dict[str, str]) -> None:
    printed = run(
        STREAM
        + """
gpu.spin(1_000_000_000, stream)  # the stream does not come to it, and the device has nothing to do
operation = ssd.read_async(buffer, 0, stream=stream.handle)
for call in (lambda: ssd.close(drain=0), buffer.close):
    try:
        call()
    except ugds.Error as error:
        print(errno.errorcode[error.errno], error.cause)
print(operation.result(30))
buffer.close()
ssd.close()
""",
        **fake,
    )
    device, registration, result, end = printed.split("\n")
    assert "in flight" not in device
    assert device.startswith("EBUSY ") and "1 operation is pending on a stream" in device
    assert registration.startswith("EBUSY in flight on the buffer: ")
    assert "pending on streams of emulated:16MiB" in registration
    assert (result, end) == ("65536", "")


@pytest.mark.parametrize("end", ["thread", "exception", "exit", "dropped"])
def test_operations_on_streams_outlive_who_made_them(fake: dict[str, str], end: str) -> None:
    body = {
        "thread": """
made = []
thread = threading.Thread(target=lambda: made.append(ssd.read_async(buffer, 0, stream=stream.handle)))
thread.start()
thread.join()
print(made[0].result(30))
""",
        "exception": """
try:
    with ssd.group(stream=stream.handle) as group:
        group.read(buffer, [0, 4096], 4096, [0, 4096])
        raise KeyError("in a group")
except KeyError as error:
    print(error, ssd.stats().streams["pending"])
""",
        "exit": """
ssd.read_async(buffer, 0, stream=stream.handle)
print("leaving", flush=True)
raise SystemExit
""",
        "dropped": """
ssd.read_async(buffer, 0, stream=stream.handle)
del buffer
gc.collect()
ugds.synchronize(stream.handle)
print("done")
""",
    }[end]
    closing = "" if end == "exit" else "\nssd.close()\n"
    printed = run(STREAM + body + closing, **fake)
    expected = {"thread": "65536", "exception": "'in a group' 0", "exit": "leaving", "dropped": "done"}
    assert printed == expected[end] + "\n"


def test_operations_and_groups_can_be_neither_pickled_nor_copied(fake: dict[str, str]) -> None:
    printed = run(
        STREAM
        + """
import copy, pickle
operation = ssd.read_async(buffer, 0, stream=stream.handle)
with ssd.group(stream=stream.handle) as group:
    for thing in (operation, group):
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            try:
                way(thing)
                print("worked")
            except TypeError as error:
                print(error)
operation.result(30)
buffer.close()
ssd.close()
""",
        **fake,
    )
    lines = printed.splitlines()
    assert [line.split(":")[0] for line in lines] == ["a StreamOp cannot be pickled or copied"] * 3 + [
        "a Group cannot be pickled or copied"
    ] * 3


def test_a_wedged_device_says_so_when_it_is_closed() -> None:
    ssd = ugds.open("emulated:1MiB?timeout=1", deadline=0.2, queues=1)
    emulator = ugds.testing.emulator(ssd)
    emulator.inject("hang", opcode=2, abortable=False)
    emulator.inject("never_stopped", count=100)
    emulator.inject("reset_fails", count=100)
    buffer = ugds.empty("4KiB")
    with pytest.raises(ugds.Error):
        ssd.read(buffer)
    refused(
        lambda: ssd.close(drain=0.1), "1 command is in flight on queue 1; it is wedged: the controller could not be"
    )
    refused(buffer.close, "1 command on queue 1 of emulated:1MiB")
    emulator.clear_faults()
    ssd.close()
    buffer.close()


def test_a_closed_registration_never_means_a_later_one_at_the_same_address(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB")
    memory = np.full(8192, 0x55, "u1")
    stale = ugds.register(memory[:4096])
    stale.close()
    with ugds.register(memory) as newer:
        assert (newer.address, newer.generation > stale.generation) == (stale.address, True)
        stale.close()  # does nothing
        for call in (lambda: ssd.read(stale), lambda: ssd.write(stale), lambda: ssd.read(stale, 1, 5)):
            with pytest.raises(ugds.Error) as caught:
                call()
            assert caught.value.errno == errno.ESTALE
        with ssd.batch() as batch, pytest.raises(ugds.Error):
            batch.read(stale, 0)
            batch.wait()
        with pytest.raises(ugds.Error):
            asyncio.run(ssd.aread(stale))
        assert not newer.closed and (memory == 0x55).all()
        assert ssd.read(newer) == 8192


def test_a_request_that_waits_for_room_never_uses_a_later_registration(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?latency=50ms&depth=4", queues=2)
    memory = np.full(8192, 0x55, "u1")
    with ugds.empty("4KiB") as first, ssd.batch(32) as batch:
        waits = ugds.register(memory[:4096])
        # Whoever submits waits until the device was given all of it.
        most = threading.Thread(target=lambda: batch.read(first, [0] * 16, 4096, [0] * 16))
        most.start()
        while batch.outstanding < 16:
            time.sleep(0.001)
        last = threading.Thread(target=lambda: batch.read(waits, 0, cookies=7))
        last.start()
        while batch.outstanding < 17:
            time.sleep(0.001)
        waits.close()  # no command of it is at the device
        with ugds.register(memory) as newer:
            assert newer.address == waits.address
            failed = batch.completed(17, timeout=20).errors
            assert [(one.cookie, one.error.errno) for one in failed if one.error] == [(7, errno.ESTALE)]
            assert (memory == 0x55).all()
        most.join()
        last.join()


# --- Exceptions, collection, threads ------------------------------------------------------------------------------


def test_an_exception_in_the_middle_leaves_nothing(open_ssd: OpenSsd) -> None:
    """Of nested blocks with requests in flight in each way: all of it is released, and the exception is what it was."""
    gc.collect()
    before = _core.open_registrations()  # type: ignore[attr-defined]
    ssd = open_ssd("emulated:1MiB?latency=100ms", queues=2)
    own = _core.open_registrations() - before  # type: ignore[attr-defined]

    async def awaits(buffer: ugds.Registration) -> None:
        tasks = [asyncio.ensure_future(ssd.aread(buffer)) for _ in range(4)]
        await asyncio.sleep(0)
        assert len(tasks) == 4
        raise KeyError("in an await")

    for number in range(3):
        with (
            pytest.raises(KeyError, match=("in a batch", "in an await", "outside")[number]),
            ugds.empty("64KiB") as buffer,
            ssd.batch(64) as batch,
        ):
            batch.read(buffer, np.arange(8) * 4096, 4096, np.arange(8) * 4096)
            if number == 0:
                raise KeyError("in a batch")
            if number == 1:
                asyncio.run(awaits(buffer))
            raise KeyError("outside")
        end = time.monotonic() + 10
        while ssd.stats().in_flight and time.monotonic() < end:
            time.sleep(0.01)
        del buffer, batch
        gc.collect()
        ugds.empty("4KiB").close()  # collects what was left in flight
        assert _core.open_registrations() - before == own  # type: ignore[attr-defined]
    assert ssd.state == "ready"


@pytest.mark.parametrize("way", ["read", "batch", "await"])
def test_a_thread_that_ends_leaves_its_requests_to_others(open_ssd: OpenSsd, way: str) -> None:
    ssd = open_ssd("emulated:1MiB?latency=100ms", queues=2)
    made: list[Any] = []
    with ugds.empty("64KiB") as buffer:

        def submits() -> None:
            if way == "read":
                inner = threading.Thread(target=ssd.read, args=(buffer,))
                inner.start()
                made.append(inner)
            elif way == "batch":
                batch = ssd.batch(8)
                batch.read(buffer, [0, 4096], 4096, [0, 4096])
                made.append(batch)
            else:
                # Its loop is closed with the request in flight.
                async def begins() -> None:
                    made.append(asyncio.ensure_future(ssd.aread(buffer)))
                    await asyncio.sleep(0)

                asyncio.run(begins())

        thread = threading.Thread(target=submits)
        thread.start()
        thread.join()
        if way == "read":
            made[0].join()
        elif way == "batch":
            assert made[0].wait().results.tolist() == [4096, 4096]
            made[0].close()
        else:
            assert made[0].cancelled()
        end = time.monotonic() + 10
        while ssd.stats().in_flight and time.monotonic() < end:
            time.sleep(0.01)
        assert ssd.stats().in_flight == 0
        assert ssd.read(buffer, size="4KiB") == 4096


def test_the_interpreter_ends_in_the_middle_of_everything() -> None:
    """Threads in reads, a batch, awaits: it ends soon and silently."""
    printed = run("""
ssd = ugds.open("emulated:1MiB?latency=2s", queues=2)
buffer = ugds.empty("64KiB")
def read():
    try:
        ssd.read(buffer)
    except ugds.Error:
        pass
threading.Thread(target=read, daemon=True).start()
batch = ssd.batch(8)
batch.read(buffer, [0, 4096], 4096, [0, 4096])
loop = asyncio.new_event_loop()
async def begins():
    for _ in range(3):
        task = asyncio.ensure_future(ssd.aread(buffer))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        tasks.append(task)
    await asyncio.sleep(0.1)
tasks = []
loop.run_until_complete(begins())
for task in tasks:
    task.cancel()
loop.run_until_complete(asyncio.sleep(0))
loop.close()
print("leaving", flush=True)
""")
    assert printed == "leaving\n"


# --- Forks --------------------------------------------------------------------------------------------------------


FORKED = """
warnings.simplefilter("ignore")
ssd = ugds.open("emulated:1MiB?latency=300ms", queues=2)
other = ugds.open("emulated:1MiB?name=shared-by-nobody")
memory = numpy.full(65536, 0x2A, "u1")
buffer = ugds.register(memory)
batch = ssd.batch(8)
emulator = ugds.testing.emulator(ssd)
folder = os.environ["UGDS_TEST_FOLDER"]
server = ugds.serve("emulated:1MiB", folder + "/s")
thread = threading.Thread(target=ssd.read, args=(buffer,))
thread.start()
while ssd.stats().in_flight == 0:
    time.sleep(0.001)
batch.read(buffer, 4096, 4096, 4096)

def child():
    wrong = []
    async def awaits(): await ssd.aread(buffer)
    calls = dict(
        read=lambda: ssd.read(buffer), write=lambda: ssd.write(buffer), part=lambda: ssd.read(buffer, 1, 5),
        flush=ssd.flush, discard=lambda: ssd.discard(0, 4096), capacity=lambda: ssd.capacity,
        block_size=lambda: ssd.block_size, info=lambda: ssd.info, stats=ssd.stats, batch=ssd.batch,
        aread=lambda: asyncio.run(awaits()), batch_read=lambda: batch.read(buffer, 0, 4096),
        batch_write=lambda: batch.write(buffer, 0, 4096), completed=lambda: batch.completed(timeout=5),
        wait=lambda: batch.wait(5), cancel=batch.cancel, trace=lambda: ssd.trace().__enter__(),
        emulator=lambda: ugds.testing.emulator(ssd), read_other=lambda: other.read(buffer))
    start = time.monotonic()
    for name, call in calls.items():
        try:
            call()
            wrong.append(name + " worked")
        except ugds.Error as error:
            if error.errno != errno.EBADF or "fork" not in str(error):
                wrong.append(f"{name}: {error!r}")
    # Releasing what is the parent's is harmless.
    for release in (ssd.close, batch.close, buffer.close, server.close):
        try:
            release()
        except ugds.Error as error:
            if "fork" not in str(error):
                wrong.append(f"release: {error!r}")
    if ssd.state != "closed" or time.monotonic() - start > 20:
        wrong.append((ssd.state, time.monotonic() - start))
    with ugds.open("emulated:1MiB") as mine, ugds.register(numpy.zeros(4096, "u1")) as again:
        if mine.write(again) != 4096 or mine.read(again) != 4096 or asyncio.run(mine.aread(again)) != 4096:
            wrong.append("its own does not work")
    return wrong

def in_process(queue):
    queue.put(child())
"""
PARENT = """
thread.join()
print(batch.wait(30).results.tolist(), ssd.read(buffer), (memory != 0x2A).all(), emulator.violations(), server.closed)
batch.close()
buffer.close()
ssd.close()
server.close()
"""


@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_every_call_of_a_child_says_that_it_is_one_and_the_parent_is_unharmed(how: str, tmp_path: Path) -> None:
    forks = {
        "os.fork": """
pid = os.fork()
if pid == 0:
    code = 1
    try:
        wrong = child()
        print(wrong, flush=True) if wrong else None
        code = 2 if wrong else 0
    finally:
        os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
        "multiprocessing": """
context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
process = context.Process(target=in_process, args=(queue,))
process.start()
wrong = queue.get()
process.join()
print(process.exitcode if not wrong else wrong)
""",
    }
    printed = run(FORKED + forks[how] + PARENT, UGDS_TEST_FOLDER=str(tmp_path))
    assert printed.split("\n") == ["0", "[4096] 65536 True [] False", ""]


# --- Pickling -----------------------------------------------------------------------------------------------------


def test_what_is_open_can_be_neither_pickled_nor_copied(ssd: ugds.Device, tmp_path: Path) -> None:
    with ugds.empty("4KiB") as buffer, ssd.batch() as batch, ugds.serve("emulated:1MiB", str(tmp_path / "s")) as server:
        things = {
            "Device": ssd,
            "Registration": buffer,
            "Batch": batch,
            "Emulator": ugds.testing.emulator(ssd),
            "Server": server,
        }
        for name, thing in things.items():
            for way in (pickle.dumps, copy.copy, copy.deepcopy, lambda one: pickle.dumps([one], protocol=2)):
                with pytest.raises(TypeError, match=f"{name} cannot be pickled or copied: ") as caught:
                    way(thing)
                assert len(str(caught.value).split(": ")[1]) > 20
