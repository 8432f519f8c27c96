# SPDX-License-Identifier: Apache-2.0
"""What holds for the tree as a whole: licences, layers, documentation that runs, and what a wheel carries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import ugds._core

ROOT = Path(__file__).resolve().parents[2]

# Each layer may include itself, base, and the layers before it. base may include only itself.
LAYERS = [
    "gpu",
    "nvme",
    "vfio_user",
    "emulator",
    "serve",
    "file",
    "device",
    "memory",
    "queue",
    "engine",
    "capi",
    "simulation",
]
# The emulator judges the engine, so it shares no code with it.
NOT_FOR_THE_EMULATOR = {"gpu", "vfio_user", "serve", "device", "memory", "queue", "engine", "file", "capi"}


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def text_of(path: Path) -> str | None:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return None


def test_how_a_device_is_reached_is_known_to_its_layer_alone() -> None:
    transports = re.compile(r"vfio|iommu|emulat", re.IGNORECASE)
    found = []
    for layer in ("memory", "queue", "engine"):
        for path in sorted((ROOT / "core" / layer).glob("*.?pp")):
            # Without comments, and without sentences for people.
            code = re.sub(r'//.*|"[^"\n]* [^"\n]*"', "", path.read_text())
            found += [f"{path.name}: {line.strip()}" for line in code.splitlines() if transports.search(line)]
    assert not found


def test_the_environment_is_read_where_a_set_user_id_program_is_thought_of() -> None:
    found = []
    for path in sorted([*(ROOT / "core").rglob("*.?pp"), *(ROOT / "python" / "bindings").rglob("*.?pp")]):
        code = path.read_text()
        if path.name != "environment.hpp" and re.search(r"\bgetenv\b|\benviron\b", code):
            found.append(path.name)
        found += [f"{path.name}: {name}" for name in re.findall(r'runtime_environment\("(UGDS_\w+)', code)]
    assert not found


def test_what_security_names_as_shown_is_there() -> None:
    named = re.findall(r"`((?:tests/)?[\w/]+(?:\.\w+)?)`", (ROOT / "SECURITY.md").read_text())
    tests = [name for name in named if name.startswith("tests/") or name.endswith((".cpp", ".c", ".py"))]
    assert len(tests) > 15
    assert not [name for name in tests if not (ROOT / name).exists() and not (ROOT / "tests" / "fuzz" / name).exists()]


def test_each_target_of_the_fuzzer_has_a_small_corpus() -> None:
    folder = ROOT / "tests" / "fuzz"
    code = "".join(path.read_text() for path in folder.glob("*.cpp"))
    targets = set(re.findall(r'Target target\("(\w+)"', code))
    assert targets == {path.name for path in (folder / "corpus").iterdir()}
    assert sum(path.stat().st_size for path in (folder / "corpus").rglob("*") if path.is_file()) < 300 << 10


def test_every_source_file_names_its_licence() -> None:
    without = {".md", ".png", ".svg"}
    names = {"LICENSE", ".gitignore", ".clang-format", "py.typed"}
    missing = []
    for path in tracked():
        if path.suffix in without or path.name in names:
            continue
        name = path.relative_to(ROOT)
        if name.parts[:3] == ("tests", "fuzz", "corpus"):
            continue
        licence = "GPL-2.0-only" if name.parts[0] == "drv" else "Apache-2.0"
        head = "\n".join((text_of(path) or "").splitlines()[:3])
        if f"SPDX-License-Identifier: {licence}" not in head:
            missing.append(str(name))
    assert not missing


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"](\w+)/[^>"]+[>"]', path.read_text(), re.MULTILINE)


def test_each_layer_includes_only_what_it_may_know() -> None:
    known = {*LAYERS, "base"}
    wrong = []
    for path in tracked():
        name = path.relative_to(ROOT)
        if name.parts[0] != "core" or path.suffix not in (".hpp", ".cpp", ".h", ".c"):
            continue
        layer = name.parts[1]
        assert layer in known, f"core/{layer} is no layer"
        allowed = {"base"} if layer == "base" else {"base", *LAYERS[: LAYERS.index(layer) + 1]}
        wrong += [f"{name} includes {other}" for other in includes(path) if other in known - allowed]
    assert not wrong


def test_the_emulator_includes_nothing_of_the_engine() -> None:
    files = [p for p in tracked() if p.relative_to(ROOT).parts[:2] == ("core", "emulator")]
    assert files
    assert not [f"{path.name}: {other}" for path in files for other in includes(path) if other in NOT_FOR_THE_EMULATOR]


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/[\w.]+")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in tracked()
        if (text := text_of(path)) is not None
        for match in pattern.finditer(text)
    ]
    assert not found


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def test_the_readmes_python_runs(tmp_path: Path) -> None:
    programs = blocks("README.md", "python")
    assert programs
    for program in programs:
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_readmes_commands_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for name in ("demo", "test"):
        assert f"./{name}" in text
        assert os.access(ROOT / name, os.X_OK)
    for command in re.findall(r"`ugds ([a-z][^`]*)`", text):
        words = [word for word in command.split() if re.fullmatch("[a-z]+", word)]
        done = subprocess.run([sys.executable, "-m", "ugds", *words, "--help"], capture_output=True, text=True)
        assert done.returncode == 0, f"ugds {command}: {done.stderr}"


def test_every_folder_of_the_tree_is_in_the_map() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    folders = {path.relative_to(ROOT).parts[0] for path in tracked() if len(path.relative_to(ROOT).parts) > 1}
    assert not [folder for folder in folders if f"{folder}/" not in text]


def test_the_installed_package_is_complete() -> None:
    folder = Path(ugds._core.__file__).parent
    compat = ("compat/libcufile.so.0", "compat/libcufile.so", "compat/cufile.json")
    for name in ("libugds.so", "include/ugds.h", "py.typed", "_core.pyi", "cli.py", *compat):
        assert (folder / name).is_file(), f"{name} is missing from the package"
    assert Path(ugds._core.library_path()).resolve() == (folder / "libugds.so").resolve()


@pytest.mark.slow
def test_a_wheel_carries_the_library_and_its_header(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    options = ["-C", f"build-dir={ROOT / 'build' / 'package'}", "-w", str(tmp_path), str(ROOT)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("ugds-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"ugds/libugds.so", "ugds/include/ugds.h", "ugds/py.typed", "ugds/_core.pyi", "ugds/bench/sync.py"} <= names
    assert {"ugds/compat/libcufile.so.0", "ugds/compat/libcufile.so", "ugds/compat/cufile.json"} <= names
    assert any(re.fullmatch(r"ugds/_core\..*\.so", name) for name in names)
    assert len([name for name in names if name.endswith("libugds.so")]) == 1
