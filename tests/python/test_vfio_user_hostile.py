# SPDX-License-Identifier: Apache-2.0
"""Servers that begin well and then misbehave: the client keeps what they may still write to, and goes on living."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ugds
from vfio_user_proxy import DMA_MAP, HEADER, REGION_INFO, REGION_READ, SET_IRQS, Change, Proxy, refusal
from wedged import close_in_the_end

BLOCK = 4096


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Callable[..., tuple[str, ugds.Server]]]:
    """Starts a server with a proxy before it: `behind(change, traits)`."""
    proxies: list[Proxy] = []
    servers: list[ugds.Server] = []

    def start(change: Change, traits: str = "") -> tuple[str, ugds.Server]:
        servers.append(ugds.serve(f"emulated:16MiB{traits}", str(tmp_path / f"server{len(servers)}")))
        proxies.append(Proxy(tmp_path / f"proxy{len(proxies)}", tmp_path / f"server{len(proxies)}", change))
        return proxies[-1].uri, servers[-1]

    start.proxies = proxies  # type: ignore[attr-defined]
    yield start
    for proxy in proxies:
        proxy.close()
    for server in servers:
        server.close()


def test_a_reply_that_makes_no_sense_is_not_taken_for_a_device_that_has_gone(
    behind: Callable[..., tuple[str, ugds.Server]],
) -> None:
    lies = threading.Event()

    def change(number: int, command: int, reply: bytes, descriptors: list[int]) -> bytes | None:
        if not lies.is_set() or command != REGION_READ:
            return reply
        return HEADER.pack(number + 1, command, len(reply), 1, 0) + reply[HEADER.size :]

    uri, server = behind(change)
    ssd, buffer = ugds.open(uri, deadline=5), ugds.empty(BLOCK)
    server.emulator.inject("late_write")  # from now on it writes to the buffer until it is stopped
    lies.set()
    with pytest.raises(ugds.Error) as caught:
        ssd.read(buffer)
    assert caught.value.errno == errno.EIO
    assert ssd.state == "wedged"
    with pytest.raises(ugds.Error) as caught:
        buffer.close()
    assert caught.value.errno == errno.EBUSY
    server.close()
    behind.proxies[0].close()  # type: ignore[attr-defined]  # what the end of the server's connection is here
    close_in_the_end(ssd)
    buffer.close()


def test_doorbells_that_are_not_all_there_are_not_mapped(
    behind: Callable[..., tuple[str, ugds.Server]],
) -> None:
    def change(number: int, command: int, reply: bytes, descriptors: list[int]) -> bytes | None:
        if command == REGION_INFO and descriptors:
            os.close(descriptors.pop())
            short = os.memfd_create("short")
            os.truncate(short, 16)
            descriptors.append(short)
        return reply

    uri, _ = behind(change, "?shadow=0")
    with ugds.open(uri) as ssd, ugds.empty(BLOCK) as buffer:
        for _ in range(20):
            assert ssd.read(buffer) == BLOCK  # by messages


def test_interrupts_that_cannot_be_ended_do_not_end_the_process(
    behind: Callable[..., tuple[str, ugds.Server]],
) -> None:
    seen: list[int] = []

    def change(number: int, command: int, reply: bytes, descriptors: list[int]) -> bytes | None:
        if command == SET_IRQS:
            seen.append(command)
            if len(seen) > 2:
                return refusal(number, command, errno.EINVAL)
        return reply

    uri, _ = behind(change)
    with ugds.open(uri, interrupts=True) as ssd, ugds.empty(BLOCK) as buffer:
        assert ssd.info.completion == "interrupt"
        assert ssd.read(buffer) == BLOCK
    assert len(seen) > 2


def test_interrupts_that_are_refused_leave_polling_and_say_so(
    behind: Callable[..., tuple[str, ugds.Server]],
) -> None:
    def change(number: int, command: int, reply: bytes, descriptors: list[int]) -> bytes | None:
        return refusal(number, command, errno.ENOSPC) if command == SET_IRQS else reply

    uri, _ = behind(change)
    with ugds.open(uri, interrupts=True) as ssd, ugds.empty(BLOCK) as buffer:
        assert ssd.info.completion.startswith("polling: the server did not set the interrupts")
        assert ssd.read(buffer) == BLOCK


def test_a_reply_that_trickles_in_holds_up_others_for_some_seconds_at_most(
    behind: Callable[..., tuple[str, ugds.Server]],
) -> None:
    trickling = threading.Event()
    proxies: list[Proxy] = []

    def change(number: int, command: int, reply: bytes, descriptors: list[int]) -> bytes | None:
        if not trickling.is_set() or command != DMA_MAP:
            return reply
        client = proxies[0].client
        assert client is not None
        client.sendall(HEADER.pack(number, command, 60000, 1, 0))
        for _ in range(40):
            time.sleep(1)
            client.sendall(b"x")
        return None

    uri, _ = behind(change)
    proxies.extend(behind.proxies)  # type: ignore[attr-defined]
    ssd = ugds.open(uri)
    trickling.set()
    start = time.monotonic()
    with ugds.open("emulated:1MiB") as other, ugds.empty(BLOCK) as buffer:
        assert time.monotonic() - start < 8
        assert other.read(buffer) == BLOCK
    close_in_the_end(ssd)
