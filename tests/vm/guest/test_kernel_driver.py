# SPDX-License-Identifier: Apache-2.0
"""uGDS and the kernel's own NVMe driver take turns on one controller, and read what the other wrote."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ugds
from devices import Controller, kernel_disks, read_direct, write_direct
from host import Host
from support import KIB, MIB, noise

Open = Callable[..., ugds.Device]
pytestmark = pytest.mark.boot("debian")
FILES = {"small": 100, "page": 4096, "odd": 70001, "large": 5 * MIB, "folder/below": 12345, "empty": 0}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def mounted(device: Path, at: Path, *options: str) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    run("mount", "-t", "ext4", *options, str(device), str(at))
    try:
        yield at
    finally:
        run("umount", str(at))


def fill(folder: Path) -> None:
    for seed, (name, size) in enumerate(FILES.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise(size, seed))


def check(folder: Path) -> None:
    for seed, (name, size) in enumerate(FILES.items()):
        assert (folder / name).read_bytes() == noise(size, seed), name


@pytest.mark.parametrize("ns", [1, 2])
def test_the_kernel_reads_what_ugds_wrote(open_ssd: Open, controllers: dict[str, Controller], ns: int) -> None:
    data = noise(3 * MIB, ns)
    with open_ssd("two", ns=ns) as ssd, ugds.empty(len(data)) as buffer:
        memoryview(buffer)[:] = data
        ssd.write(buffer, 5 * MIB, durable=True)
    with kernel_disks(controllers["two"]) as disks:
        assert read_direct(disks[ns - 1], 5 * MIB, len(data)) == data


@pytest.mark.parametrize("ns", [1, 2])
def test_ugds_reads_what_the_kernel_wrote(open_ssd: Open, controllers: dict[str, Controller], ns: int) -> None:
    data = noise(3 * MIB, 10 + ns)
    with kernel_disks(controllers["two"]) as disks:
        write_direct(disks[ns - 1], 9 * MIB, data)
    with open_ssd("two", ns=ns) as ssd, ugds.empty(len(data)) as buffer:
        ssd.read(buffer, 9 * MIB)
        assert bytes(memoryview(buffer)) == data


@pytest.mark.parametrize("name", ["two", "coarse"])
def test_a_file_system_written_by_ugds_is_clean_and_whole_to_the_kernel(
    open_ssd: Open, controllers: dict[str, Controller], tmp_path: Path, name: str
) -> None:
    source, image = tmp_path / "source", tmp_path / "image"
    source.mkdir()
    fill(source)
    block = controllers[name].namespace().block
    run("mkfs.ext4", "-q", "-b", "4096", "-d", str(source), str(image), "24M")
    data = image.read_bytes()
    with open_ssd(name) as ssd, ugds.empty(MIB) as buffer:
        assert ssd.block_size == block
        for offset in range(0, len(data), MIB):
            memoryview(buffer)[:] = data[offset : offset + MIB]
            ssd.write(buffer, offset)
        ssd.flush()
    with kernel_disks(controllers[name]) as disks:
        run("e2fsck", "-f", "-n", str(disks[0]))
        with mounted(disks[0], tmp_path / "mounted", "-o", "ro") as folder:
            check(folder)


def test_a_file_system_written_by_the_kernel_is_whole_to_ugds(
    open_ssd: Open, controllers: dict[str, Controller], tmp_path: Path, host: Host
) -> None:
    size = 24 * MIB
    with kernel_disks(controllers["two"]) as disks:
        run("mkfs.ext4", "-q", "-F", "-b", "4096", str(disks[0]), "24M")
        with mounted(disks[0], tmp_path / "mounted") as folder:
            fill(folder)
    image = tmp_path / "image"
    with open_ssd("two") as ssd, ugds.empty(4 * MIB) as buffer, image.open("wb") as file:
        for offset in range(0, size, 4 * MIB):
            ssd.read(buffer, offset)
            file.write(memoryview(buffer))
    assert image.read_bytes() == host.read_image("two1", 0, size)
    run("e2fsck", "-f", "-n", str(image))
    with mounted(image, tmp_path / "looped", "-o", "ro,loop") as folder:
        check(folder)


def test_drivers_can_change_many_times(open_ssd: Open, controllers: dict[str, Controller]) -> None:
    for turn in range(4):
        data = noise(64 * KIB, turn)
        with open_ssd("coarse") as ssd, ugds.empty(64 * KIB) as buffer:
            if turn:
                ssd.read(buffer, MIB)
                assert bytes(memoryview(buffer)) == noise(64 * KIB, 1000 + turn - 1)
            memoryview(buffer)[:] = data
            ssd.write(buffer, 0)
        with kernel_disks(controllers["coarse"]) as (disk,):
            assert read_direct(disk, 0, 64 * KIB) == data
            write_direct(disk, MIB, noise(64 * KIB, 1000 + turn))
