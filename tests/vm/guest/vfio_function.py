# SPDX-License-Identifier: Apache-2.0
"""A PCI function opened by vfio without uGDS: the peer device, whose memory is to be given to an SSD."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from pathlib import Path

from devices import PciDevice

_BASE = 0x3B64  # _IO(';', 100)
_CHECK_EXTENSION, _SET_IOMMU, _SET_CONTAINER, _GET_DEVICE_FD = _BASE + 1, _BASE + 2, _BASE + 4, _BASE + 6
_REGION_INFO, _RESET, _FEATURE, _BIND_IOMMUFD = _BASE + 8, _BASE + 11, _BASE + 17, _BASE + 18
_TYPE1V2 = 3
_FEATURE_GET, _FEATURE_DMA_BUF = 1 << 16, 11
CONFIG_REGION = 7


class VfioFunction:
    """One function, bound to vfio-pci: by an iommufd of its own, or as the only device of a type1 container."""

    def __init__(self, device: PciDevice, by_iommufd: bool) -> None:
        self._others: list[int] = []
        if by_iommufd:
            (node,) = (device.folder / "vfio-dev").iterdir()
            self.fd = os.open(Path("/dev/vfio/devices", node.name), os.O_RDWR)
            iommufd = os.open("/dev/iommu", os.O_RDWR)
            self._others.append(iommufd)
            fcntl.ioctl(self.fd, _BIND_IOMMUFD, bytearray(struct.pack("IIiI", 16, 0, iommufd, 0)))
        else:
            group = os.open(f"/dev/vfio/{device.group}", os.O_RDWR)
            container = os.open("/dev/vfio/vfio", os.O_RDWR)
            self._others += [group, container]
            fcntl.ioctl(group, _SET_CONTAINER, struct.pack("i", container))
            fcntl.ioctl(container, _SET_IOMMU, _TYPE1V2)
            self.fd = fcntl.ioctl(group, _GET_DEVICE_FD, bytearray(device.address.encode() + b"\0"))
        self._answer_to_memory()

    def region(self, index: int) -> tuple[int, int]:
        """Where a region lies in the descriptor, and its size."""
        info = bytearray(struct.pack("IIIIQQ", 32, 0, index, 0, 0, 0))
        fcntl.ioctl(self.fd, _REGION_INFO, info)
        _, _, _, _, size, offset = struct.unpack("IIIIQQ", info)
        return offset, size

    def _answer_to_memory(self) -> None:
        """Turns its memory space on (PCI 3.0, 6.2.2: bit 1 of the command register)."""
        offset, _ = self.region(CONFIG_REGION)
        command = int.from_bytes(os.pread(self.fd, 2, offset + 4), "little") | 2
        os.pwrite(self.fd, command.to_bytes(2, "little"), offset + 4)

    def map(self, index: int) -> mmap.mmap:
        offset, size = self.region(index)
        return mmap.mmap(self.fd, size, offset=offset)

    def dma_buf(self, index: int, *ranges: tuple[int, int]) -> int:
        """A descriptor of parts of a region, as other devices take it (VFIO_DEVICE_FEATURE_DMA_BUF)."""
        body = struct.pack("IIII", index, os.O_RDWR | os.O_CLOEXEC, 0, len(ranges))
        body += b"".join(struct.pack("QQ", *each) for each in ranges)
        head = struct.pack("II", 8 + len(body), _FEATURE_GET | _FEATURE_DMA_BUF)
        return int(fcntl.ioctl(self.fd, _FEATURE, bytearray(head + body)))

    def reset(self) -> None:
        fcntl.ioctl(self.fd, _RESET)

    def close(self) -> None:
        for fd in (self.fd, *self._others):
            if fd >= 0:
                os.close(fd)
        self.fd, self._others = -1, []

    def __enter__(self) -> VfioFunction:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
