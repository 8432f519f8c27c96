# SPDX-License-Identifier: Apache-2.0
"""Bringing controllers up, and moving bytes, each compared with what the host has in the disk's image."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import pytest
import support
import ugds
from devices import Controller
from host import Host
from support import KIB, MIB, Guarded, noise, sha, write_and_read

Open = Callable[..., ugds.Device]
pytestmark = pytest.mark.boot("iommufd", "debian", "noiommu")


@pytest.mark.parametrize("way", support.WAYS)
def test_a_controller_comes_up_says_what_it_is_and_goes_down(
    open_ssd: Open, controllers: dict[str, Controller], way: str
) -> None:
    two = controllers["two"]
    before = support.descriptors()
    with open_ssd("two", way) as ssd:
        info = ssd.info
        transport = "ugds_drv" if way == "ugds_drv" else "vfio"
        assert (info.transport, info.model, info.serial) == (transport, "QEMU NVMe Ctrl", "uGDS-two")
        assert (info.namespace, info.block_size, info.capacity) == (1, 512, 256 * MIB)
        assert info.max_transfer == 512 * KIB  # MDTS 7
        assert ssd.state == "ready"
        assert two.bus_master()
    assert ssd.state == "closed"
    assert not two.bus_master()
    # The watcher of removals keeps its own.
    assert [name for name in support.descriptors() if "eventfd" not in name] == before
    with open_ssd("two", way) as ssd:
        write_and_read(ssd, 0, 8192, seed=1)


@pytest.mark.parametrize("size", [4 * KIB, 64 * KIB, MIB, 16 * MIB])
@pytest.mark.parametrize("way", support.WAYS)
def test_bytes_are_the_hosts_both_ways(open_ssd: Open, host: Host, way: str, size: int) -> None:
    offset = 96 * MIB
    with open_ssd("two", way) as ssd, Guarded(size) as buffer:
        written, planted = noise(size, size), noise(size, size + 1)
        buffer.put(written)
        assert ssd.write(buffer.registration, offset, size, support.GUARD) == size
        assert host.hash_image("two1", offset, size) == sha(written)
        host.write_image("two1", offset, planted)
        assert ssd.read(buffer.registration, offset, size, support.GUARD) == size
        assert buffer.got() == planted


@pytest.mark.parametrize("size", [1, 511, 513, 4095, 4097, 64 * KIB + 512, MIB - 1])
@pytest.mark.boot("iommufd")
def test_odd_ranges_change_nothing_beside_them(open_ssd: Open, host: Host, size: int) -> None:
    offset, before = 3 * MIB + 7, noise(2 * MIB, 3)
    host.write_image("two1", 2 * MIB + 7, before)
    with open_ssd("two") as ssd, Guarded(size) as buffer:
        written = noise(size, 4)
        buffer.put(written)
        assert ssd.write(buffer.registration, offset, size, support.GUARD, unaligned=True) == size
        assert host.read_image("two1", 2 * MIB + 7, 2 * MIB) == before[:MIB] + written + before[MIB + size :]
        assert ssd.read(buffer.registration, offset - 3, size, support.GUARD) == size
        assert buffer.got() == (before[MIB - 3 : MIB] + written)[:size]


@pytest.mark.parametrize("shift", [4, 512, 2052, 4092])
@pytest.mark.boot("iommufd", "noiommu")
def test_a_buffer_may_begin_anywhere_in_a_page(open_ssd: Open, host: Host, shift: int) -> None:
    size, planted = 64 * KIB, noise(64 * KIB, shift)
    host.write_image("two1", MIB, planted)
    with open_ssd("two") as ssd, ugds.empty(size + 8 * KIB) as buffer:
        memory = memoryview(buffer)
        memory[:] = b"\xa5" * len(memory)
        assert ssd.read(buffer, MIB, size, shift) == size
        assert bytes(memory[shift : shift + size]) == planted
        assert set(memory[:shift]) == {0xA5} == set(memory[shift + size :])


@pytest.mark.parametrize(("name", "ns"), [("two", 2), ("coarse", 1)])
@pytest.mark.boot("iommufd", "debian")
def test_blocks_of_4096_bytes(open_ssd: Open, host: Host, name: str, ns: int) -> None:
    drive = f"{name}{ns}"
    with open_ssd(name, ns=ns) as ssd, Guarded(MIB) as buffer:
        assert (ssd.block_size, ssd.capacity) == (4096, 128 * MIB)
        written = noise(MIB, ns)
        buffer.put(written)
        assert ssd.write(buffer.registration, 4096, MIB, support.GUARD) == MIB
        assert host.hash_image(drive, 4096, MIB) == sha(written)
        assert ssd.write(buffer.registration, 4096 + 512, 512, support.GUARD, unaligned=True) == 512
        assert host.read_image(drive, 4096, 4096) == written[:512] + written[:512] + written[1024:4096]
        with pytest.raises(ugds.Error) as refused:
            ssd.write(buffer.registration, 512, 512, support.GUARD)
        assert refused.value.errno == errno.EINVAL
        assert "unaligned" in refused.value.hint


@pytest.mark.parametrize(("name", "chunk", "queues"), [("small", 8 * KIB, 1), ("coarse", 16 * KIB, 4)])
@pytest.mark.boot("iommufd")
def test_requests_are_cut_to_what_the_controller_takes(
    open_ssd: Open, host: Host, name: str, chunk: int, queues: int
) -> None:
    size, written = MIB + 4 * KIB, noise(MIB + 4 * KIB, 5)
    with open_ssd(name, queues=4) as ssd, Guarded(size) as buffer:
        assert (ssd.max_transfer, ssd.info.queues) == (chunk, queues)
        buffer.put(written)
        assert ssd.write(buffer.registration, 8 * KIB, size, support.GUARD) == size
        assert ssd.stats().commands == -(-size // chunk)
        assert host.hash_image(f"{name}1", 8 * KIB, size) == sha(written)
        buffer.put(bytes(size))
        assert ssd.read(buffer.registration, 8 * KIB, size, support.GUARD) == size
        assert buffer.got() == written


@pytest.mark.parametrize("depth", [2, 3, 64])
@pytest.mark.boot("iommufd")
def test_one_queue_of_any_depth_serves_many_threads(open_ssd: Open, host: Host, depth: int) -> None:
    with open_ssd("small", queues=1, depth=depth) as ssd, ugds.empty(8 * 64 * KIB) as buffer:
        assert (ssd.info.queues, ssd.info.depth) == (1, depth)
        data = noise(8 * 64 * KIB, depth)
        memoryview(buffer)[:] = data

        def work(number: int) -> None:
            for step in range(4):
                part = number * 64 * KIB + step * 16 * KIB
                ssd.write(buffer, part, 16 * KIB, part)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert host.hash_image("small1", 0, len(data)) == sha(data)
        assert ssd.stats().in_flight == 0


@pytest.mark.parametrize("way", support.WAYS)
def test_namespaces_do_not_bleed_into_each_other(open_ssd: Open, host: Host, way: str) -> None:
    sizes = {1: 256 * MIB, 2: 128 * MIB}
    data = {ns: noise(MIB, 100 + ns) for ns in sizes}
    for ns, size in sizes.items():
        with open_ssd("two", way, ns=ns) as ssd, ugds.empty(MIB) as buffer:
            assert (ssd.info.namespace, ssd.capacity) == (ns, size)
            memoryview(buffer)[:] = data[ns]
            for offset in (0, size - MIB):
                assert ssd.write(buffer, offset) == MIB
            with pytest.raises(ugds.Error) as beyond:
                ssd.write(buffer, size)
            assert beyond.value.errno == errno.ERANGE
    for ns, size in sizes.items():
        for offset in (0, size - MIB):
            assert host.hash_image(f"two{ns}", offset, MIB) == sha(data[ns])


@pytest.mark.boot("iommufd", "debian")
def test_a_namespace_that_is_not_there_is_named(open_ssd: Open) -> None:
    with pytest.raises(ugds.Error, match="3") as absent:
        open_ssd("two", ns=3)
    assert absent.value.errno in (errno.ENODEV, errno.EINVAL, errno.ENOENT)
    assert absent.value.hint


@pytest.mark.parametrize("way", support.IOMMU_WAYS)
def test_one_buffer_serves_two_controllers(open_ssd: Open, host: Host, way: str) -> None:
    with open_ssd("two", way) as first, ugds.empty(MIB) as buffer, open_ssd("coarse", way) as second:
        data = noise(MIB, 9)
        host.write_image("two1", 0, data)
        assert first.read(buffer, 0) == MIB
        assert second.write(buffer, 4 * MIB) == MIB
        assert host.hash_image("coarse1", 4 * MIB, MIB) == sha(data)


@pytest.mark.boot("iommufd")
def test_flush_and_discard_reach_the_image(open_ssd: Open, host: Host) -> None:
    with open_ssd("two") as ssd, ugds.empty(MIB) as buffer:
        memoryview(buffer)[:] = noise(MIB, 11)
        ssd.write(buffer, 0, durable=True)
        ssd.flush()
        ssd.discard(256 * KIB, 512 * KIB)
        image = host.read_image("two1", 0, MIB)
        memory = bytes(memoryview(buffer))
        assert image[: 256 * KIB] == memory[: 256 * KIB]
        assert image[768 * KIB :] == memory[768 * KIB :]
        assert image[256 * KIB : 768 * KIB] == bytes(512 * KIB)


@pytest.mark.parametrize("kind", ["bytearray", "a view into one", "huge"])
@pytest.mark.boot("iommufd", "noiommu")
def test_any_buffer_of_the_process_can_be_registered(open_ssd: Open, host: Host, kind: str) -> None:
    whole = bytearray(3 * MIB if kind == "huge" else 96 * KIB)
    memory = memoryview(whole)[12345 * 4 :][: 32 * KIB] if kind == "a view into one" else memoryview(whole)
    planted = noise(len(memory), 13)
    host.write_image("two1", 32 * MIB, planted)
    with open_ssd("two") as ssd, ugds.register(memory) as buffer:
        ssd.read(buffer, 32 * MIB)
        assert bytes(memory) == planted
    if kind == "a view into one":
        assert set(whole[: 12345 * 4]) == {0}


@pytest.mark.parametrize("way", support.WAYS)
def test_threads_on_many_queues_get_their_own_bytes(open_ssd: Open, host: Host, way: str) -> None:
    data = noise(4 * MIB, 17)
    host.write_image("two1", 0, data)
    wrong: list[int] = []
    with open_ssd("two", way, queues=4) as ssd, ugds.empty(4 * 64 * KIB) as buffer:
        assert ssd.info.queues == 4

        def work(number: int) -> None:
            mine = memoryview(buffer)[number * 64 * KIB :][: 64 * KIB]
            for step in range(16):
                offset = (number * 16 + step) * 64 * KIB
                ssd.read(buffer, offset, 64 * KIB, number * 64 * KIB)
                if mine != data[offset : offset + 64 * KIB]:
                    wrong.append(offset)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
