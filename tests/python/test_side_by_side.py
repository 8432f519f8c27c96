# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/side_by_side.py: what it tells of tests that pass, fail, hang and fall over either library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import cufile_client as cf
import pytest
import side_by_side
import witnessed

HEAD = f"""
import ctypes, os, sys
import pytest
sys.path.insert(0, {str(Path(__file__).parent)!r})
import cufile_client as cf

library = cf.CuFile("libcufile.so.0")
OURS = str(cf.OURS) in open("/proc/self/maps").read()


def use(folder):
    path = folder / "file"
    path.write_bytes(bytes(8192))
    fd = os.open(path, os.O_RDWR)
    library.call("cuFileDriverOpen")
    memory = ctypes.create_string_buffer(5000)
    assert library.read(library.register(fd), ctypes.addressof(memory), 5000, 100) == 5000


def hang():
    ctypes.PyDLL(None).pause()  # not to be interrupted by Python


@pytest.mark.parametrize("turn", range(3))
def test_reads(tmp_path, turn):
    use(tmp_path)
"""


class Suite:
    """A folder of tests, and another library of cuFile's name: a copy of ours."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.logs = folder / "suite", folder / "logs"
        self.folder.mkdir()
        self.library = folder / "nvidia" / "libcufile.so.0"
        self.library.parent.mkdir()
        shutil.copy(cf.OURS, self.library)

    def compare(self, tests: str, *options: str) -> tuple[int, str, dict[str, Any]]:
        """Exit status, output and report."""
        (self.folder / "test_it.py").write_text(HEAD + textwrap.dedent(tests))
        command = [sys.executable, side_by_side.__file__, "--folder", str(self.folder), "--library", str(self.library)]
        command += ["--scratch", str(self.folder.parent), "--logs", str(self.logs), "--no-udev", *options]
        environment = {**os.environ, "LD_LIBRARY_PATH": str(cf.OURS.parent.parent)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, json.loads((self.logs / "report.json").read_text())


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def test_what_passes_over_both_is_told_with_libraries_and_counters(suite: Suite) -> None:
    status, out, report = suite.compare("def test_more(tmp_path):\n    use(tmp_path)\n", "--jobs", "2")
    assert status == 0, out
    assert f"loaded over NVIDIA's: {suite.library} " in out
    assert f"loaded over ours: {cf.OURS} " in out
    assert report["wrong"] == []
    for side in ("nvidia", "ugds"):
        assert sorted(report[side]["outcomes"].values()) == ["passed"] * 4
    assert (report["counters"]["reads"], report["counters"]["read_bytes"]) == (4, 4 * 5000)
    assert "suite: 4 passed over NVIDIA's, and all of them over ours" in out


@pytest.mark.slow
def test_what_there_is_no_time_for_is_told_and_ours_has_its_half(suite: Suite) -> None:
    tests = (
        "def test_slow(tmp_path):\n    OURS or hang()\n    use(tmp_path)\ndef test_more(tmp_path):\n    use(tmp_path)\n"
    )
    status, out, report = suite.compare(tests, "--limit", "40")
    assert status == 0
    assert "the time was over in test_it.py::test_slow" in out
    names = ["test_it.py::test_slow", "test_it.py::test_more"]
    assert [report["nvidia"]["outcomes"][name] for name in names] == ["not run"] * 2
    assert [report["ugds"]["outcomes"][name] for name in names] == ["passed"] * 2


@pytest.mark.slow
def test_a_hang_or_a_fall_is_one_failure_and_the_rest_is_run(suite: Suite) -> None:
    tests = """
    def test_hangs_over_nvidias():
        OURS or hang()

    def test_falls_over_ours():
        OURS and os.kill(os.getpid(), 11)

    def test_hangs_over_ours(tmp_path):
        use(tmp_path)
        OURS and hang()

    def test_fails_over_ours():
        assert not OURS

    def test_after(tmp_path):
        use(tmp_path)
    """
    status, out, report = suite.compare(tests, "--test-limit", "10")
    assert status == 1
    outcomes = {
        name: [report[side]["outcomes"][f"test_it.py::test_{name}"] for side in ("nvidia", "ugds")]
        for name in ("hangs_over_nvidias", "falls_over_ours", "hangs_over_ours", "fails_over_ours", "after")
    }
    assert outcomes == {
        "hangs_over_nvidias": ["hung", "passed"],
        "falls_over_ours": ["passed", "crashed"],
        "hangs_over_ours": ["passed", "hung"],
        "fails_over_ours": ["passed", "failed"],
        "after": ["passed", "passed"],
    }
    told = [line.split(":")[2] for line in report["wrong"]]
    assert told == ["test_fails_over_ours", "test_falls_over_ours", "test_hangs_over_ours"]
    assert report["counters"]["reads"] == 5  # also of the process that was killed
    assert out.count("FAIL") == 3


def test_a_test_that_is_skipped_over_ours_alone_is_a_failure(suite: Suite) -> None:
    tests = "def test_skips(tmp_path):\n    OURS and pytest.skip('no cuFile')\n"
    status, _, report = suite.compare(tests)
    assert status == 1
    assert report["wrong"] == ["test_it.py::test_skips: passed over NVIDIA's, skipped over ours: Skipped: no cuFile"]


def test_counters_that_do_not_move_are_a_failure(suite: Suite) -> None:
    status, _, report = suite.compare("", "--", "-k", "nothing")
    assert status == 1
    assert any("our counters did not move" in line for line in report["wrong"])
    assert any("nothing passed" in line for line in report["wrong"])


def test_another_library_that_gets_in_is_a_failure_that_names_it(suite: Suite, tmp_path: Path) -> None:
    """Over ours `ugds run` ends the program, in a test or before the first."""
    source, other = tmp_path / "other.c", tmp_path / "other" / "libcufile.so.0"
    other.parent.mkdir()
    source.write_text("int cuFileRead(void) { return 77; }\n")
    compiler = shutil.which("cc") or shutil.which("gcc") or "c++"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(other), str(source)], check=True)
    # In a way that `ugds run` does not see: who opens it by its path is given ours.
    status, _, report = suite.compare(f"ctypes.CDLL(None).dlmopen(0, {os.fsencode(other)!r}, os.RTLD_NOW)")
    assert status == 1
    assert any("over ours" in line and "another libcufile" in line and str(other) in line for line in report["wrong"])


def test_without_nvidias_library_or_tests_nothing_is_compared(tmp_path: Path) -> None:
    for options, words in (
        (["--folder", str(tmp_path), "--library", "/nowhere/libcufile.so.0"], "was not found"),
        (["--folder", str(tmp_path), "--suite", "none"], "is no folder"),
    ):
        done = subprocess.run(
            [sys.executable, side_by_side.__file__, *options], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2
        assert words in done.stderr


def test_the_report_is_found_behind_what_a_killed_process_left() -> None:
    report = {"command": ["a"], "totals": {"reads": 1}}
    assert witnessed.report_in("...." + json.dumps(report) + "\n") == report
    assert witnessed.report_in(json.dumps({"command": []}) + "\nmore\n" + json.dumps(report) + "\nlast") == report
    assert witnessed.report_in("....\n") is None


def test_udev_is_told_of_the_disk_meanwhile_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tmp_path / "udev" / "data" / "b1:2"
    monkeypatch.setattr(side_by_side, "udev_entry", lambda folder: entry)
    with side_by_side.known_to_udev(tmp_path) as words:
        assert entry.read_text() == "E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n"
        assert "is removed for ours" in words
    assert not (tmp_path / "udev").exists()
    entry.parent.mkdir(parents=True)
    entry.write_text("the system's")
    with side_by_side.known_to_udev(tmp_path) as words:
        assert "was there" in words
    assert entry.read_text() == "the system's"
