# SPDX-License-Identifier: Apache-2.0
"""What is on a disk, by the marks that file systems, partition tables and volume managers leave.

`blkid` knows far more than this file; what is here stands beside it where it is not installed, and where it looks less
closely: it finds no backup of a partition table whose first copy is gone. Nothing here depends on the block size but
the place of a GPT, which is looked for at both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Read = Callable[[int, int], bytes]  #: offset and length in bytes; short or empty outside of the disk


@dataclass(frozen=True)
class Mark:
    """Bytes at fixed places that tell what a disk holds. Names are those of blkid."""

    name: str
    magic: bytes
    offsets: tuple[int, ...]


_PAGES = (4096, 8192, 16384, 32768, 65536)  # of machines whose swap space has its mark at the end of the first
_ENDS = tuple(page - 10 for page in _PAGES)

MARKS = (
    Mark("ext", b"\x53\xef", (0x438,)),
    Mark("xfs", b"XFSB", (0,)),
    Mark("btrfs", b"_BHRfS_M", (0x10040,)),
    Mark("f2fs", b"\x10\x20\xf5\xf2", (0x400, 0x1400)),
    Mark("vfat", b"FAT32   ", (0x52,)),
    Mark("vfat", b"FAT16   ", (0x36,)),
    Mark("vfat", b"FAT12   ", (0x36,)),
    Mark("exfat", b"EXFAT   ", (3,)),
    Mark("ntfs", b"NTFS    ", (3,)),
    Mark("BitLocker", b"-FVE-FS-", (3,)),
    Mark("swap", b"SWAPSPACE2", _ENDS),
    Mark("swap", b"SWAP-SPACE", _ENDS),
    Mark("swsuspend", b"S1SUSPEND", _ENDS),
    Mark("swsuspend", b"LINHIB0001", _ENDS),
    Mark("linux_raid_member", b"\xfc\x4e\x2b\xa9", (0, 4096)),
    Mark("crypto_LUKS", b"LUKS\xba\xbe", (0,)),
    Mark("crypto_LUKS", b"SKUL\xba\xbe", tuple(0x4000 << n for n in range(9))),
    Mark("bcache", bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81"), (0x1018,)),
    Mark("bcachefs", bytes.fromhex("c68573f666ce90a9d96a60cf803df7ef"), (0x1018,)),
    Mark("stratis", b"!Stra0tis\x86\xff\x02^\x41rh", (0x204, 0x1204)),
    Mark("ceph_bluestore", b"bluestore block device", (0,)),
    Mark("DM_integrity", b"integrt", (0,)),
    Mark("DM_verity_hash", b"verity\0\0", (0,)),
    Mark("vdo", b"dmvdo001", (0,)),
    Mark("oracleasm", b"ORCLDISK", (32,)),
    Mark("apfs", b"NXSB", (32,)),
    Mark("jfs", b"JFS1", (0x8000,)),
    Mark("reiserfs", b"ReIsEr", (0x10034, 0x2034)),
    Mark("iso9660", b"CD001", (0x8001,)),
    Mark("squashfs", b"hsqs", (0,)),
    Mark("erofs", b"\xe2\xe1\xf5\xe0", (0x400,)),
    Mark("SPDK blobstore", b"SPDKBLOB", (0,)),
)

GPT = "GPT partition table"
GPT_BACKUP = "backup of a GPT partition table"
MBR = "MBR partition table"
PROTECTIVE = f"{MBR} (it protects a GPT)"
BOOT = "boot sector"


def _marks(read: Read) -> Iterator[str]:
    for mark in MARKS:
        if any(read(offset, len(mark.magic)) == mark.magic for offset in mark.offsets):
            yield mark.name


def _partition_tables(read: Read, size: int) -> Iterator[str]:
    if any(read(block, 8) == b"EFI PART" for block in (512, 4096)):
        yield GPT
    elif any(read(size - block, 8) == b"EFI PART" for block in (512, 4096) if size > block):
        yield GPT_BACKUP
    sector = read(0, 512)
    if sector[510:512] != b"\x55\xaa":
        return
    used = [sector[at : at + 16] for at in range(446, 510, 16) if any(sector[at : at + 16])]
    # A file system's boot sector has code where a partition table has entries.
    plausible = [entry for entry in used if entry[0] in (0, 0x80) and entry[4] != 0 and any(entry[12:16])]
    protective = any(entry[4] == 0xEE for entry in plausible)
    if plausible and len(plausible) == len(used):
        yield PROTECTIVE if protective else MBR
    else:
        yield BOOT


def _lvm(read: Read) -> Iterator[str]:
    for sector in range(4):
        label = read(sector * 512, 32)
        if label[:8] == b"LABELONE" and label[24:] == b"LVM2 001":
            yield "LVM2_member"


def _raid(read: Read, size: int) -> Iterator[str]:
    """Superblocks at the end: version 1.0 is at least 8 KiB before it, 0.90 in the last whole 64 KiB."""
    places = ((size // 512 - 16) & ~7) * 512, (size & ~0xFFFF) - 0x10000
    for place in places:
        if place >= 0 and read(place, 4) in (b"\xfc\x4e\x2b\xa9", b"\xa9\x2b\x4e\xfc"):
            yield "linux_raid_member"


def _zfs(read: Read, size: int) -> Iterator[str]:
    """Four labels of 256 KiB, two at either end, each with a ring of uberblocks in its second half."""
    label = 256 << 10
    end = size - size % label
    for start in (0, label, end - 2 * label, end - label):
        ring = read(start + label // 2, label // 2) if start >= 0 else b""
        for at in range(0, len(ring), 1024):
            if ring[at : at + 8] in (b"\x0c\xb1\xba\0\0\0\0\0", b"\0\0\0\0\0\xba\xb1\x0c"):
                yield "zfs_member"
                return


def find(fd: int, size: int) -> tuple[str, ...]:
    """What an open disk of `size` bytes holds. Raises OSError where it cannot be read."""

    def read(offset: int, length: int) -> bytes:
        if offset < 0 or offset >= size:
            return b""
        return os.pread(fd, min(length, size - offset), offset)

    names = [
        *_partition_tables(read, size),
        *_marks(read),
        *_lvm(read),
        *_raid(read, size),
        *_zfs(read, size),
    ]
    found = list(dict.fromkeys(names))
    if BOOT in found and len(found) > 1:  # it belongs to the file system
        found.remove(BOOT)
    return tuple(found)


# What blkid calls by a finer name, or by several.
_SAME = {"ext": ("ext2", "ext3", "ext4", "ext4dev", "jbd"), GPT_BACKUP: (GPT,)}


def merge(ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[str, ...]:
    """blkid's findings, then those of ours that it has no word for."""
    extra = [name for name in ours if name not in theirs and not any(s in theirs for s in _SAME.get(name, ()))]
    found = [*theirs, *extra]
    if GPT in found:  # blkid gives no MBR beside it, and takes what protects a GPT of other blocks for one
        found = [name for name in found if name != PROTECTIVE]
    return tuple(found)


def from_blkid(output: str) -> tuple[str, ...]:
    """The findings in what `blkid -p -o export` prints."""
    values = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    found = []
    table = values.get("PTTYPE")
    if table is not None:
        found.append({"gpt": GPT, "dos": MBR, "PMBR": PROTECTIVE}.get(table, f"{table} partition table"))
    if "TYPE" in values:
        found.append(values["TYPE"])
    return tuple(found)
