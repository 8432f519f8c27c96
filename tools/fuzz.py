# SPDX-License-Identifier: Apache-2.0
"""./test --fuzz: builds the fuzzer's targets (tests/fuzz) with clang, and runs each for so many seconds.

    .venv/bin/python tools/fuzz.py keep    adds what the last runs found to tests/fuzz/corpus, smallest inputs only

An input that breaks something is left in build/fuzz/broken. Once it is mended the input belongs into the corpus: every
build of the tests replays that, without clang.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import workspace
from workspace import ROOT, SetupError

BUILD = ROOT / "build" / "fuzz"
PROGRAM = BUILD / "tests" / "fuzz" / "fuzz_targets"
FOUND = ROOT / "build" / "fuzz-found"
BROKEN = ROOT / "build" / "fuzz-broken"
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
#: Of one input: a target that takes longer than this for one hangs.
TIMEOUT_S = 30
OPTIONS = ["-max_len=700", f"-timeout={TIMEOUT_S}", "-rss_limit_mb=3000", "-print_final_stats=1"]
#: The second is for some seconds among all tests: it builds in two thirds of the time, and what is kept is replayed
#: under both sanitizers anyway.
THOROUGH, QUICK = "fuzzer-no-link,address,undefined", "fuzzer-no-link,address"
PROBE = '#include <cstddef>\nextern "C" int LLVMFuzzerTestOneInput(const char*, std::size_t) { return 0; }\n'
_STATISTIC = re.compile(r"stat::(\w+):\s*(\d+)")


@dataclass
class Outcome:
    target: str
    words: str
    output: str = ""  #: where it failed


def targets() -> list[str]:
    return sorted(p.name for p in CORPUS.iterdir() if p.is_dir())


def missing() -> str | None:
    """Why nothing can be fuzzed here, in words."""
    if shutil.which("clang++") is None:
        return "there is no clang++ (Debian: clang libclang-rt-14-dev)"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(
            '#include <cstddef>\nextern "C" int LLVMFuzzerTestOneInput(const char*, std::size_t) { return 0; }\n'
        )
        command = ["clang++", "-std=c++20", "-fsanitize=fuzzer,address", str(source), "-o", str(Path(folder) / "probe")]
        if subprocess.run(command, capture_output=True).returncode != 0:
            return "clang++ has no libFuzzer (Debian: libclang-rt-14-dev)"
    return None


def build(sanitizers: str = THOROUGH) -> None:
    """Raises SetupError with the compiler's words."""
    configure = ["cmake", "-S", ".", "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_C_COMPILER=clang"]
    configure += ["-DCMAKE_CXX_COMPILER=clang++", "-DUGDS_FUZZ=ON", f"-DUGDS_SANITIZE={sanitizers}"]
    log = BUILD.with_suffix(".log")
    os.environ["PATH"] = f"{workspace.VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"
    workspace.run("  configuring fuzz", configure, log)
    workspace.run("  building fuzz", ["cmake", "--build", str(BUILD), "--target", PROGRAM.name], log)


def run(target: str, seconds: int, *more: str) -> Outcome:
    """One target, on what is kept and what was found before."""
    found = FOUND / target
    for folder in (found, BROKEN):
        folder.mkdir(parents=True, exist_ok=True)
    command = [str(PROGRAM), *OPTIONS, f"-max_total_time={seconds}", f"-artifact_prefix={BROKEN}/{target}-", *more]
    command += [str(found), str(CORPUS / target)]
    environment = {**os.environ, "UGDS_FUZZ_TARGET": target, "ASAN_OPTIONS": "detect_leaks=1"}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=seconds + 4 * TIMEOUT_S + 60,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return Outcome(target, "it did not end", output[-4000:])
    figures = dict(_STATISTIC.findall(done.stdout))
    covered = re.findall(r"cov: (\d+)", done.stdout)
    words = f"{figures.get('number_of_executed_units', '?')} inputs, {covered[-1] if covered else '?'} edges reached"
    if done.returncode == 0:
        return Outcome(target, words)
    lines = [line for line in done.stdout.splitlines() if not re.match(r"#\d+\s|\s*NEW_FUNC", line)]
    return Outcome(target, words, "\n".join(lines[-80:]) or f"exit status {done.returncode}")


def run_all(seconds: int, *more: str) -> list[Outcome]:
    """Two at a time where there are two processors."""
    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda target: run(target, seconds, *more), targets()))


def keep() -> int:
    for target in targets():
        environment = {**os.environ, "UGDS_FUZZ_TARGET": target}
        with tempfile.TemporaryDirectory() as folder:
            # By edges alone: how often one was passed would keep ten times as many.
            merge = [str(PROGRAM), "-set_cover_merge=1", "-use_counters=0", folder]
            merge += [str(CORPUS / target), str(FOUND / target)]
            (FOUND / target).mkdir(parents=True, exist_ok=True)
            subprocess.run(merge, env=environment, check=True, capture_output=True)
            kept = {p.name for p in (CORPUS / target).iterdir()}
            new = [p for p in Path(folder).iterdir() if p.name not in kept]
            for path in new:
                shutil.copy(path, CORPUS / target / path.name)
        print(f"{target}: {len(new)} more")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] != ["keep"]:
        sys.exit(__doc__)
    try:
        build()
    except SetupError as error:
        sys.exit(str(error))
    sys.exit(keep())
