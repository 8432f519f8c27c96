# SPDX-License-Identifier: Apache-2.0
"""The library as a guest in a Python process: signals, forks, exits, locks, and what it leaves behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import ugds
import ugds.testing

OpenSsd = Callable[..., ugds.Device]

PRELUDE = """
import errno, gc, mmap, multiprocessing, os, signal, sys, threading, time
import numpy, ugds, ugds.testing
"""


def run(code: str, *options: str, timeout: float = 60) -> str:
    """Runs Python code in a process of its own, which must end well and silently; gives what it printed."""
    command = [sys.executable, "-X", "dev", "-W", "error", *options, "-c", PRELUDE + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_an_interrupt_ends_a_long_wait_and_the_buffer_stays_held() -> None:
    printed = run("""
ssd = ugds.open("emulated:1MiB?latency=1500ms", queues=1)
memory = numpy.full(4096, 0xC3, "u1")
buffer = ugds.register(memory)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    ssd.read(buffer)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - start < 1.2)
try:
    buffer.close()
except ugds.Error as error:
    print(errno.errorcode[error.errno])
while not buffer.closed and time.monotonic() - start < 10:
    try:
        buffer.close()
    except ugds.Error:
        time.sleep(0.05)
print(buffer.closed)
with ugds.empty("4KiB") as other:
    print(ssd.read(other))
buffer.close()
print(memory.any(), ssd.state, ugds.testing.emulator(ssd).violations())
ssd.close()
""")
    assert printed.split("\n") == ["interrupted True", "EBUSY", "True", "4096", "False ready []", ""]


@pytest.mark.parametrize(
    "other", ["threading.Thread(target=ssd.read, args=(other, 1, 10), daemon=True).start()", "once()"]
)
def test_an_interrupt_ends_a_wait_for_somebody_elses_partial_blocks(other: str) -> None:
    """They go through one buffer, which a device that hangs keeps for as long as the deadline."""
    printed = run(f"""
ssd = ugds.open("emulated:1MiB?lba=512", deadline=20, queues=1)
ugds.testing.emulator(ssd).inject("hang", opcode=2, count=2)
buffer, other = ugds.empty("4KiB"), ugds.empty("4KiB")
def once():
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        ssd.read(other, 1, 10)
    except KeyboardInterrupt:
        pass
{other}
time.sleep(0.3)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    ssd.read(buffer, 1, 10)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - start < 10)
sys.stdout.flush()
os._exit(0)
""")
    assert printed == "interrupted True\n"


def test_an_interrupt_leaves_a_with_block_as_what_it_is() -> None:
    """Not as the error of closing a buffer that is still held."""
    printed = run("""
ssd = ugds.open("emulated:1MiB?latency=1s", queues=1)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    with ugds.register(numpy.zeros(4096, "u1")) as buffer:
        ssd.read(buffer)
except KeyboardInterrupt:
    print("interrupted", buffer.closed)
time.sleep(1)
buffer.close()
print(buffer.closed)
ssd.close()
""")
    assert printed.split("\n") == ["interrupted False", "True", ""]


def test_an_interrupted_registration_that_is_dropped_keeps_its_memory_until_the_command_retires() -> None:
    printed = run("""
from ugds import _core
ssd = ugds.open("emulated:1MiB?latency=1s", queues=1)
before = _core.open_registrations()
buffer = ugds.empty("4KiB")
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    ssd.read(buffer)
except KeyboardInterrupt:
    del buffer
    gc.collect()
    print(_core.open_registrations() - before)
time.sleep(1)
with ugds.empty("4KiB") as other:
    ssd.read(other)
ugds.empty("4KiB").close()
print(_core.open_registrations() - before, ugds.testing.emulator(ssd).violations())
ssd.close()
""")
    assert printed.split("\n") == ["1", "0 []", ""]


def test_a_cycle_through_an_interrupted_registration_is_collected_when_the_command_has_retired() -> None:
    printed = run("""
import weakref
from ugds import _core
class Array(numpy.ndarray):
    pass
ssd = ugds.open("emulated:1MiB?latency=1s", queues=1)
before = _core.open_registrations()
memory = numpy.full(4096, 0xC3, "u1").view(Array)
memory.registration = ugds.register(memory)
alive = weakref.ref(memory)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    ssd.read(memory.registration)
except KeyboardInterrupt:
    pass
del memory
gc.collect()
print(_core.open_registrations() - before)
time.sleep(1)
with ugds.empty("4KiB") as other:
    ssd.read(other)
ugds.empty("4KiB").close()
gc.collect()
print(_core.open_registrations() - before, alive(), ugds.testing.emulator(ssd).violations())
ssd.close()
""")
    assert printed.split("\n") == ["1", "0 None []", ""]


@pytest.mark.parametrize("how", ["flush", "unaligned"])
def test_every_long_wait_can_be_interrupted(how: str) -> None:
    call = {"flush": "ssd.flush()", "unaligned": "ssd.read(buffer, 1, 100)"}[how]
    printed = run(f"""
ssd = ugds.open("emulated:1MiB", queues=1)
ugds.testing.emulator(ssd).inject("late", delay_ns=1_500_000_000)
buffer = ugds.empty("4KiB")
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - start < 1.2)
{call}
print(ssd.state, ugds.testing.emulator(ssd).violations())
buffer.close()
ssd.close()
""")
    assert printed.split("\n") == ["interrupted True", "ready []", ""]


CHILD = """
def child():
    said = []
    for call in (lambda: ssd.read(buffer), lambda: ssd.flush(), lambda: ssd.capacity, lambda: ssd.discard(0, 4096)):
        try:
            call()
            said.append("worked")
        except ugds.Error as error:
            said.append(errno.errorcode[error.errno] + ("" if "fork" in str(error) else " without a reason"))
    with ugds.open("emulated:1MiB") as mine, ugds.register(memory) as again:
        again_works = mine.write(again) == mine.read(again) == 4096
        quiet = ugds.testing.emulator(mine).violations() == []
    return said == ["EBADF"] * 4 and again_works and quiet or said
"""


def test_a_forked_child_is_told_so_and_can_open_its_own() -> None:
    printed = run(
        """
ssd = ugds.open("emulated:1MiB")
memory = numpy.full(4096, 0x2A, "u1")
buffer = ugds.register(memory)
ssd.write(buffer)
"""
        + CHILD
        + """
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    code = 1
    try:
        said = child()
        code = 0 if said is True else 2
        print(said, flush=True) if code else None
    finally:
        os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
memory[:] = 0
print(ssd.read(buffer), (memory == 0x2A).all(), ugds.testing.emulator(ssd).violations())
buffer.close()
ssd.close()
"""
    )
    assert printed.split("\n") == ["0", "4096 True []", ""]


def test_children_of_multiprocessing_end_well_while_the_parent_works() -> None:
    printed = run(
        """
ssd = ugds.open("emulated:1MiB")
memory = numpy.full(4096, 0x2A, "u1")
buffer = ugds.register(memory)
ours = ugds.empty("64KiB")
stop = threading.Event()
def work():
    with ugds.empty("64KiB") as mine:
        while not stop.is_set():
            ssd.read(mine)
thread = threading.Thread(target=work)
thread.start()
"""
        + CHILD
        + """
context = multiprocessing.get_context("fork")
children = [context.Process(target=lambda: sys.exit(0 if child() is True else 3)) for _ in range(4)]
for process in children: process.start()
for process in children: process.join(30)
print([process.exitcode for process in children])
stop.set()
thread.join()
print(ssd.read(buffer), ugds.testing.emulator(ssd).violations())
buffer.close()
ours.close()
ssd.close()
""",
        "-W",
        "ignore::DeprecationWarning",
    )
    assert printed.split("\n") == ["[0, 0, 0, 0]", "4096 []", ""]


def test_dropping_what_a_fork_left_behind_takes_no_memory_of_the_childs() -> None:
    """Memory of ours is not inherited: where it was, the child may have something else by then."""
    printed = run("""
buffer = ugds.empty("8MiB")
address, size = buffer.address, 8 << 20
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    code = 1
    try:
        import ctypes
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        # MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE: the place is free.
        got = libc.mmap(address, size, 3, 0x2 | 0x20 | 0x100000, -1, 0)
        assert got == address, got
        view = (ctypes.c_char * size).from_address(address)
        view[0] = view[size - 1] = b"x"
        del buffer
        gc.collect()
        code = 0 if (view[0], view[size - 1]) == (b"x", b"x") else 2
    finally:
        os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""")
    assert printed == "0\n"


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(0)",
        "threading.Thread(target=forever, daemon=True).start(); time.sleep(0.2)",
        "threading.Thread(target=ssd.read, args=(slow,), daemon=True).start(); time.sleep(0.1)",
        "del ssd",
        "del buffer, slow",
        "sys.modules['keep'] = (ssd, buffer)",
        "ugds.testing.emulator(ssd).remove()",
    ],
)
def test_the_interpreter_ends_silently_with_everything_open(end: str) -> None:
    """KvikIO 497/159."""
    run(f"""
ssd = ugds.open("emulated:1MiB?latency=20ms")
second = ugds.open("emulated:1MiB")
buffer, slow = ugds.register(numpy.zeros(4096, "u1")), ugds.empty("64KiB")
ssd.read(buffer)
def forever():
    try:
        while True:
            second.read(buffer)
            ssd.read(buffer)
    except ugds.Error:
        pass  # closed under it
{end}
""")


@pytest.mark.parametrize("seed", range(4))
def test_the_interpreter_ends_silently_under_threads_that_go_on(seed: int) -> None:
    """They are daemons, and find a device that is closed and an interpreter that ends, wherever they are."""
    for turn in range(5):
        code = f"""
import asyncio, logging, random
choose = random.Random({seed * 10 + turn})
logging.basicConfig(stream=open(os.devnull, "w"), level=logging.DEBUG)
ssd = ugds.open("emulated:4MiB?lba=512&timeout=1", deadline=0.05, queues=3, retry=choose.choice([0, 2]))
emulator = ugds.testing.emulator(ssd)
def on(body):
    def run():
        while True:
            try:
                body()
            except ugds.Error:
                pass
    threading.Thread(target=run, daemon=True).start()
def read():
    with ugds.empty("64KiB") as buffer:
        while True:
            ssd.read(buffer, choose.choice([0, 1]), 50000)
def batch():
    buffer, at = ugds.empty("64KiB"), numpy.arange(60) * 512
    with ssd.batch(64) as made:
        made.read(buffer, at, 512, at)
        made.completed(60, timeout=0.01)
def fail():
    emulator.inject(choose.choice(["fatal", "hang", "status", "unknown_id"]), opcode=2, abortable=False)
    time.sleep(0.01)
def wait():
    async def all_of_them():
        buffers = [ugds.empty("4KiB") for _ in range(8)]
        while not ssd.closed:
            await asyncio.gather(*(ssd.aread(buffer) for buffer in buffers), return_exceptions=True)
    asyncio.run(all_of_them())
for body in (read, read, batch, fail, wait):
    on(body)
time.sleep(choose.random() * 0.4)
"""
        assert run(code) == ""


def test_other_threads_run_while_a_request_waits(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?latency=400ms")
    counts = []
    with ugds.empty("4KiB") as buffer:
        thread = threading.Thread(target=ssd.read, args=(buffer,))
        thread.start()
        while thread.is_alive():
            counts.append(time.monotonic())
            time.sleep(0.001)
        thread.join()
    assert len(counts) > 40


def test_what_is_open_cannot_be_pickled(ssd: ugds.Device) -> None:
    with ugds.empty("4KiB") as buffer:
        with pytest.raises(TypeError, match="open its URI in the other process"):
            pickle.dumps(ssd)
        with pytest.raises(TypeError, match="memory of this process"):
            pickle.dumps(buffer)


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("query", ["pump=caller", pytest.param("shadow=1", marks=pytest.mark.slow)])
def test_a_thousand_openings_leave_nothing(query: str) -> None:
    """SGLang 21078: opened and closed are counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ugds.open(f"emulated:1MiB?{query}", queues=1), ugds.empty("4KiB"):
            pass
        before, maps = held(), len(open_maps())
        for _ in range(1000):
            with ugds.open(f"emulated:1MiB?{query}", queues=1, depth=4) as ssd, ugds.empty("4KiB") as buffer:
                ssd.read(buffer)
        end = time.monotonic() + 5
        while held() != before and time.monotonic() < end:  # a thread that has ended is seen for a moment
            time.sleep(0.01)
        assert held() == before
        assert len(open_maps()) < maps + 30


def open_maps() -> list[str]:
    with open("/proc/self/maps") as file:
        return file.readlines()


def test_more_devices_than_there_is_room_for_are_refused_in_words() -> None:
    printed = run("""
devices = []
try:
    while len(devices) <= 64:
        devices.append(ugds.open("emulated:1MiB?pump=caller", queues=1, depth=2))
except ugds.Error as error:
    print(len(devices), errno.errorcode[error.errno], "64 devices are open" in str(error))
for device in devices:
    device.close()
with ugds.open("emulated:1MiB") as ssd:
    print(ssd.state)
""")
    assert printed == "64 EMFILE True\nready\n"
