# SPDX-License-Identifier: Apache-2.0
"""Requests that an event loop awaits.

Each loop has one descriptor that it watches. A device's progress thread writes to it when something has ended, and the
loop then takes whatever has, and resolves the futures that wait for it. What a request needs stays referred to here
until it has ended, whether or not somebody still waits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ugds._core import Channel, Device, await_flush, await_forget, await_transfer

if TYPE_CHECKING:
    import asyncio


class _Loop:
    """What one event loop waits for. The loop keeps it, by the reader that it watches with, until the loop is
    closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.channel = Channel()
        self.waiting: dict[int, tuple[asyncio.Future[int], object]] = {}
        loop.add_reader(self.channel.fileno(), self.resolve)

    def resolve(self) -> None:
        for token, size, error in self.channel.take():
            future, _ = self.waiting.pop(token)
            if future.done():  # nobody waits any more
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(size)


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[_Loop]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _here() -> tuple[asyncio.AbstractEventLoop, _Loop]:
    import asyncio  # whoever has a running loop has it already; others need not wait for it

    loop = asyncio.get_running_loop()
    with _lock:
        known = _loops.get(loop)
        mine = known() if known is not None else None
        if mine is None:
            mine = _Loop(loop)
            _loops[loop] = weakref.ref(mine)
    return loop, mine


async def _run(device: Device, start: Callable[[Channel], int], held: object) -> int:
    from asyncio import CancelledError

    loop, mine = _here()
    future: asyncio.Future[int] = loop.create_future()
    token = start(mine.channel)
    mine.waiting[token] = (future, held)
    del mine, held, start
    try:
        return await future
    except CancelledError:
        if await_forget(device, token):  # the device was not given it
            _here()[1].waiting.pop(token, None)
        raise


async def aread(
    device: Device,
    buffer: Any,
    offset: int | str = 0,
    size: int | str | None = None,
    buffer_offset: int | str = 0,
) -> int:
    """Reads as `read` does, while the event loop goes on. Returns the bytes moved.

    Offset and size are whole blocks, and the memory begins at a multiple of 4 bytes; other requests raise EINVAL. Any
    number may be awaited at once, from any number of loops; those that the device cannot take yet wait in order. A task
    that is cancelled leaves its request running if the device was given it, and the buffer stays held until it has
    ended. Raises `ugds.Error` as `read` does. For a coroutine of a running event loop."""
    return await _run(
        device,
        lambda channel: await_transfer(device, channel, "read", buffer, offset, size, buffer_offset, False),
        buffer,
    )


async def awrite(
    device: Device,
    buffer: Any,
    offset: int | str = 0,
    size: int | str | None = None,
    buffer_offset: int | str = 0,
    *,
    durable: bool = False,
) -> int:
    """Writes as `write` does, while the event loop goes on (see `aread`). `durable=True`: on the medium when it has
    ended, else after `aflush()`."""
    return await _run(
        device,
        lambda channel: await_transfer(device, channel, "write", buffer, offset, size, buffer_offset, durable),
        buffer,
    )


async def aflush(device: Device) -> None:
    """Makes every completed write durable, while the event loop goes on. What is still awaited is not among those."""
    await _run(device, lambda channel: await_flush(device, channel), None)


def attach() -> None:
    """Gives the native class its coroutines."""
    cls: Any = Device
    cls.aread, cls.awrite, cls.aflush = aread, awrite, aflush
