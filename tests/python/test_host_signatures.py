# SPDX-License-Identifier: Apache-2.0
"""What is on a disk: real images by the tools that make them where those are installed, and the bare marks."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from host_machine import Machine
from ugds.host import nvme, signatures, usage

PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))
SIZE = 64 << 20


def ours(path: Path) -> tuple[str, ...]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return signatures.find(fd, os.lseek(fd, 0, os.SEEK_END))
    finally:
        os.close(fd)


def image(tmp_path: Path, size: int = SIZE, **at: bytes) -> Path:
    """A sparse image with bytes at places: at_512=b"…"; a negative place counts from the end."""
    path = tmp_path / "image"
    with path.open("wb") as out:
        out.truncate(size)
        for place, data in at.items():
            offset = int(place.removeprefix("at_").replace("end_", "-"))
            out.seek(offset if offset >= 0 else size + offset)
            out.write(data)
    return path


def make(path: Path, *command: str, given: str | None = None) -> None:
    tool = shutil.which(command[0], path=PATH)
    if tool is None:
        pytest.skip(f"{command[0]} is not installed")
    words = [word.replace("IMAGE", str(path)) for word in command[1:]]
    done = subprocess.run([tool, *words], input=given, capture_output=True, text=True, env={**os.environ, "PATH": PATH})
    assert done.returncode == 0, done.stdout + done.stderr


TOOLS = [
    (("mkfs.ext4", "-q", "-F", "IMAGE"), None, "ext"),
    (("mkfs.ext2", "-q", "-F", "-b", "1024", "IMAGE"), None, "ext"),
    (("mkfs.xfs", "-q", "-f", "IMAGE"), None, "xfs"),
    (("mkfs.xfs", "-q", "-f", "-s", "size=4096", "IMAGE"), None, "xfs"),
    (("mkfs.btrfs", "-q", "IMAGE"), None, "btrfs"),
    (("mkfs.f2fs", "-q", "IMAGE"), None, "f2fs"),
    (("mkfs.vfat", "-F", "32", "IMAGE"), None, "vfat"),
    (("mkfs.vfat", "-F", "16", "-S", "4096", "IMAGE"), None, "vfat"),
    (("mkfs.vfat", "-F", "12", "IMAGE"), None, "vfat"),
    (("mkfs.exfat", "IMAGE"), None, "exfat"),
    (("mkntfs", "-q", "-F", "-s", "512", "-p", "0", "-H", "255", "-S", "63", "IMAGE"), None, "ntfs"),
    (("mkswap", "IMAGE"), None, "swap"),
    (("mkswap", "-p", "65536", "IMAGE"), None, "swap"),
    (("sfdisk", "-q", "IMAGE"), "label: gpt\n,\n", signatures.GPT),
    (("fdisk", "-b", "4096", "IMAGE"), "g\nw\n", signatures.GPT),
    (("sfdisk", "-q", "IMAGE"), "label: dos\n,\n", signatures.MBR),
    (("parted", "-s", "IMAGE", "mklabel", "gpt"), None, signatures.GPT),
    (("parted", "-s", "IMAGE", "mklabel", "msdos", "mkpart", "primary", "1MiB", "100%"), None, signatures.MBR),
    (
        ("cryptsetup", "luksFormat", "-q", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "IMAGE"),
        "word",
        "crypto_LUKS",
    ),
]


@pytest.mark.parametrize(
    ("command", "given", "name"), TOOLS, ids=[f"{i}-{tool[0]}" for i, (tool, _, _) in enumerate(TOOLS)]
)
def test_what_the_tools_make_is_known(tmp_path: Path, command: tuple[str, ...], given: str | None, name: str) -> None:
    size = 300 << 20 if command[0] in ("mkfs.xfs", "mkfs.btrfs") else 8 << 20 if "12" in command else SIZE
    path = image(tmp_path, size)
    make(path, *command, given=given)
    assert name in ours(path)


MARKS = [
    ("ext", {"at_1080": b"\x53\xef"}),
    ("xfs", {"at_0": b"XFSB"}),
    ("btrfs", {"at_65600": b"_BHRfS_M"}),
    ("f2fs", {"at_1024": b"\x10\x20\xf5\xf2"}),
    ("vfat", {"at_82": b"FAT32   "}),
    ("vfat", {"at_54": b"FAT16   "}),
    ("exfat", {"at_3": b"EXFAT   "}),
    ("ntfs", {"at_3": b"NTFS    "}),
    ("swap", {"at_4086": b"SWAPSPACE2"}),
    ("swap", {"at_65526": b"SWAPSPACE2"}),
    ("LVM2_member", {"at_512": b"LABELONE" + bytes(16) + b"LVM2 001"}),
    ("linux_raid_member", {"at_0": struct.pack("<I", 0xA92B4EFC)}),
    ("linux_raid_member", {"at_4096": struct.pack("<I", 0xA92B4EFC)}),
    ("linux_raid_member", {"end_8192": struct.pack("<I", 0xA92B4EFC)}),
    ("linux_raid_member", {"end_65536": struct.pack("<I", 0xA92B4EFC)}),
    ("linux_raid_member", {"end_65536": struct.pack(">I", 0xA92B4EFC)}),
    ("crypto_LUKS", {"at_0": b"LUKS\xba\xbe\0\2"}),
    ("crypto_LUKS", {"at_16384": b"SKUL\xba\xbe\0\2"}),
    ("bcache", {"at_4120": bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81")}),
    ("zfs_member", {"at_139264": struct.pack("<Q", 0x00BAB10C)}),
    ("zfs_member", {"end_130048": struct.pack(">Q", 0x00BAB10C)}),
    (signatures.GPT, {"at_512": b"EFI PART"}),
    (signatures.GPT, {"at_4096": b"EFI PART"}),
    (signatures.GPT_BACKUP, {"end_512": b"EFI PART"}),
    (signatures.GPT_BACKUP, {"end_4096": b"EFI PART"}),
    (signatures.MBR, {"at_446": b"\x80\0\0\0\x83\0\0\0\0\x08\0\0\0\0\1\0", "at_510": b"\x55\xaa"}),
    (signatures.BOOT, {"at_510": b"\x55\xaa"}),
    (signatures.BOOT, {"at_446": b"\x91\x17\xf3\xf4" * 16, "at_510": b"\x55\xaa"}),
]


@pytest.mark.parametrize(("name", "at"), MARKS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(MARKS)])
def test_a_bare_mark_is_known_alone(tmp_path: Path, name: str, at: dict[str, bytes]) -> None:
    assert ours(image(tmp_path, 16 << 20, **at)) == (name,)


@pytest.mark.parametrize("size", [512, 4096, 65536, 1 << 20])
def test_a_blank_disk_of_any_size_holds_nothing(tmp_path: Path, size: int) -> None:
    assert ours(image(tmp_path, size)) == ()


def test_random_data_holds_nothing_known(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(bytes(range(256)) * 8192)
    assert ours(path) == ()


def test_several_marks_are_all_told(tmp_path: Path) -> None:
    path = image(tmp_path, at_0=b"XFSB", at_512=b"EFI PART", at_1080=b"\x53\xef")
    assert ours(path) == (signatures.GPT, "ext", "xfs")


# --- With blkid ------------------------------------------------------------------------------------------------------


def contents(machine: Machine, path: Path) -> usage.Contents:
    disk = machine.disk(machine.ssd(), "nvme0n1", minor=7)
    node = machine.dev / "nvme0n1"
    node.unlink()
    node.symlink_to(path)
    return usage.contents(machine, nvme.disk_at(disk))


def need_blkid() -> None:
    if shutil.which("blkid", path=PATH) is None:
        pytest.skip("blkid is not installed")


def test_blkid_tells_the_kind_of_an_ext_file_system_once(machine: Machine, tmp_path: Path) -> None:
    need_blkid()
    path = image(tmp_path)
    make(path, "mkfs.ext4", "-q", "-F", "IMAGE")
    assert contents(machine, path).found == ("ext4",)


@pytest.mark.parametrize("sector", ["512", "4096"])
def test_a_gpt_is_told_once_whatever_the_block_size(machine: Machine, tmp_path: Path, sector: str) -> None:
    need_blkid()
    path = image(tmp_path)
    make(path, "fdisk", "-b", sector, "IMAGE", given="g\nw\n")
    assert contents(machine, path).found == (signatures.GPT,)


def test_a_gpt_whose_first_copy_was_overwritten_is_still_found(machine: Machine, tmp_path: Path) -> None:
    path = image(tmp_path)
    make(path, "sfdisk", "-q", "IMAGE", given="label: gpt\n,\n")
    with path.open("r+b") as disk:
        disk.write(bytes(1 << 20))
    assert contents(machine, path).found == (signatures.GPT_BACKUP,)


def test_two_file_systems_that_contradict_each_other_are_told(machine: Machine, tmp_path: Path) -> None:
    need_blkid()
    path = image(tmp_path, 300 << 20)
    make(path, "mkfs.ext4", "-q", "-F", "IMAGE")
    make(path, "mkswap", "IMAGE")
    with path.open("r+b") as disk:
        disk.write(b"XFSB")
        disk.seek(0x438)
        disk.write(b"\x53\xef")
    assert {"ext", "swap"} <= {name.rstrip("234") for name in contents(machine, path).found}


def test_without_blkid_our_own_look_remains(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ugds.host.roots._ADMIN_PATH", str(tmp_path))
    assert contents(machine, image(tmp_path, at_0=b"XFSB")).found == ("xfs",)


def test_a_blkid_that_does_not_answer_leaves_it_unknown(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(command: list[str], seconds: float) -> None:
        raise TimeoutError(110, f"no answer within {seconds:.0f} s", command[0])

    monkeypatch.setattr(machine, "program", slow)
    assert "no answer within 30 s" in contents(machine, image(tmp_path)).problem
