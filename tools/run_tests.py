# SPDX-License-Identifier: Apache-2.0
"""The stages behind ./test, each with its time, and one closing line that sums over all of them.

A check counts as one test, as does a build that fails; C++ and Python tests are counted by their own runners.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fuzz
import gpu_tests
import workspace
from workspace import ROOT, SetupError

BIN = workspace.VENV / "bin"
BUILD = ROOT / "build"
CXX_FOLDERS = ["core", "include", "python/bindings", "tests"]
# For the programs of one build together; building is not counted, since it depends on what else the machine does.
MINUTES = 15
ENDURANCE_MINUTES = 30
# For each of the fuzzer's targets, where fuzzing is one stage of all.
SHORT_FUZZ_S = 5
# What the thread sanitizer's own runtime makes meaningless. These run in every other build.
NOT_UNDER_THREAD = {"c_no_system_calls": "the sanitizer's runtime makes system calls of its own"}


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


PASSED, FAILED = Counts(passed=1), Counts(failed=1)


def environment(**extra: str) -> dict[str, str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    # Faults that tests play are not kept among those of the user.
    state = str(ROOT / "build" / "test-state")
    return {**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1", "UGDS_STATE_DIR": state, **extra}


def show(text: str) -> None:
    print(text.rstrip(), flush=True)


def check(name: str, command: list[str], fix: str = "") -> Counts:
    """One check: silent where it passes."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode == 0:
        show(f"  ok    {name}")
        return PASSED
    show(f"  FAIL  {name}")
    # clang-format says where, in three lines a place; the files are enough.
    files = sorted(
        set(re.findall(r"^(\S+?):\d+:\d+: error: code should be clang-formatted", done.stderr, re.MULTILINE))
    )
    show("\n".join(files) or done.stdout + done.stderr)
    if fix:
        show(f"  fix it by: {fix}")
    return FAILED


def cxx_files() -> list[str]:
    suffixes = {".c", ".h", ".cpp", ".hpp"}
    found = [p for folder in CXX_FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    return sorted(str(p.relative_to(ROOT)) for p in found)


def checks() -> Counts:
    formatter = [str(BIN / "clang-format"), "--dry-run", "-Werror", *cxx_files()]
    tool = ".venv/bin/ruff"
    return (
        check("ruff check", [str(BIN / "ruff"), "check", "."], f"{tool} check --fix .")
        + check("ruff format", [str(BIN / "ruff"), "format", "--check", "."], f"{tool} format .")
        + check("mypy --strict", [sys.executable, "-m", "mypy", "--strict", "python/ugds"])
        + check("clang-format", formatter, ".venv/bin/clang-format -i FILE")
    )


def build(folder: Path, sanitize: str = "", target: str = "all") -> None:
    """Configures and builds the C++ and C tests, or one target. Raises SetupError with the compiler's words."""
    configure = ["cmake", "-S", ".", "-B", str(folder), "-G", "Ninja", "-DUGDS_TESTS=ON", f"-DUGDS_SANITIZE={sanitize}"]
    log = folder.with_suffix(".log")
    os.environ["PATH"] = environment()["PATH"]
    workspace.run(f"  configuring {folder.name}", configure, log)
    workspace.run(f"  building {folder.name}", ["cmake", "--build", str(folder), "--target", target], log)


def programs(folder: Path) -> list[Path]:
    """The test programs of a build: the executables that tests/CMakeLists.txt made."""
    found = [p for p in (folder / "tests").rglob("*") if p.is_file() and os.access(p, os.X_OK)]
    return sorted(p for p in found if "CMakeFiles" not in p.parts and ".so" not in p.suffixes)


def run_program(
    program: Path, deadline: float, prefix: list[str], extra: dict[str, str], *, loud: bool = False
) -> Counts:
    """One test program. A doctest program's own counts; any other counts as one test, by its exit status. What it
    printed is shown where it failed, or is `loud`."""
    name, start = program.name, time.monotonic()
    try:
        done = subprocess.run(
            [*prefix, str(program)],
            cwd=ROOT,
            env=environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=max(1.0, deadline - start),
        )
        output, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        output, status = f"{output}\n{name}: stopped, it took longer than allowed", 1
    summary = re.search(r"test cases:\s*\d+\s*\|\s*(\d+) passed\s*\|\s*(\d+) failed\s*\|\s*(\d+) skipped", output)
    counts = Counts(*map(int, summary.groups())) if summary else Counts()
    if status != 0 and counts.failed == 0:  # a crash, a sanitizer's report, a time-out
        counts += FAILED
    elif summary is None and status == 0:
        counts = PASSED
    show(f"  {'ok  ' if status == 0 else 'FAIL'}  {folder_label(program)}: {counts} ({time.monotonic() - start:.1f} s)")
    # How far an exploration went is part of what it says.
    for line in re.findall(r"^explored: .*$", output, re.MULTILINE):
        show(f"        {line}")
    if status != 0 or loud:
        show(output)
    return counts


def folder_label(program: Path) -> str:
    return f"{program.relative_to(BUILD).parts[0]}/{program.name}"


def layout(sanitize: str) -> list[str]:
    """What a sanitizer's program is run by."""
    # Older runtimes of the thread sanitizer refuse some layouts that address randomisation makes.
    if sanitize == "thread" and (setarch := shutil.which("setarch")):
        prefix = [setarch, os.uname().machine, "-R"]
        if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return prefix
    return []


def native(folder: Path, sanitize: str, extra: dict[str, str] | None = None) -> Counts:
    try:
        build(folder, sanitize)
    except SetupError as error:
        show(str(error))
        return FAILED
    prefix = layout(sanitize)
    found = programs(folder)
    if not found:
        show(f"  FAIL  no test program was built in {folder.relative_to(ROOT)}")
        return FAILED
    counts = Counts()
    if sanitize == "thread":
        for program in [p for p in found if p.name in NOT_UNDER_THREAD]:
            show(f"  skip  {folder_label(program)}: {NOT_UNDER_THREAD[program.name]}")
            found.remove(program)
            counts += Counts(skipped=1)
    deadline = time.monotonic() + MINUTES * 60
    return sum((run_program(p, deadline, prefix, extra or {}) for p in found), counts)


def cxx() -> Counts:
    return native(BUILD / "test-release", "")


ADDRESS = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
THREAD = {"TSAN_OPTIONS": "second_deadlock_stack=1:die_after_fork=0"}


def sanitizers() -> Counts:
    return native(BUILD / "test-asan", "address,undefined", ADDRESS) + native(BUILD / "test-tsan", "thread", THREAD)


def endurance() -> Counts:
    """What the other stages do a little of: a million random requests under each sanitizer, and 500 killed clients."""
    counts = Counts()
    million = {"SOAK_OPERATIONS": "1000000"}
    for name, sanitize, settings in (("asan", "address,undefined", ADDRESS), ("tsan", "thread", THREAD)):
        folder = BUILD / f"test-{name}"
        try:
            build(folder, sanitize, target="soak_tests")
        except SetupError as error:
            show(str(error))
            return counts + FAILED
        program, deadline = folder / "tests" / "soak_tests", time.monotonic() + ENDURANCE_MINUTES * 60
        counts += run_program(program, deadline, layout(sanitize), {**settings, **million}, loud=True)
    return counts + python(quick=False, options=["-s", "-k", "test_serve_killed"], extra={"UGDS_KILLS": "500"})


def with_package_and_fakes() -> dict[str, str] | None:
    """Installs the package and builds the fake CUDA driver; the environment for what uses both, or None."""
    release = BUILD / "test-release"
    try:
        with workspace.alone():
            workspace.ensure_package()
            build(release, target="fake_cuda")
    except SetupError as error:
        show(str(error))
        return None
    return environment(FAKE_CUDA_LIBRARY=str(release / "tests" / "libfake_cuda.so"))


def python(quick: bool, options: list[str] | None = None, extra: dict[str, str] | None = None) -> Counts:
    fakes = with_package_and_fakes()
    if fakes is None:
        return FAILED
    report = BUILD / "pytest.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *(["-m", "not slow"] if quick else [])]
    command += options or []
    status = subprocess.run(command, cwd=ROOT, env={**fakes, **(extra or {})}, stdin=subprocess.DEVNULL).returncode
    return reported(report, status)


def reported(report: Path, status: int | None) -> Counts:
    """What pytest wrote of itself."""
    if not report.exists():
        return FAILED
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = Counts()
    for suite in suites:
        total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        counts += Counts(max(0, total - failed - skipped), failed, skipped)
    if status != 0 and counts.failed == 0:
        counts += FAILED
    return counts


def gpu(expression: str | None) -> Counts:
    try:
        gpu_tests.prepare()
    except SetupError as error:
        show(str(error))
        return FAILED
    report = BUILD / "gpu.xml"
    report.unlink(missing_ok=True)
    status = gpu_tests.run(report, expression)
    if status is None:
        show(f"  FAIL  the tests were stopped after {gpu_tests.MINUTES} minutes")
    return reported(report, status)


def soak(minutes: float) -> Counts:
    program = ROOT / "tests" / "python" / "soak.py"
    if not program.exists():
        return absent("soak")
    try:
        with workspace.alone():
            workspace.ensure_package()
    except SetupError as error:
        show(str(error))
        return FAILED
    command = [sys.executable, str(program), f"{minutes:g}"]
    status = subprocess.run(command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL).returncode
    return PASSED if status == 0 else FAILED


def faults() -> Counts:
    """The fault matrix, and the mutations that fail it. A cell counts as one test, and so does a mutation."""
    fakes = with_package_and_fakes()
    if fakes is None:
        return FAILED
    command = [sys.executable, str(ROOT / "tests" / "faults" / "run.py")]
    done = subprocess.Popen(command, cwd=ROOT, env=fakes, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    summary = None
    for line in done.stdout or ():
        show(line)
        summary = re.fullmatch(r"faults: (\d+) cells, (\d+) failed, (\d+) of (\d+) mutations caught\n", line)
    if summary is None:
        done.wait()
        return FAILED
    cells, failed, caught, mutations = map(int, summary.groups())
    counts = Counts(cells - failed + caught, failed + mutations - caught)
    return counts + FAILED if done.wait() != 0 and counts.failed == 0 else counts


def fuzzing(seconds: int, sanitizers: str, *more: str) -> Counts:
    """Each target of tests/fuzz for so long. What is kept of earlier runs is among the C++ tests (fuzz_replay)."""
    if lacking := fuzz.missing():
        show(f"  skip  nothing was fuzzed: {lacking}")
        return Counts(skipped=len(fuzz.targets()))
    try:
        fuzz.build(sanitizers)
    except SetupError as error:
        show(str(error))
        return FAILED
    counts = Counts()
    for outcome in fuzz.run_all(seconds, *more):
        show(f"  {'FAIL' if outcome.output else 'ok  '}  {outcome.target}: {outcome.words}")
        if outcome.output:
            show(f"{outcome.output}\n  the input is in {fuzz.BROKEN.relative_to(ROOT)}")
        counts += FAILED if outcome.output else PASSED
    return counts


def virtual_machines(options: list[str]) -> Counts:
    try:
        with workspace.alone():
            workspace.ensure_package()
    except SetupError as error:
        show(str(error))
        return FAILED
    command = [sys.executable, str(ROOT / "tests" / "vm" / "run.py"), *options]
    done = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    # The last line is the sum; this program prints one of its own.
    summary = None
    for line in done.stdout or ():
        summary = re.fullmatch(r"(\d+) passed, (\d+) failed, (\d+) skipped\n", line)
        if summary is None:
            show(line)
    counts = Counts(*map(int, summary.groups())) if summary else FAILED
    return counts + FAILED if done.wait() != 0 and counts.failed == 0 else counts


def absent(name: str) -> Counts:
    show(f"  NOTHING WAS TESTED: there is no {name} suite yet.")
    return Counts(skipped=1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./test",
        description="Builds uGDS and tests it. Without an option: all but --soak, --endurance and --gpu; --fuzz for "
        "seconds.",
        epilog='Every form ends with the line "N passed, N failed, N skipped"; the exit status is 0 if none failed.',
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", action="store_true", help="checks, C++ tests and the Python tests that are not slow")
    form.add_argument("--sanitizers", action="store_true", help="address, undefined behaviour and thread sanitizers")
    form.add_argument("--soak", type=float, metavar="MINUTES", help="random load with faults, for that long")
    form.add_argument(
        "--endurance", action="store_true", help="a million random requests by each sanitizer, and 500 killed clients"
    )
    form.add_argument("--faults", action="store_true", help="every fault by every way in, and a broken engine")
    form.add_argument("--fuzz", type=int, metavar="SECONDS", help="each of the fuzzer's targets, for that long")
    form.add_argument("--vm", action="store_true", help="in a virtual machine, with the kernel's own drivers")
    form.add_argument("--gpu", action="store_true", help="what needs a GPU, with the Python that there is")
    parser.add_argument("-k", metavar="EXPRESSION", help="with --vm or --gpu: only the tests of that name")
    parser.add_argument("--boot", metavar="NAME", help="with --vm: only this virtual machine (tests/vm/boots.py)")
    arguments = parser.parse_args()
    if (arguments.k and not (arguments.vm or arguments.gpu)) or (arguments.boot and not arguments.vm):
        parser.error("-k goes with --vm and --gpu, --boot with --vm")
    boots = re.findall(r'^    Boot\(\n? *"(\w+)"', (ROOT / "tests" / "vm" / "boots.py").read_text(), re.MULTILINE)
    if arguments.boot and arguments.boot not in boots:
        parser.error(f"there is no virtual machine {arguments.boot}; there are {', '.join(boots)}")
    return arguments


def main() -> int:
    arguments = parse()
    stages: list[tuple[str, Callable[[], Counts]]]
    if arguments.sanitizers:
        stages = [("sanitizers", sanitizers)]
    elif arguments.soak is not None:
        stages = [("soak", lambda: soak(arguments.soak))]
    elif arguments.endurance:
        stages = [("endurance", endurance)]
    elif arguments.fuzz is not None:
        stages = [("fuzzing", lambda: fuzzing(arguments.fuzz, fuzz.THOROUGH))]
    elif arguments.vm:
        options = [f"{name}{value}" for name, value in (("-k=", arguments.k), ("--boot=", arguments.boot)) if value]
        stages = [("virtual machines", lambda: virtual_machines(options))]
    elif arguments.gpu:
        stages = [("GPU", lambda: gpu(arguments.k))]
    elif arguments.faults:
        stages = [("faults", faults)]
    else:
        stages = [("checks", checks), ("C++ tests", cxx), ("Python tests", lambda: python(arguments.quick))]
        if not arguments.quick:
            stages.append(("faults", faults))
            stages.append(("sanitizers", sanitizers))
            stages.append(("fuzzing", lambda: fuzzing(SHORT_FUZZ_S, fuzz.QUICK, "-seed=1")))
            stages.append(("virtual machines", lambda: virtual_machines([])))

    total = Counts()
    for title, stage in stages:
        start = time.monotonic()
        show(f"== {title}")
        counts = stage()
        show(f"== {title}: {counts} in {time.monotonic() - start:.1f} s\n")
        total += counts
    show(str(total))
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
