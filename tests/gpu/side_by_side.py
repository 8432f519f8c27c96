# SPDX-License-Identifier: Apache-2.0
"""`python side_by_side.py --folder DIR [--suite NAME] -- pytest's arguments`: runs other people's tests of cuFile twice
in fresh processes, over NVIDIA's library as it is found here and over ours by `ugds run`, and compares test by test.

Its exit status is 1 where a test that passes over NVIDIA's library does not over ours, where ours was not the one that
was loaded, or where its counters did not move; 2 where there is nothing to compare. A test that hangs or takes its
process down counts as failed, and those behind it are run by a new process (witness.py)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from witnessed import Part, Plan, run_side

HERE = Path(__file__).resolve().parent
#: Which of a report's counters say that bytes were asked for.
REQUESTS = ("reads", "writes", "batch_requests", "stream_requests")
#: How many tests are named for not having passed; report.json has all.
SHOWN = 12


class Nothing(Exception):
    """There is nothing to compare, and why."""


def nvidias() -> Path | None:
    """NVIDIA's library: of the package nvidia-cufile, else of a toolkit."""
    packages = [Path(path) for path in sys.path if path]
    found = [file for path in packages for file in sorted(path.glob("nvidia/*/lib/libcufile.so.0"))]
    found += sorted(Path("/usr/local").glob("cuda*/targets/*/lib/libcufile.so.0"))
    return found[0].resolve() if found else None


def udev_entry(folder: Path) -> Path:
    device = folder.stat().st_dev
    return Path(f"/run/udev/data/b{os.major(device)}:{os.minor(device)}")


@contextlib.contextmanager
def known_to_udev(folder: Path, may: bool = True) -> Iterator[str]:
    """NVIDIA's library registers no file whose disk has no entry of udev's. Where there is none and root may write one,
    there is one meanwhile; yields what was done."""
    entry = udev_entry(folder)
    if not may:
        yield f"{entry} is left as it is"
        return
    if entry.exists():
        yield f"{entry} was there"
        return
    made = [path for path in (entry.parent, entry.parent.parent) if not path.exists()]
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_text("E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n")
    except OSError as error:
        yield f"{entry} is missing, and cannot be made ({error.strerror}): NVIDIA's will not register files there"
        return
    try:
        yield f"{entry} was made for NVIDIA's, and is removed for ours"
    finally:
        entry.unlink(missing_ok=True)
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def environment_of(plan: Plan) -> dict[str, str]:
    made = {"KVIKIO_COMPAT_MODE": "OFF", **os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    # The suite's own before what is installed, some of which has a package "tests" too.
    before = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    made["PYTHONPATH"] = os.pathsep.join([str(plan.suite), *map(os.path.abspath, before), str(HERE)])
    return made


def over_nvidias(plan: Plan, library: Path) -> Part:
    """By whichever of its names a program looks for it."""
    names = plan.scratch / "nvidia"
    names.mkdir()
    for file in library.parent.glob("libcufile*.so*"):
        (names / file.name).symlink_to(file)
    with contextlib.suppress(FileExistsError):
        (names / "libcufile.so").symlink_to(library)
    environment = environment_of(plan)
    path = [str(names), environment.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, path))
    if not Path("/etc/cufile.json").exists() and "CUFILE_ENV_PATH_JSON" not in environment:
        settings = names / "cufile.json"
        settings.write_text('{"properties": {"allow_compat_mode": true}}\n')
        environment["CUFILE_ENV_PATH_JSON"] = str(settings)
    return run_side(plan, "nvidia", [], environment)


def over_ours(plan: Plan) -> Part:
    return run_side(plan, "ugds", [sys.executable, "-m", "ugds", "run", "--json", "--"], environment_of(plan))


def verdict(theirs: Part, ours: Part, library: Path) -> list[str]:
    """What is not as it must be."""
    wrong = [
        f"{test}: passed over NVIDIA's, {ours.outcomes.get(test, 'not there')} over ours: {ours.words.get(test, '')}"
        for test, outcome in sorted(theirs.outcomes.items())
        if outcome == "passed" and ours.outcomes.get(test) != "passed"
    ]
    wrong += [f"over ours: {problem}" for problem in ours.problems]
    folders = {str(Path(report["library"]).parent) for report in ours.reports}
    if len(folders) != 1 or not ours.libraries:
        wrong.append("`ugds run` did not tell of our library")
    wrong += [f"over ours: {path} was loaded" for path in ours.libraries if str(Path(path).parent) not in folders]
    counters = totals(ours)
    if not counters.get("driver_opens") or not any(counters.get(name) for name in REQUESTS):
        wrong.append(f"our counters did not move: {counters}")
    if str(library) not in theirs.libraries:
        wrong.append(f"NVIDIA's library was not the one that was loaded in its turn: {sorted(theirs.libraries)}")
    if "passed" not in theirs.outcomes.values():
        wrong.append("over NVIDIA's nothing passed, so that nothing is compared")
    return wrong


def totals(ours: Part) -> dict[str, int]:
    """The counters of all processes together."""
    sums: Counter[str] = Counter()
    for report in ours.reports:
        sums.update(report["totals"])
    return dict(sums)


def one_line(words: str) -> str:
    return " ".join(words.split())[:300]


def told(outcomes: Sequence[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(Counter(outcomes).items())) or "-"


def print_table(theirs: Part, ours: Part) -> None:
    """A line for each test function, of all its parameters; then each test that differs or did not pass."""
    groups: dict[str, list[str]] = {}
    for test in [*theirs.outcomes, *(test for test in ours.outcomes if test not in theirs.outcomes)]:
        groups.setdefault(test.split("[", 1)[0], []).append(test)
    rows = [("test", "NVIDIA's", "ours")]
    for group, tests in sorted(groups.items()):
        rows.append((group, *(told([s.outcomes.get(test, "not there") for test in tests]) for s in (theirs, ours))))
    rows.append(("all", told(list(theirs.outcomes.values())), told(list(ours.outcomes.values()))))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for name, side in (("NVIDIA's", theirs), ("ours", ours)):
        bad = [test for test, outcome in side.outcomes.items() if outcome not in ("passed", "skipped")]
        for test in sorted(bad)[:SHOWN]:
            print(f"over {name}: {side.outcomes[test]} {test}: {one_line(side.words.get(test, ''))}")
        if len(bad) > SHOWN:
            print(f"over {name}: and {len(bad) - SHOWN} more, in report.json")
        for problem in side.problems:
            print(f"over {name}: {problem}")


def compare(plan: Plan, library: Path) -> int:
    before = time.monotonic()
    with known_to_udev(plan.scratch, plan.udev) as entry:
        print(f"udev: {entry}", flush=True)
        # Ours has its time, whatever hangs over theirs.
        theirs = over_nvidias(replace(plan, deadline=(before + plan.deadline) / 2), library)
    between = time.monotonic()
    ours = over_ours(plan)
    print_table(theirs, ours)
    print(f"loaded over NVIDIA's: {', '.join(sorted(theirs.libraries)) or 'none'} ({between - before:.0f} s)")
    print(f"loaded over ours: {', '.join(sorted(ours.libraries)) or 'none'} ({time.monotonic() - between:.0f} s)")
    counters = totals(ours)
    print("our counters: " + (", ".join(f"{name} {value}" for name, value in counters.items()) or "none"))
    wrong = verdict(theirs, ours, library)
    for line in wrong[: 2 * SHOWN]:
        print(f"FAIL  {one_line(line)}")
    if len(wrong) > 2 * SHOWN:
        print(f"FAIL  and {len(wrong) - 2 * SHOWN} more, in report.json")
    sides = {
        name: {"outcomes": side.outcomes, "words": side.words} for name, side in (("nvidia", theirs), ("ugds", ours))
    }
    report = {"suite": plan.suite.name, "wrong": wrong, "counters": counters, **sides}
    (plan.logs / "report.json").write_text(json.dumps(report, indent=1))
    passed = sum(outcome == "passed" for outcome in theirs.outcomes.values())
    said = "NOT as it must be over ours" if wrong else "and all of them over ours"
    print(f"{plan.suite.name}: {passed} passed over NVIDIA's, {said}")
    return 1 if wrong else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--folder", type=Path, required=True, help="a folder of tests, or one that has several suites")
    parser.add_argument("--suite", help="the suite's name in that folder")
    parser.add_argument("--library", type=Path, help="NVIDIA's libcufile.so.0, where it is not found by itself")
    parser.add_argument("--scratch", type=Path, default=Path("/var/tmp"), help="where files are read and written")
    parser.add_argument("--logs", type=Path, help="where output, and report.json, are kept")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--test-limit", type=float, default=60, help="seconds for one test (default 60)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for everything (default 600)")
    parser.add_argument("--no-udev", action="store_true", help="make no entry for the disk in /run/udev")
    parser.add_argument("arguments", nargs="*", help="pytest's arguments, after --")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    suite = (options.folder / options.suite if options.suite else options.folder).resolve()
    library = options.library.resolve() if options.library else nvidias()
    try:
        if not suite.is_dir():
            raise Nothing(f"{suite} is no folder: name one with tests by --folder and --suite")
        if library is None or not library.is_file():
            raise Nothing("NVIDIA's libcufile.so.0 was not found: install nvidia-cufile, or name it by --library")
    except Nothing as error:
        print(f"nothing was compared: {error}", file=sys.stderr)
        return 2
    scratch = Path(tempfile.mkdtemp(prefix="side-by-side-", dir=options.scratch))
    logs = (options.logs or scratch / "logs").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.limit
    plan = Plan(
        suite, scratch, logs, options.arguments, options.jobs, options.test_limit, deadline, not options.no_udev
    )
    try:
        return compare(plan, library)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
