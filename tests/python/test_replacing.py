# SPDX-License-Identifier: Apache-2.0
"""What saving replaces, and what it must leave alone: other kinds of files, owners, and names at their longest. Of
loading: what is no regular file."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ugds
from ugds._load import files, transfer
from ugds._load.files import Source
from ugds.safetensors import load_file, save_file

TENSORS = {"a": np.arange(5000)}
IS_ROOT = os.geteuid() == 0


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def device_at(path: Path) -> None:
    if not IS_ROOT:
        pytest.skip("only root makes devices")
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))


OTHERS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "socket": socket_at,
    "device": device_at,
    "directory": os.mkdir,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    return tmp_path


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("by_link", [False, True])
def test_only_files_are_replaced(folder: Path, kind: str, by_link: bool) -> None:
    other, link = Path("other"), Path("link")
    OTHERS[kind](other)
    link.symlink_to("other")
    before = other.lstat()
    with pytest.raises(OSError, match="director" if kind == "directory" else "has to be a regular file"):
        save_file(TENSORS, link if by_link else other)
    assert (other.lstat().st_mode, other.lstat().st_ino) == (before.st_mode, before.st_ino)
    assert sorted(os.listdir(folder)) == ["link", "other"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_file_is_on_the_disk_before_its_name_and_then_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    told: list[str] = []
    fsync, replace, opened = os.fsync, os.replace, files.opened

    def note_fsync(fd: int) -> None:
        fsync(fd)
        told.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"file of {os.fstat(fd).st_size}")

    def note_replace(*names: str) -> None:
        replace(*names)
        told.append("name")

    def note_opened(fd: int, direct: str, path: str) -> Any:
        told.append(f"direct={direct}")
        return opened(fd, direct, path)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(files, "opened", note_opened)
    save_file(TENSORS, tmp_path / "file", durable=durable)
    size = (tmp_path / "file").stat().st_size
    assert told == (["direct=auto", f"file of {size}", "name", "folder"] if durable else ["direct=off", "name"])


def test_a_file_that_another_cuts_while_it_is_saved_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = transfer.write

    def cut(*given: Any) -> None:
        write(*given)
        os.truncate(next(tmp_path.glob(".*.part")), 100)

    save_file({}, tmp_path / "file")
    monkeypatch.setattr(transfer, "write", cut)
    with pytest.raises(ugds.Error, match="it has 100 bytes in place of"):
        save_file(TENSORS, tmp_path / "file")
    assert load_file(tmp_path / "file", framework="np") == {}
    assert os.listdir(tmp_path) == ["file"]


def test_a_name_that_ends_with_a_slash_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        save_file(TENSORS, f"{tmp_path}/file/")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a" * 255, "€" * 85, "x" + "€" * 84])
def test_a_name_may_be_as_long_as_names_may_be(tmp_path: Path, name: str) -> None:
    save_file(TENSORS, tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    assert (load_file(tmp_path / name, framework="np")["a"] == TENSORS["a"]).all()


@pytest.mark.skipif(not IS_ROOT, reason="only root gives files away")
def test_a_file_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.chown(path, 1234, 2345)
    path.chmod(0o640)
    save_file(TENSORS, path)
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 2345, 0o640)


def test_what_a_group_was_allowed_is_for_no_other_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    path = tmp_path / "file"
    path.touch()
    path.chmod(0o664)
    if IS_ROOT:
        os.chown(path, -1, 2345)
    else:
        pytest.skip("only root makes a file of another's group")
    monkeypatch.setattr(os, "fchown", refuse)
    save_file(TENSORS, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert path.stat().st_gid != 2345


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_file_is_not_waited_for(folder: Path, kind: str) -> None:
    """Nobody writes to the pipe."""
    OTHERS[kind](Path("other"))
    caught: list[BaseException] = []

    def load() -> None:
        try:
            load_file("other", framework="np")
        except OSError as error:
            caught.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert len(caught) == 1


def test_a_file_is_read_by_waiting(tmp_path: Path) -> None:
    """Its descriptor is the kernel's to wait on: where it cannot be opened once more, requests go by it."""
    save_file(TENSORS, tmp_path / "file")
    with Source(tmp_path / "file") as source:
        assert os.get_blocking(source.fd)
