# SPDX-License-Identifier: Apache-2.0
"""`ugds bench cufile`: two libraries side by side. There is no GPU here, and no library of NVIDIA's: the driver is made
of host memory, and our own library under another path stands for theirs. What is measured is not judged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import records, run
from ugds._report import CommandError, Record
from ugds.bench import _cufile_process, _udev, bars, cufile
from ugds.bench._cufile_process import Process, Stuck, find_theirs, ours

FAKE = os.environ.get("FAKE_CUDA_LIBRARY", "")
KIB, MIB = 1 << 10, 1 << 20
needs_fake = pytest.mark.skipif(not FAKE, reason="FAKE_CUDA_LIBRARY does not name the driver without a GPU")


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "nvidia" / "cu13" / "lib" / "libcufile.so.0"
    path.parent.mkdir(parents=True)
    shutil.copy(ours(), path)
    return path


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_makes_nothing(tmp_path: Path) -> None:
    done = run("bench", "cufile", "--file", tmp_path, status=2, UGDS_CUDA_LIBRARY="/nowhere/libcuda.so.1")
    assert done.stdout == ""
    cause, remedy = done.stderr.splitlines()
    assert "GPU" in cause and "/nowhere/libcuda.so.1" in cause
    assert remedy.startswith("  what to do: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--library", "/nowhere/libcufile.so.0"], "/nowhere/libcufile.so.0 is no file"),
        (["--sizes", "64MiB"], "16MiB is the largest"),
        (["--gpu", "x"], "--gpu"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], said: str) -> None:
    assert said in run("bench", "cufile", *options, status=2).stderr


@needs_fake
def test_a_file_that_is_no_libcufile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UGDS_CUDA_LIBRARY", FAKE)
    no_library = tmp_path / "libcufile.so.0"
    no_library.write_text("nothing of the kind")
    with pytest.raises(CommandError, match=f"{no_library} cannot be used") as raised:
        Process(no_library, 0)
    assert raised.value.status == 2


def test_nvidias_library_is_found_in_pythons_packages(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cufile_process.site, "getsitepackages", lambda: [str(stand_in.parents[3])])
    assert find_theirs(None) == stand_in
    assert find_theirs(sys.executable) == Path(sys.executable).resolve()


# --- The entry of udev ------------------------------------------------------------------------------------------------


def test_an_entry_of_udev_is_made_for_the_run_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(_udev, "_place", lambda path: ((254, 3), "ext4"))
    database = tmp_path / "run" / "udev" / "data"
    with _udev.entry(file, database) as said:
        made = database / "b254:3"
        assert made.read_text() == "E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n"
        assert str(made) in said and "removed at the end" in said
    assert list(tmp_path.iterdir()) == [file]


def test_an_entry_that_is_there_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_udev, "_place", lambda path: ((254, 3), "ext4"))
    there = tmp_path / "b254:3"
    there.write_text("E:ID_FS_TYPE=xfs\n")
    with _udev.entry(tmp_path, tmp_path) as said:
        assert said == f"{there} is there"
    assert there.read_text() == "E:ID_FS_TYPE=xfs\n"


def test_where_no_entry_can_be_made_it_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_udev, "_place", lambda path: ((254, 3), "ext4"))
    no_folder = tmp_path / "file"
    no_folder.touch()
    with _udev.entry(tmp_path, no_folder / "data") as said:
        assert "cannot be made" in said and "run this as root" in said
    monkeypatch.setattr(_udev, "_place", lambda path: ((0, 40), "tmpfs"))
    with _udev.entry(tmp_path, tmp_path / "data") as said:
        assert "tmpfs" in said
    assert list(tmp_path.iterdir()) == [no_folder]


# --- A process with a library -----------------------------------------------------------------------------------------


@pytest.fixture
def process(tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Process, str]]:
    """One with the stand-in, and a file of 2 MiB that it has registered, with 1 MiB of memory."""
    monkeypatch.setenv("UGDS_CUDA_LIBRARY", FAKE)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2 * MIB))
    made = Process(stand_in, 0)
    try:
        assert made.hello["version"] == 1150
        assert made.ask("open")["ms"] > 0
        assert made.ask("prepare", paths=[str(path)], nbytes=MIB, direct=False)["ms"] > 0
        yield made, str(path)
    finally:
        made.kill()


@needs_fake
def test_every_way_moves_the_files_bytes(process: tuple[Process, str]) -> None:
    it, path = process
    about: dict[str, Any] = {"path": path, "size": 64 * KIB, "span": 2 * MIB}
    for write in (False, True):
        before = Path(path).read_bytes()
        answer = it.ask("sync", count=16, write=write, **about)
        assert (answer["wrong"], answer["seconds"] > 0) == (0, True)
        assert (Path(path).read_bytes() != before) is write
    for fixed in (True, False):
        answer = it.ask("stream", count=24, fixed=fixed, **about)
        assert answer["wrong"] == 0
        assert 0 < answer["inside"] <= answer["seconds"]
    # Each has a place of its own in memory, since they run at once.
    answer = it.ask("batch", count=16, batches=2, limit=20, **{**about, "span": MIB // 2})
    assert (answer["wrong"], answer["done"]) == (0, 16)


@needs_fake
def test_what_a_library_refuses_is_an_answer_and_an_error_where_it_must_not(process: tuple[Process, str]) -> None:
    it, path = process
    beyond: dict[str, Any] = {"path": path, "size": MIB, "count": 3, "span": 3 * MIB}  # the file ends before
    assert "cuFileRead gave" in it.ask("sync", _refusable=True, **beyond)["refused"]
    with pytest.raises(CommandError, match=r"sync by .*libcufile\.so\.0 failed"):
        it.ask("sync", **beyond)


@needs_fake
def test_a_process_that_does_not_answer_is_killed(process: tuple[Process, str]) -> None:
    it, path = process
    with pytest.raises(Stuck, match="did not answer"):
        it.ask("batch", 0.001, path=path, size=64 * KIB, count=16, span=MIB, batches=2000, limit=20)
    assert it._process.poll() is not None


WRONG = """
import json, os, sys
from ugds.bench._cufile_child import Child
library, path = sys.argv[1:]
child, size, places = Child(library, 0), 65536, [(0, 0), (65536, 65536)]
child.open()
child.prepare([path], 1 << 20, False)
told = [child.sync(path, size, 2, 1 << 20)["wrong"]]
with open(path, "r+b") as file:
    file.seek(65536 + 100)
    old = file.read(3)
    file.seek(65536 + 100)
    file.write(bytes(byte ^ 1 for byte in old))
told.append(child._wrong(path, size, places))
print(json.dumps(told))
"""


@needs_fake
def test_bytes_that_differ_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    command = [sys.executable, "-c", WRONG, str(ours()), str(path)]
    environment = {**os.environ, "UGDS_CUDA_LIBRARY": FAKE}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, 3]


# --- Side by side -----------------------------------------------------------------------------------------------------


class Played:
    """A process whose answers are made up: each way's time, or what else is said of it."""

    made: list[Played]
    answers: dict[str, dict[str, dict[str, Any]]]

    def __init__(self, library: Path, gpu: int) -> None:
        self.name, self.asked, self.alive = library.name, list[str](), True
        self.hello = {"gpu_name": "Played", "version": 1150}
        Played.made.append(self)

    def ask(self, what: str, patience: float | None = None, _refusable: bool = False, **request: Any) -> dict[str, Any]:
        assert self.alive
        self.asked.append(what)
        answer = Played.answers.get(self.name, {}).get(what)
        if answer is None:
            answer = {"ms": 1.0, "seconds": 1.0, "inside": 0.5, "done": request.get("count", 0), "wrong": 0}
        if "stuck" in answer:
            self.alive = False
            raise Stuck("it hangs")
        return answer

    def kill(self) -> None:
        self.alive = False


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> cufile.Pair:
    Played.made, Played.answers = [], {}
    monkeypatch.setattr(cufile, "Process", Played)
    return cufile.Pair({"ours": Path("ours"), "theirs": Path("theirs")}, 0, tmp_path / "file", None, True)


def value(record: Record, figure: str) -> float:
    return record.figures[figure][0]


def test_opening_is_compared_in_fresh_processes(pair: cufile.Pair) -> None:
    Played.answers = {"theirs": {"open": {"ms": 300.0}}}
    record = cufile._opened(pair)
    assert value(record, "driver_open_ratio_to_theirs") == 300
    assert value(record, "ours_open_to_first_read_ms") == 1 + 1 + 1000
    assert len(Played.made) == 2 * cufile.OPENINGS
    assert sorted(one.name for one in Played.made if one.alive) == ["ours", "theirs"]


def test_both_are_measured_in_turn_and_ratios_are_of_a_round(pair: cufile.Pair) -> None:
    pair.open()
    Played.answers = {"theirs": {"sync": {"seconds": 4.0, "wrong": 0}}, "ours": {"sync": {"seconds": 2.0, "wrong": 0}}}
    record = cufile._sync(pair, MIB, False, 3)
    assert value(record, "sync_ratio_to_theirs") == 2
    assert value(record, "ours_gib_per_s") == 2 * value(record, "theirs_gib_per_s")
    assert [one.asked.count("sync") for one in pair.processes.values()] == [1 + 4, 1 + 4]


def test_wrong_bytes_stop_it(pair: cufile.Pair) -> None:
    pair.open()
    Played.answers = {"theirs": {"sync": {"seconds": 1.0, "wrong": 3}}}
    with pytest.raises(CommandError, match="3 bytes that theirs moved are wrong"):
        cufile._sync(pair, MIB, False, 3)


@pytest.mark.parametrize(
    ("answer", "done", "said"),
    [
        ({"stuck": True}, 0, "it hangs"),
        ({"seconds": 20.0, "done": 96, "wrong": 0}, 96, "96 of 128 requests ended in 20 s"),
        ({"refused": "cuFileBatchIOSubmit gave 5030", "code": 5030}, 0, "cuFileBatchIOSubmit gave 5030"),
    ],
)
def test_a_batch_of_theirs_that_does_not_finish_is_a_figure_and_ours_goes_on(
    pair: cufile.Pair, capsys: pytest.CaptureFixture[str], answer: dict[str, Any], done: int, said: str
) -> None:
    pair.open()
    Played.answers = {"theirs": {"batch": answer}}
    promised: dict[str, tuple[float, str]] = {}
    record = cufile._batch(pair, 128, 64 * KIB, 2, promised)
    assert (value(record, "ours_batch_done"), value(record, "theirs_batch_done")) == (128, done)
    assert value(record, "ours_gib_per_s") > 0 and "theirs_gib_per_s" not in record.figures
    assert record.params["theirs"] == said
    assert said in capsys.readouterr().err
    assert promised == {"batch_128x64kib_done": (128, "requests")}
    Played.answers = {}
    assert "sync_ratio_to_theirs" in cufile._sync(pair, MIB, False, 1).figures  # by a fresh process of theirs


def test_a_batch_that_stops_finishing_is_no_time(pair: cufile.Pair) -> None:
    pair.open()
    about = cufile._batch_of(pair, 128, 64 * KIB, 1)
    Played.answers = {"theirs": {"batch": {"seconds": 20.0, "done": 127, "wrong": 0}}}
    assert list(pair.in_turn(2, "batch", **about)) == ["ours"]
    Played.answers = {"ours": {"batch": {"seconds": 20.0, "done": 127, "wrong": 0}}}
    with pytest.raises(CommandError, match="127 of 128 requests ended"):
        pair.in_turn(2, "batch", **about)


def test_what_fails_in_theirs_is_left_out_and_an_error_in_ours(pair: cufile.Pair) -> None:
    pair.open()
    Played.answers = {"theirs": {"sync": {"stuck": True}}}
    assert list(cufile._sync(pair, MIB, False, 2).figures) == ["ours_gib_per_s"]
    Played.answers = {"ours": {"sync": {"stuck": True}}}
    with pytest.raises(Stuck):
        cufile._sync(pair, MIB, False, 2)


def test_where_theirs_takes_no_file_ours_is_measured_alone(
    pair: cufile.Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    Played.answers = {"theirs": {"prepare": {"refused": "cuFileHandleRegister gave 5027", "code": 5027}}}
    record = cufile._opened(pair)
    assert "theirs_driver_open_ms" in record.figures and "theirs_open_to_first_read_ms" not in record.figures
    assert list(pair.processes) == ["ours"]
    assert capsys.readouterr().err.count("cuFileHandleRegister gave 5027") == 1


def test_the_bars_of_files_are_of_gpu_memory() -> None:
    figures = {"share_of_threads": (0.79, "1"), "driver_open_ratio_to_theirs": (20.0, "1"), "other": (1.0, "1")}
    on_gpu = Record("files", {"way": "sync", "size": 4096}, "file:/x", "cuda", "staged", figures)
    of_host = Record("files", {"way": "sync"}, "file:/x", "host", "direct", {"share_of_threads": (0.1, "1")})
    baseline = Record("files", {"baseline": "posix"}, "file:/x", "cuda", "staged", figures)
    found = bars.held([on_gpu, of_host, baseline])
    assert [(one.figure, one.of, one.holds) for one in found] == [
        ("share_of_threads", "sync, 4096", False),
        ("driver_open_ratio_to_theirs", "sync, 4096", True),
    ]
    assert found[0].bar.limit == 0.8


def test_a_table_says_which_bars_hold() -> None:
    command = ("bench", "fairness", "--seconds", "0.1", "--device", "emulated:256MiB?latency=10us&bandwidth=13GiB/s")
    said = run(*command).stdout.partition("promised ")[2]
    rows = {line.split()[0]: line for line in said.splitlines() if line.startswith(("small_", "large_"))}
    assert set(rows) == {"small_p99_ratio_batch", "small_p99_ratio_sync", "large_throughput_share"}
    for name, line in rows.items():
        word = "at most" if bars.BARS[name].at_most else "at least"
        assert f"{word} {bars.BARS[name].limit:g}" in line
        assert ("holds" in line) != ("missed" in line)


@needs_fake
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fio") is None, reason="fio makes the baseline")
def test_the_command_measures_every_way_and_leaves_nothing(tmp_path: Path, stand_in: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    options = ["--file", folder, "--library", stand_in, "--sizes", "1MiB", "--rounds", "1", "--json"]
    found = records(run("bench", "cufile", *options, UGDS_CUDA_LIBRARY=FAKE))
    assert {(one["name"], one["memory"], one["params"]["theirs"]) for one in found} == {("cufile", "cuda", 1150)}
    ways = ["open", "sync read", "sync write", *["stream"] * 4, *["batch"] * 3, "promised"]
    assert [one["params"]["way"] for one in found] == ways
    assert all(figure["value"] > 0 for one in found for figure in one["figures"].values())
    assert list(folder.iterdir()) == []
