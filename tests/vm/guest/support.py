# SPDX-License-Identifier: Apache-2.0
"""What several files of tests use: ways to open, bytes to write, memory with guards, and children."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import ugds

KIB, MIB = 1 << 10, 1 << 20
GUARD = 4096

#: How a controller is opened, each way in the machines that have it.
WAYS = [
    pytest.param("iommufd", marks=pytest.mark.boot("iommufd")),
    pytest.param("type1", marks=pytest.mark.boot("iommufd", "debian")),
    pytest.param("none", marks=pytest.mark.boot("noiommu")),
    pytest.param("ugds_drv", marks=pytest.mark.boot("iommufd", "debian", "noiommu")),
]
#: The same for what only vfio has with an IOMMU.
IOMMU_WAYS = WAYS[:2]
#: For what a kernel that checks itself should see too.
CHECKED_WAYS = [
    pytest.param("iommufd", marks=pytest.mark.boot("iommufd", "debug")),
    pytest.param("type1", marks=pytest.mark.boot("debian", "debug")),
    pytest.param("ugds_drv", marks=pytest.mark.boot("iommufd", "debian", "debug")),
]


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def sha(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


class Guarded:
    """Registered memory with poison before and behind: `check` fails when a transfer strayed."""

    def __init__(self, size: int, fill: int = 0xA5) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, size + 2 * GUARD)
        self.poison = bytes([fill]) * GUARD
        self.memory[:GUARD] = self.memory[GUARD + size :] = self.poison
        self.registration = ugds.register(self.memory)

    def put(self, data: bytes) -> None:
        self.memory[GUARD : GUARD + len(data)] = data

    def got(self) -> bytes:
        return self.memory[GUARD : GUARD + self.size]

    def check(self) -> None:
        assert self.memory[:GUARD] == self.poison, "something before the buffer was overwritten"
        assert self.memory[GUARD + self.size :] == self.poison, "something behind the buffer was overwritten"

    def close(self) -> None:
        self.check()
        self.registration.close()

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def write_and_read(ssd: ugds.Device, offset: int, size: int, seed: int) -> None:
    """One round through the device alone, to see that it works."""
    data = noise(size, seed)
    with ugds.empty(size) as out, ugds.empty(size) as back:
        memoryview(out)[:] = data
        assert ssd.write(out, offset) == size
        assert ssd.read(back, offset) == size
        assert bytes(memoryview(back)) == data


def child(program: str, *arguments: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Another Python that runs `program`; its first line of output says that it got where it should."""
    command = [*prefix, sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_child(program: str, *arguments: str, prefix: Sequence[str] = (), seconds: float = 60) -> tuple[int, str]:
    """The exit status and the output of one that ends by itself."""
    process = child(program, *arguments, prefix=prefix)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"the child did not end within {seconds:.0f} s:\n{output}") from None
    return process.returncode, output


def descriptors() -> list[str]:
    """What this process has open of vfio, IOMMUs, ugds_drv and eventfds."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:  # the descriptor by which the folder was read
            continue
        if any(word in target for word in ("vfio", "iommu", "ugds_drv", "eventfd", "dmabuf")):
            found.append(target)
    return sorted(found)


#: Without CAP_IPC_LOCK the limit of locked memory counts, for root too.
WITHOUT_LOCK_PRIVILEGE = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")
