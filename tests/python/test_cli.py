# SPDX-License-Identifier: Apache-2.0
"""The command line as people and programs meet it: in a process of its own, by its output and exit status."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import ugds
from command_line import records, run
from ugds import cli
from ugds._demo import in_memory

COMMANDS = [
    [],
    ["demo"],
    ["info"],
    ["devices"],
    ["bind"],
    ["unbind"],
    ["serve"],
    ["bench"],
    ["bench", "sync"],
    ["bench", "mixed"],
    ["bench", "batch"],
    ["bench", "report"],
    ["bench", "setup"],
    ["bench", "overhead"],
    ["bench", "completion"],
    ["bench", "replay"],
]


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.rstrip().splitlines()[-1]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Neither a multiple of a block nor of any request size."""
    path = tmp_path / "some file.bin"
    path.write_bytes(random.Random(1).randbytes((3 << 20) + 12345))
    return path


# --- Help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_teaches_by_example(command: list[str]) -> None:
    text = run(*command, "--help").stdout
    assert "examples:" in text
    assert f"ugds {' '.join(command)}".strip() in text.split("examples:")[1]


@pytest.mark.parametrize("command", [[], ["demo"], ["info"]], ids=" ".join)
def test_help_tells_how_devices_are_named(command: list[str]) -> None:
    assert "emulated:1GiB" in run(*command, "--help").stdout


def test_version_is_the_librarys() -> None:
    assert run("--version").stdout == f"ugds {ugds.version()}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["frobnicate"], ["bench"], ["info", "--nonsense"], ["bench", "sync", "extra"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert "usage: ugds" in run(*arguments, status=2).stderr


# --- demo ---------------------------------------------------------------------------------------------------------


def test_demo_compares_every_byte(file: Path) -> None:
    done = run("demo", file)
    assert last_line(done) == f"compared {file.stat().st_size} bytes, 0 differ"
    for request in ("4 KiB", "64 KiB", "1 MiB", "16 MiB"):
        assert re.search(rf"^sync +│ +{request} +│", done.stdout, re.MULTILINE), done.stdout
    assert "sync, 4 threads" in done.stdout
    for header in ("GiB/s", "requests/s", "p50", "p99", "memory", "transport", "route"):
        assert header in done.stdout
    assert "The device is emulated" in done.stdout


def test_demo_finds_a_flipped_bit_and_says_where(file: Path) -> None:
    done = run("demo", file, "--corrupt", status=1)
    size = file.stat().st_size
    assert last_line(done) == f"compared {size} bytes, 1 differ"
    found = re.search(r"first difference is at byte (\d+): 0x(..) in the file, 0x(..) read back", done.stdout)
    assert found
    at, expected, got = int(found[1]), int(found[2], 16), int(found[3], 16)
    assert expected == file.read_bytes()[at]
    assert expected ^ got == 1


def test_demo_as_json(file: Path) -> None:
    found = records(run("demo", file, "--json"))
    assert {record["name"] for record in found} == {"demo"}
    *modes, comparison = found
    assert [mode["params"]["operation"] for mode in modes] == ["write"] + ["read"] * 5
    for mode in modes:
        assert set(mode["figures"]) >= {"gib_per_s", "requests_per_s", "p50_us", "p99_us"}
        assert all(mode["figures"][name]["value"] > 0 for name in ("gib_per_s", "requests_per_s", "p50_us", "p99_us"))
    assert comparison["figures"] == {
        "bytes_compared": {"value": file.stat().st_size, "unit": "B"},
        "bytes_different": {"value": 0, "unit": "B"},
    }


def test_demo_as_json_counts_what_differs(file: Path) -> None:
    found = records(run("demo", file, "--json", "--corrupt", status=1))
    assert found[-1]["figures"]["bytes_different"]["value"] == 1
    assert all(r["figures"]["bytes_different"]["value"] == 1 for r in found if r["params"]["operation"] == "read")


@pytest.mark.parametrize("traits", ["lba=512", "mdts=1", "queues=1", "depth=2", "mpsmin=1&mpsmax=4", "pump=caller"])
def test_demo_on_devices_of_other_traits(file: Path, traits: str) -> None:
    done = run("demo", file, "--device", f"emulated:16MiB?{traits}")
    assert last_line(done).endswith(", 0 differ")


def test_demo_of_a_single_byte(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_bytes(b"x")
    assert last_line(run("demo", path)) == "compared 1 bytes, 0 differ"
    assert last_line(run("demo", path, "--corrupt", status=1)) == "compared 1 bytes, 1 differ"


def test_demo_of_a_file_larger_than_its_window(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(random.Random(2).randbytes(1 << 20) * 130 + b"tail")
    assert last_line(run("demo", path)) == f"compared {path.stat().st_size} bytes, 0 differ"


def test_demo_of_an_empty_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert "is empty" in run("demo", path, status=2).stderr


def test_demo_of_a_folder_says_so(tmp_path: Path) -> None:
    assert "is a directory" in run("demo", tmp_path, status=2).stderr


def test_demo_of_a_missing_file_says_so(tmp_path: Path) -> None:
    assert "No such file" in run("demo", tmp_path / "nothing", status=2).stderr


def test_demo_of_an_unreadable_file_says_so(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Root may read every file, so the refusal is played.
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(np, "memmap", refuse)
    assert cli.main(["demo", str(file)]) == 2
    assert capsys.readouterr().err == f"ugds demo: cannot read {file}: Permission denied\n"


def test_demo_of_a_device_node_says_so() -> None:
    assert "not a regular file" in run("demo", "/dev/null", status=2).stderr


def test_demo_of_a_file_larger_than_memory_says_how_much_is_free(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as out:
        out.truncate(8 << 40)
    message = run("demo", path, status=2).stderr
    assert "8 TiB" in message
    assert "are free" in message


def test_demo_on_a_device_that_is_too_small_says_so(file: Path) -> None:
    assert "more than" in run("demo", file, "--device", "emulated:1MiB", status=2).stderr


def test_demo_does_not_overwrite_a_kept_device_unasked(file: Path, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"precious" * (1 << 20))
    assert "--overwrite" in run("demo", file, "--device", f"emulated:{image}", status=2).stderr
    assert image.read_bytes() == b"precious" * (1 << 20)
    assert last_line(run("demo", file, "--device", f"emulated:{image}", "--overwrite")).endswith(", 0 differ")
    assert image.read_bytes()[: file.stat().st_size] == file.read_bytes()


@pytest.mark.parametrize(
    ("uri", "empty"),
    [
        ("emulated:64MiB", True),
        ("emulated:64MiB?lba=512&model=name", True),
        ("emulated:64MiB?name=shared", False),
        ("emulated:64MiB?lba=512&file=/data/image", False),
        ("emulated:64MiB?%66ile=/data/image", False),
        ("emulated:/data/image", False),
        ("emulated:%2Fdata/image", False),
        ("pci:0000:65:00.0", False),
    ],
)
def test_only_a_device_that_starts_empty_may_be_written_unasked(uri: str, empty: bool) -> None:
    assert in_memory(uri) is empty


# --- info ---------------------------------------------------------------------------------------------------------


def test_info_describes_the_device() -> None:
    text = run("info", "emulated:1GiB?lba=512&serial=ABC").stdout
    for part in ("1 GiB (1073741824 bytes)", "512 B", "serial ABC", "transport", "emulated", "ready"):
        assert part in text


def test_info_as_json() -> None:
    described = json.loads(run("info", "emulated:64MiB?queues=2", "--json").stdout)
    assert described["capacity"] == 64 << 20
    assert described["queues"] == 2
    assert described["block_size"] == 4096
    assert described["state"] == "ready"
    assert described["volatile_write_cache"] is True


def test_info_lists_the_parameters() -> None:
    text = run("info", "--parameters").stdout
    for name in ("lba", "mdts", "queues", "latency", "pump", "name"):
        assert re.search(rf"^{name}\b", text, re.MULTILINE), f"{name} is not listed"
    rows = [json.loads(line) for line in run("info", "--parameters", "--json").stdout.splitlines()]
    assert all(set(row) == {"name", "values", "meaning"} for row in rows)


def test_info_without_a_device_is_wrong_usage() -> None:
    assert "ugds info emulated:1GiB" in run("info", status=2).stderr


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("emulate:1GiB", "emulated"),
        ("emulated:1GiB?lbaa=4096", "lba"),
        ("emulated:1GiB?lba=1000", "lba"),
        ("emulated:many", "many"),
    ],
)
def test_a_bad_device_is_one_readable_message(uri: str, words: str) -> None:
    message = run("info", uri, status=1).stderr
    assert message.startswith("ugds info: ")
    assert words in message
    assert uri in message
