# SPDX-License-Identifier: Apache-2.0
"""uGDS moves data between NVMe SSDs and GPU memory under user-space control.

    import numpy, ugds

    with ugds.open("emulated:1GiB") as ssd, ugds.register(numpy.zeros(1 << 20, "u1")) as buffer:
        ssd.write(buffer, offset=0)  # the whole buffer, to the device's first MiB
        ssd.read(buffer, offset=0, size="64KiB", buffer_offset=4096)
        print(ssd.info, ssd.stats(), sep="\\n")

`open(uri, mode=None, *, namespace=0, queues=0, depth=0, deadline=30.0, interrupts=None, retry=None,
create=False, direct=None)` gives a `Device`;
0 takes what the device offers, `deadline` is the time in seconds after which a command is aborted, with
`interrupts=True` waits sleep until the device interrupts, `retry` is how often a read or write that a reset of the
controller ended is submitted again (docs/failures.md), and `mode` is what the device is to be good at: one of
`modes()`, or of your own by `register_mode(name, factory)` (see `ugds.mode`). The same URIs work here, in C and on the
command line: `emulated:1GiB?lba=4096` is a controller in this process (`ugds info --parameters` lists what can be set).

`register(buffer, devices=None, require=None)` pins a buffer once and maps it to every open device, and to later ones
when they are opened. A buffer is any object with the buffer protocol, or GPU memory of torch, CuPy, JAX or Numba. Its
`Registration` says `memory` (host, cuda, hip, peer) and `route` (direct, staged, buffered); `require="direct"` fails
with the reason where that cannot be had.
`empty(size)` gives new, registered, page-aligned and zeroed memory that every transport can reach;
`register_dmabuf(fd, size)` takes another device's memory, which the SSD then reaches peer to peer.

`Device.read(buffer, offset=0, size=None, buffer_offset=0)` and `write(…, durable=False, unaligned=False)` move `size`
bytes between the device, from byte `offset`, and the registered buffer, from its byte `buffer_offset`; without
`size`, to the end of the buffer. They return the bytes moved, release the interpreter's lock while they wait, and may
be called from any number of threads. `flush()` makes what was written durable; `discard(offset, size)` gives blocks
back. `priority="background"` puts a request behind every other.

`with ssd.batch(depth=128) as batch:` has many requests in flight: `batch.read(buffer, offsets, sizes, buffer_offsets)`
and `batch.write(…)` take arrays, `for done in batch.completed(min=1, timeout=0.5)` gives what has ended, as it comes,
and `batch.wait()` all of it; an error that nobody looked at is raised when the block ends. `await ssd.aread(buffer,
offset)`, `awrite` and `aflush` are for event loops of asyncio.

`ssd.read_async(buffer, offset, stream=stream)` and `write_async` are ordered on a GPU's stream: what is enqueued there
next runs after them, and nobody waits. `with ssd.group(stream) as g:` orders many requests as one. Their `result()`, or
`synchronize(stream)`, raises what went wrong (docs/gpu.md).

`serve(uri, socket, *, mode=0o600)` lets other processes drive an emulated device, through a UNIX socket and by the
vfio-user protocol, until the `Server` that it gives is closed.

Sizes and offsets are in bytes: an int, or a text such as "64MiB" (see `ugds.sizes`). What fails raises `ugds.Error`,
an `OSError` with `operation`, `device`, `offset`, `length`, `completed` (the prefix, in bytes, that is right),
`status` (NVMe status, or None), `status_text`, `cause` and `hint`.

What goes wrong with a device is logged by Python's `logging`, as "ugds": a line of JSON each, and `record.ugds` the
same as a dict (docs/failures.md); `ugds doctor --last-fault` on the command line prints the last.

`ugds.safetensors.load_file(path, device="cuda")`, `save_file` and others read safetensors files straight into tensors,
and write them; `ugds.torch` moves PyTorch's storages and checkpoints to and from files; `ugds.fastsafetensors` is a
copier for that package (docs/pytorch.md).

`devices()` gives the NVMe controllers of this machine, and `ugds.host` moves them between the kernel and a program.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ugds import _aio, _batch, _device, sizes
from ugds import _log as _log  # so that no opening waits for it
from ugds._batch import Done
from ugds._core import (
    Batch,
    Completions,
    Device,
    Error,
    Group,
    Registration,
    Server,
    StreamOp,
    empty,
    modes,
    open,
    register,
    register_dmabuf,
    register_mode,
    serve,
    synchronize,
    version,
)
from ugds._device import DeviceInfo, Stats

if TYPE_CHECKING:
    from ugds import host
    from ugds.host import Controller

_device.attach()
_batch.attach()
_aio.attach()

__version__ = version()


def devices() -> list[Controller]:
    """Every NVMe controller of this machine, by address (see `ugds.host.devices`)."""
    from ugds import host

    return host.devices()


def __getattr__(name: str) -> Any:
    # What looks at the machine, and what needs another package, is loaded by those who ask for it: opening a device
    # needs none of it.
    if name in ("fastsafetensors", "host", "safetensors", "torch"):
        return importlib.import_module(f"ugds.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Batch",
    "Completions",
    "Device",
    "DeviceInfo",
    "Done",
    "Error",
    "Group",
    "Registration",
    "Server",
    "Stats",
    "StreamOp",
    "devices",
    "empty",
    "host",
    "modes",
    "open",
    "register",
    "register_dmabuf",
    "register_mode",
    "serve",
    "sizes",
    "synchronize",
    "version",
]
