# SPDX-License-Identifier: Apache-2.0
"""`--baseline`: the same measurements on files, by fio, and on other devices, beside the device's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import records, run
from ugds._report import CommandError
from ugds.bench import fio, targets
from ugds.bench.fio import FileTarget
from ugds.bench.load import Load

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
QUICK = ("--device", "emulated:64MiB", "--sizes", "4KiB", "--threads", "1", "--seconds", "0.05")


def target(what: str, overwrite: bool = False) -> FileTarget:
    made = targets.parse(what, overwrite)
    assert isinstance(made, FileTarget)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """With data of somebody's."""
    path = tmp_path / "kept"
    path.write_bytes(b"precious" * (8 << 20))
    return path


# --- Records ------------------------------------------------------------------------------------------------------


@needs_fio
def test_baselines_stand_beside_the_device_with_the_same_parameters(tmp_path: Path) -> None:
    what = [f"posix:{tmp_path}/made?size=64MiB", f"io_uring:{tmp_path}/made?depth=4", "emulated:64MiB?pump=caller"]
    options = [word for one in what for word in ("--baseline", one)]
    *points, ratio = records(run("bench", "sync", *QUICK, "--mode", "mixed", *options, "--json"))
    assert [(p["device"], p["params"].pop("baseline", None)) for p in points] == [
        ("emulated:64MiB", None),
        (what[0], "posix"),
        (what[1], "io_uring"),
        (what[2], "ugds"),
    ]
    for point in points:
        assert (point["name"], point["params"]) == ("sync", {"mode": "mixed", "size": 4096, "threads": 1})
        assert list(point["figures"]) == list(points[0]["figures"])
        assert all(figure["value"] > 0 for figure in point["figures"].values())
        assert point["memory"] == "host"
    assert "ratio_to_memcpy" in ratio["figures"]
    assert list(tmp_path.iterdir()) == [], "what was made for the measurement is removed after it"


@needs_fio
def test_mixed_has_baselines_too(tmp_path: Path) -> None:
    options = ("--read-percent", "50", "--baseline", f"posix:{tmp_path}/made?size=64MiB", "--processes", "1")
    ours, theirs = records(run("bench", "mixed", *QUICK, *options, "--json"))
    assert theirs["params"] == {**ours["params"], "baseline": "posix"}
    assert list(theirs["figures"]) == list(ours["figures"])
    both = [theirs["figures"][f"{kind}_gib_per_s"]["value"] for kind in ("read", "write")]
    assert both[0] == pytest.approx(both[1], rel=0.5)


@needs_fio
def test_the_table_has_baselines_beside_the_device(tmp_path: Path) -> None:
    what = f"posix:{tmp_path}/made?size=64MiB"
    text = run("bench", "mixed", *QUICK, "--baseline", what).stdout
    lines = [line.split("│")[0].strip() for line in text.splitlines() if "│" in line]
    assert lines == ["emulated", "posix"]
    # Longer lines are folded.
    said = "".join(text.split())
    assert f"posix:{what},memoryhost,transportfile,route" in said
    assert "notthespeedofanSSD" in said
    assert "doesnotsay" in said or "donotsay" in said


@needs_fio
@pytest.mark.parametrize("kind", ["posix", "io_uring"])
@pytest.mark.parametrize("percent", [100, 0, 30])
def test_a_load_on_a_file_is_what_was_asked_for(kind: str, percent: int, tmp_path: Path) -> None:
    with target(f"{kind}:{tmp_path}/made?size=64MiB") as made:
        result = made.load(Load(percent, 16 << 10, 2, 0.2))
    assert (result.reads is None, result.writes is None) == (percent == 0, percent == 100)
    assert result.every.gib_per_s == pytest.approx(result.every.requests_per_s * (16 << 10) / (1 << 30), rel=0.05)
    assert 0 < result.every.p50_us <= result.every.p99_us
    if percent == 30:
        assert result.reads is not None and result.writes is not None
        both = result.reads.requests_per_s + result.writes.requests_per_s
        assert result.every.requests_per_s == pytest.approx(both, rel=0.05)
        assert result.reads.requests_per_s / both == pytest.approx(0.3, abs=0.1)


@needs_fio
def test_a_path_may_hold_what_fio_reads_as_its_own(tmp_path: Path) -> None:
    with target(f"posix:{tmp_path}/a:b,%20c?size=64MiB") as made:
        assert made.path.name == "a:b, c"
        assert made.load(Load(100, 4096, 1, 0.05)).every.requests_per_s > 0


@needs_fio
def test_a_file_system_in_memory_is_buffered_and_says_so(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or fio.file_system(memory) != "tmpfs" or shutil.disk_usage(memory).free < 128 << 20:
        pytest.skip("/dev/shm is no tmpfs with room")
    with target(f"posix:{memory}/{tmp_path.name}-ugds?size=64MiB") as made:
        assert made.route == "buffered"
        assert made.load(Load(100, 4096, 1, 0.05)).route == "buffered"
    assert not made.path.exists()


@needs_fio
def test_the_route_of_a_file_is_what_the_file_system_takes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    real = fio.run

    def note(options: Any, what: str, seconds: float) -> dict[str, Any]:
        given.append(list(options))
        return real(options, what, seconds)

    monkeypatch.setattr(fio, "run", note)
    with target(f"posix:{file}") as kept:
        if kept.route == "direct":
            kept.load(Load(100, 4096, 1, 0.02))
            assert "--direct=1" in given[-1]
    monkeypatch.setattr(fio, "_takes_direct", lambda path: False)
    with target(f"posix:{file}") as kept:
        assert kept.load(Load(100, 4096, 1, 0.02)).route == "buffered"
        assert "--direct=0" in given[-1]


# --- Files that are made, and files that are there ------------------------------------------------------------------


@needs_fio
def test_a_file_that_is_there_is_read_and_left_as_it_was(file: Path) -> None:
    *_, theirs, _ = records(run("bench", "sync", *QUICK, "--baseline", f"posix:{file}", "--json"))
    assert theirs["figures"]["gib_per_s"]["value"] > 0
    assert file.read_bytes() == b"precious" * (8 << 20)


@needs_fio
@pytest.mark.parametrize("command", [["sync", "--mode", "write"], ["sync", "--mode", "mixed"], ["mixed"]])
def test_a_file_that_is_there_is_not_written_unasked(command: list[str], file: Path) -> None:
    message = run("bench", *command, *QUICK, "--baseline", f"io_uring:{file}", status=2).stderr
    assert str(file) in message
    assert "--overwrite" in message
    assert file.read_bytes() == b"precious" * (8 << 20)


@needs_fio
def test_a_file_that_is_there_is_written_where_that_is_allowed_and_keeps_its_length(file: Path) -> None:
    with target(f"posix:{file}", overwrite=True) as kept:
        kept.load(Load(0, 4096, 1, 0.05))
    assert file.stat().st_size == 64 << 20
    assert file.read_bytes() != b"precious" * (8 << 20)


@needs_fio
def test_batches_do_not_write_a_file_that_is_there_unasked(file: Path) -> None:
    with target(f"posix:{file}") as kept, pytest.raises(CommandError, match="--overwrite"):
        kept.batches("write", 4096, 8, 1 << 20)
    assert file.read_bytes() == b"precious" * (8 << 20)


@needs_fio
def test_a_made_file_holds_bytes_and_no_holes(tmp_path: Path) -> None:
    with target(f"posix:{tmp_path}/made?size=65MiB") as made:
        there = made.path.stat()
        assert there.st_size == 65 << 20
        assert there.st_blocks * 512 >= there.st_size
        assert there.st_mode & 0o777 == 0o600
    assert not made.path.exists()


@needs_fio
def test_only_what_was_made_is_removed(tmp_path: Path) -> None:
    with target(f"posix:{tmp_path}/made?size=64MiB") as made:
        made.path.unlink()
        made.path.write_text("somebody's")
    assert made.path.read_text() == "somebody's"


@needs_fio
def test_a_file_that_appears_meanwhile_is_not_taken_for_ours(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fio.os.path, "lexists", lambda path: False)
    with pytest.raises(CommandError, match="File exists"), target(f"posix:{file}"):
        pass
    assert file.read_bytes() == b"precious" * (8 << 20)


@needs_fio
def test_a_link_to_nothing_is_not_followed_to_make_a_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    message = run("bench", "sync", *QUICK, "--baseline", f"posix:{tmp_path}/link", status=2).stderr
    assert "No such file" in message
    assert not (tmp_path / "elsewhere").exists()


# --- Refusals -----------------------------------------------------------------------------------------------------


@needs_fio
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("posix:", "name a file"),
        ("posix", "name a file"),
        ("posix:{folder}/x?depth=2", "depth"),
        ("io_uring:{folder}/x?depth=0", "depth"),
        ("io_uring:{folder}/x?size=many", "many"),
        ("io_uring:{folder}/x?sise=1GiB", "sise"),
        ("posix:{folder}", "regular file"),
        ("posix:{folder}/x?size=1MiB", "less than 64 MiB"),
        ("pci:0000:65:00.0", "--overwrite"),
        ("emulated:{folder}/image", "--overwrite"),
    ],
)
def test_what_is_no_baseline_is_one_readable_message(what: str, words: str, tmp_path: Path) -> None:
    named = what.format(folder=tmp_path)
    message = run("bench", "sync", *QUICK, "--baseline", named, status=2).stderr
    assert words in message
    assert list(tmp_path.iterdir()) == []


@needs_fio
@pytest.mark.parametrize(
    ("what", "words"), [("posix:{folder}/no/x", "No such file"), ("posix:{folder}/x?size=1000000TiB", "are free")]
)
def test_a_file_that_cannot_be_made_says_why(what: str, words: str, tmp_path: Path) -> None:
    named = what.format(folder=tmp_path)
    assert words in run("bench", "mixed", *QUICK, "--baseline", named, status=1).stderr
    assert list(tmp_path.iterdir()) == []


def test_without_fio_it_says_what_to_install_and_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    options = ("--baseline", f"posix:{tmp_path}/made")
    message = run("bench", "sync", *QUICK, *options, status=1, PATH=str(tmp_path / "empty")).stderr
    assert "apt-get install fio" in message
    assert not (tmp_path / "made").exists()


def test_a_fio_that_fails_is_quoted(file: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "fio"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'fio: engine io_uring not loadable' >&2\nexit 1\n")
    program.chmod(0o755)
    options = ("--baseline", f"io_uring:{file}")
    message = run("bench", "sync", *QUICK, *options, status=1, PATH=f"{program.parent}:/usr/bin:/bin").stderr
    assert "engine io_uring not loadable" in message
    assert "kernel.io_uring_disabled" in message
