# SPDX-License-Identifier: Apache-2.0
"""Our client and our server in different processes: the same engine, and what becomes of either when the other dies."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ugds
from wedged import close_in_the_end

BLOCK = 4096


class Served:
    """`ugds serve` in a process of its own."""

    def __init__(self, uri: str, socket: Path) -> None:
        command = [sys.executable, "-m", "ugds", "serve", uri, "--socket", str(socket), "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.uri = f"vfio-user:{socket}"
        assert self.next_event()["event"] == "serving"

    def next_event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def mappings(self) -> int:
        return len(Path(f"/proc/{self.process.pid}/maps").read_text().splitlines())

    def close(self) -> None:
        ended = self.process.poll()
        if ended is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        status = self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert ended is not None or status == 0


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def start(uri: str = "emulated:64MiB") -> Served:
        servers.append(Served(uri, tmp_path / f"s{len(servers)}"))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize("traits", ["", "doorbells=trapped&shadow=0", "lba=512&mdts=1&shadow=0", "stride=2&queues=1"])
@pytest.mark.parametrize("interrupts", [False, True])
def test_bytes_are_what_was_written(serve: Callable[..., Served], traits: str, interrupts: bool) -> None:
    server = serve(f"emulated:64MiB?{traits}")
    generator = random.Random(1)
    model = bytearray(64 << 20)
    with ugds.open(server.uri, interrupts=interrupts) as ssd, ugds.empty("2MiB") as buffer:
        assert ssd.transport == "vfio-user"
        assert ssd.info.completion == ("interrupt" if interrupts else "polling")
        view = memoryview(buffer)
        for _ in range(60):
            size = generator.randrange(1, len(buffer) // BLOCK // (1 + generator.randrange(32)) + 1) * BLOCK
            offset = generator.randrange((len(model) - size) // BLOCK) * BLOCK
            if generator.random() < 0.5:
                view[:size] = generator.randbytes(size)
                assert ssd.write(buffer, offset, size) == size
                model[offset : offset + size] = view[:size]
            else:
                view[:size] = b"\xee" * size
                assert ssd.read(buffer, offset, size) == size
                assert view[:size] == model[offset : offset + size]
        view.release()
    assert server.next_event()["event"] == "connected"
    left = server.next_event()
    assert left["event"] == "disconnected"
    assert left["violations"] == []


def test_edges_of_unaligned_requests_are_right(serve: Callable[..., Served]) -> None:
    with ugds.open(serve().uri) as ssd, ugds.empty("1MiB") as buffer:
        view = memoryview(buffer)
        view[:] = random.Random(2).randbytes(len(view))
        ssd.write(buffer, 0)
        want = bytes(view[5001 : 5001 + 70001])
        view[:] = bytes(len(view))
        ssd.read(buffer, 5001, 70001, 17)
        assert view[17 : 17 + 70001] == want
        view.release()


def test_memory_without_a_descriptor_is_refused_or_left_out(serve: Callable[..., Served]) -> None:
    with ugds.open(serve().uri) as ssd:
        with pytest.raises(ugds.Error) as caught:
            ugds.register(bytearray(BLOCK))
        assert caught.value.errno == errno.EOPNOTSUPP
        assert "ugds.empty" in caught.value.hint
        # With another device that reaches it, it is registered for that one alone.
        with ugds.open("emulated:1MiB") as other, ugds.register(bytearray(BLOCK)) as buffer:
            assert other.read(buffer) == BLOCK
            with pytest.raises(ugds.Error) as caught:
                ssd.read(buffer)
            assert caught.value.errno == errno.ENXIO
            with pytest.raises(ugds.Error) as caught:
                ugds.register(bytearray(BLOCK), devices=[ssd, other])
            assert caught.value.errno == errno.EOPNOTSUPP


def test_a_buffer_from_before_the_opening_is_mapped_too(serve: Callable[..., Served]) -> None:
    with ugds.empty(BLOCK) as buffer, ugds.open(serve().uri) as ssd:
        memoryview(buffer)[:] = b"\x17" * BLOCK
        ssd.write(buffer, 8 * BLOCK)
        memoryview(buffer)[:] = bytes(BLOCK)
        ssd.read(buffer, 8 * BLOCK)
        assert bytes(memoryview(buffer)) == b"\x17" * BLOCK


def test_a_second_client_is_told_that_the_device_is_in_use(serve: Callable[..., Served]) -> None:
    server = serve()
    with ugds.open(server.uri), pytest.raises(ugds.Error) as caught:
        ugds.open(server.uri)
    assert caught.value.errno == errno.EBUSY


def work_for_ever(uri: str, seed: int) -> None:
    """Never returns: it is killed."""
    try:
        ssd = ugds.open(uri, queues=2, interrupts=seed % 2 == 0)
        buffers = [ugds.empty(256 << 10) for _ in range(2)]

        def run(buffer: ugds.Registration) -> None:
            for i in range(1 << 30):
                ssd.write(buffer, (i * 7 % 64) << 18)
                ssd.read(buffer, (i * 3 % 64) << 18)
                if i % 16 == 0:
                    with ugds.empty(BLOCK) as extra:
                        ssd.read(extra)

        threads = [threading.Thread(target=run, args=(buffer,), daemon=True) for buffer in buffers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os._exit(3)


def test_a_server_outlives_two_hundred_killed_clients(serve: Callable[..., Served]) -> None:
    server = serve()
    generator = random.Random(3)
    with ugds.open(server.uri) as ssd, ugds.empty(BLOCK) as buffer:
        memoryview(buffer)[:] = b"\x77" * BLOCK
        ssd.write(buffer, 48 << 20, durable=True)  # beyond what the others write to
    before = ()
    for client in range(200):
        process = os.fork()
        if process == 0:
            work_for_ever(server.uri, client)
        time.sleep(generator.random() ** 2 * 0.06)
        os.kill(process, signal.SIGKILL)
        assert os.waitpid(process, 0)[1] == signal.SIGKILL, "the client ended by itself"
        if client == 20:
            before = settled(server)
    with open_when_free(server.uri) as ssd, ugds.empty(BLOCK) as buffer:
        assert ssd.read(buffer, 48 << 20) == BLOCK
        assert bytes(memoryview(buffer)) == b"\x77" * BLOCK
        ssd.write(buffer, 0)
    descriptors, mappings = settled(server)
    assert descriptors <= before[0]
    assert mappings <= before[1] + 10
    assert server.process.poll() is None
    violations = []
    while (event := server.next_event())["event"] != "disconnected" or event["process"] != os.getpid():
        violations += event.get("violations", [])
    assert violations == []


def settled(server: Served) -> tuple[int, int]:
    """Descriptors and mappings of the server once it has let go of the last client."""
    open_when_free(server.uri).close()
    time.sleep(0.3)
    return server.descriptors(), server.mappings()


def open_when_free(uri: str) -> ugds.Device:
    """The server lets go of a killed client within a moment."""
    end = time.monotonic() + 10
    while True:
        try:
            return ugds.open(uri)
        except ugds.Error as error:
            if error.errno != errno.EBUSY or time.monotonic() > end:
                raise
        time.sleep(0.01)


def failing_read(ssd: ugds.Device, buffer: ugds.Registration) -> tuple[threading.Thread, list[ugds.Error]]:
    told: list[ugds.Error] = []

    def read() -> None:
        with pytest.raises(ugds.Error) as caught:
            while True:
                ssd.read(buffer)
        told.append(caught.value)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.2)
    return thread, told


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_read_ends_when_the_server_is_killed(serve: Callable[..., Served], interrupts: bool) -> None:
    server = serve("emulated:64MiB?latency=1ms")
    with ugds.open(server.uri, interrupts=interrupts) as ssd, ugds.empty(BLOCK) as buffer:
        thread, told = failing_read(ssd, buffer)
        server.process.kill()
        thread.join(10)
        assert not thread.is_alive()
        assert told[0].errno == errno.ENODEV
        assert ssd.state == "lost"
        with pytest.raises(ugds.Error) as caught:
            ssd.read(buffer)
        assert caught.value.errno == errno.ENODEV
    server.process.wait()


def test_what_a_stopped_server_may_still_write_to_stays_held(serve: Callable[..., Served]) -> None:
    server = serve("emulated:64MiB?latency=1ms")
    ssd, buffer = ugds.open(server.uri, deadline=0.5), ugds.empty(BLOCK)
    thread, told = failing_read(ssd, buffer)
    server.process.send_signal(signal.SIGSTOP)
    thread.join(30)
    assert not thread.is_alive()
    assert told[0].errno in (errno.ETIMEDOUT, errno.EIO)
    assert ssd.state == "wedged"
    with ugds.empty(BLOCK) as free, pytest.raises(ugds.Error) as caught:
        ssd.read(free)
    assert "its server does not answer" in caught.value.cause
    with pytest.raises(ugds.Error) as caught:
        buffer.close()
    assert caught.value.errno == errno.EBUSY
    with pytest.raises(ugds.Error) as caught:
        ssd.close(0.1)
    assert caught.value.errno == errno.EBUSY
    # Others are not held up by it.
    with ugds.open("emulated:1MiB") as other, ugds.empty(BLOCK) as another:
        assert other.read(another) == BLOCK
    # Once it runs again it notices, stops, and closes its end: then nothing is held any more.
    server.process.send_signal(signal.SIGCONT)
    close_in_the_end(ssd)
    buffer.close()


def test_a_child_of_a_fork_does_not_keep_the_connection(serve: Callable[..., Served]) -> None:
    server = serve()
    ssd = ugds.open(server.uri)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    ssd.close()
    with ugds.open(server.uri) as again, ugds.empty(BLOCK) as buffer:
        assert again.read(buffer) == BLOCK
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
