# SPDX-License-Identifier: Apache-2.0
"""One guest from boot to power-off: its job, its console, its progress, and what becomes of tests that did not end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import boots
import initramfs
import module
import qemu
import rpc
from boots import Boot
from kernel import Kernel
from qemu import Unavailable

ROOT = Path(__file__).resolve().parents[2]
START_PATIENCE = 300.0  # seconds from the start of QEMU to the first test, on a machine that does much else


@dataclass
class Outcome:
    """What a boot gave. `results` holds test names and "passed", "skipped", "failed", or what counts as that: "hung",
    "missing" for a test that did not run. `reports` is what there is to say of each that did not pass."""

    boot: str
    seconds: float = 0.0
    up_after: float = 0.0  # seconds from the start of QEMU to the first test
    results: dict[str, str] = field(default_factory=dict)
    reports: dict[str, str] = field(default_factory=dict)
    trouble: str = ""  # what went wrong with the guest as a whole

    def count(self, outcome: str) -> int:
        both = ("failed", "hung", "missing") if outcome == "failed" else (outcome,)
        return sum(result in both for result in self.results.values())

    def compare(self, expected: dict[str, str]) -> None:
        """Makes passes of tests that did what they had to, and failures of those that did not, `expected` being what
        has to become of those that must not pass."""
        for name, result in self.results.items():
            wanted = expected.get(name.rpartition("::")[2], "passed")
            self.results[name] = "passed" if result == wanted else "failed"
            if result != wanted:
                self.reports[name] = f"{result}, and should have {wanted}\n{self.reports.get(name, '')}"
        if "hung" in expected.values() and "hung" in self.trouble:
            self.trouble = ""


class Progress:
    """Follows the file in which the guest's pytest notes each test as it starts and as it ends."""

    def __init__(self, path: Path, outcome: Outcome, start: float) -> None:
        self._path, self._outcome, self._start, self._seen = path, outcome, start, 0
        self.last = start  # when something was heard
        self.running = ""

    def follow(self) -> None:
        if not self._path.exists():
            return
        data = self._path.read_bytes()
        end = data.rfind(b"\n") + 1
        for line in data[self._seen : end].splitlines():
            self._note(json.loads(line))
        self._seen = max(self._seen, end)

    def _note(self, entry: dict[str, str]) -> None:
        self.last = time.monotonic()
        if not self._outcome.up_after:
            self._outcome.up_after = self.last - self._start
        if "outcome" in entry:
            self.running = ""
            self._outcome.results[entry["test"]] = entry["outcome"]
            if entry.get("report"):
                self._outcome.reports[entry["test"]] = entry["report"]
        else:
            self.running = entry.get("test", "")


@contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """The folder that the guest shares, and the one beside it for images and sockets. Short paths: a Unix socket's name
    has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="ugds-vm-", dir=os.environ.get("UGDS_VM_TMP")) as name:
        share, private = Path(name, "job"), Path(name, "host")
        share.mkdir()
        private.mkdir()
        yield share, private


def job(boot: Boot, command: str) -> str:
    """The script that runs in the guest. It gets the path and the Python settings of this process and nothing else."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "FAKE_CUDA_LIBRARY") if name in os.environ}
    settings = {"HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "UGDS_VM_BOOT": boot.name, **kept}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    modules = [f"modprobe -a {' '.join(boot.modules)}"] if boot.modules else []
    return "\n".join([*exports, *modules, "ip link set lo up 2>/dev/null", f"cd {shlex.quote(str(ROOT))}", command, ""])


def tests_command(guest_tests: Path, names: list[str], share: Path) -> str:
    """pytest over the named tests, its report as XML in the shared folder."""
    (share / "selected").write_text("\n".join(names))
    options = ["-c", str(guest_tests / "pytest.ini"), "-p", "no:cacheprovider", "--junitxml=/job/junit.xml", "-q"]
    words = [sys.executable, "-m", "pytest", *options, str(guest_tests)]
    return "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 exec " + shlex.join(words)


def give_module(chosen: Kernel, share: Path) -> None:
    """Puts ugds_drv.ko into the shared folder, or the reason why there is none."""
    try:
        shutil.copy(module.build(chosen, ROOT / "drv", ROOT / "build" / "vm"), share)
    except Unavailable as error:
        (share / "no-module").write_text(str(error))


def give_client(share: Path) -> None:
    """Puts the program that is killed into the shared folder."""
    sys.path.append(str(ROOT / "tests" / "python"))
    import journal_client  # of another suite, and with the package that it is linked with

    journal_client.compile_client(share)


def run(boot: Boot, chosen: Kernel, logs: Path, names: list[str], guest_tests: Path) -> Outcome:
    """Boots, runs those tests, and gives what became of each; whatever it was not told of counts as failed."""
    outcome = Outcome(boot.name)
    with folders() as (share, private):
        command = tests_command(guest_tests, names, share)
        if any("_drv" in name for name in names):
            give_module(chosen, share)
        if any("test_killed" in name for name in names):
            give_client(share)
        _boot(boot, chosen, command, share, private, outcome)
        for name in names:
            if name not in outcome.results:
                outcome.results[name] = "missing"
                outcome.reports.setdefault(name, "the guest ended before it")
        if outcome.trouble:
            outcome.trouble += tail(private / "console", "console") + tail(share / "out", "output")
        keep(logs, share, private)
    return outcome


def run_command(boot: Boot, chosen: Kernel, logs: Path, command: str) -> int:
    """Boots, runs a shell command in the guest, prints what it printed, and gives its exit status (99: none came)."""
    outcome = Outcome(boot.name)
    with folders() as (share, private):
        give_module(chosen, share)
        _boot(boot, chosen, command, share, private, outcome)
        output = share / "out"
        print(output.read_text(errors="replace") if output.exists() else "", end="")
        if outcome.trouble:
            print(outcome.trouble + tail(private / "console", "console"))
        status = (share / "status").read_text().strip() if (share / "status").exists() else "99"
        keep(logs, share, private)
    return int(status)


def _boot(boot: Boot, chosen: Kernel, command: str, share: Path, private: Path, outcome: Outcome) -> None:
    start = time.monotonic()
    peer = private / "peer"
    made = boots.topology(boot, private, peer)
    (share / "command").write_text(job(boot, command))
    (share / "boot.json").write_text(json.dumps(boots.described(boot, made)))
    first_root = private / "initramfs"
    initramfs.make(first_root, chosen)
    modules = f"guest.modules={chosen.modules / 'lib' / 'modules'}" if chosen.modules else ""
    line = qemu.command_line(
        qemu.ensure(), boot, chosen.image, first_root, share, private, private / "console", modules
    )
    with (private / "qemu.log").open("wb") as log:
        # Whatever ends this process ends QEMU.
        bound = [setpriv, "--pdeathsig", "KILL"] if (setpriv := qemu.which("setpriv")) else []
        process = subprocess.Popen(
            [*bound, *line, *made.arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _watch(process, boot, share, private, peer, outcome, start)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    outcome.seconds = time.monotonic() - start
    if process.returncode != 0 and not outcome.trouble:
        outcome.trouble = f"QEMU ended with status {process.returncode}"
    elif not (share / "status").exists() and not outcome.trouble:
        outcome.trouble = "the guest ended before its job did"
    if outcome.trouble:
        outcome.trouble += tail(private / "qemu.log", "QEMU")


def _watch(
    process: subprocess.Popen[bytes],
    boot: Boot,
    share: Path,
    private: Path,
    peer: Path,
    outcome: Outcome,
    start: float,
) -> None:
    """Serves the guest until QEMU ends, or until nothing was heard of a test for as long as the boot has patience."""
    progress = Progress(share / "progress", outcome, start)
    try:
        qmp = qemu.Qmp(private / "qmp")
        server = rpc.Server(private / "rpc", qmp, share, private, peer)
    except (ConnectionError, qemu.QmpError) as error:
        outcome.trouble = f"QEMU did not start: {error}"
        return
    while process.poll() is None:
        time.sleep(0.1)
        progress.follow()
        silent = time.monotonic() - progress.last
        if silent > (boot.patience if outcome.up_after else START_PATIENCE):
            doing = f"during {progress.running}" if progress.running else "outside of any test"
            outcome.trouble = f"the guest hung {doing}: nothing was heard of it for {silent:.0f} s, and it was killed"
            break
    progress.follow()
    if progress.running:
        outcome.results[progress.running] = "hung" if outcome.trouble else "failed"
        outcome.reports[progress.running] = outcome.trouble or "the guest ended during this test"
        outcome.trouble = outcome.trouble or f"the guest ended during {progress.running}"
    server.close()
    qmp.close()


def tail(path: Path, what: str, lines: int = 30) -> str:
    """The end of a file, under a title; nothing where it is empty."""
    text = path.read_text(errors="replace").strip() if path.exists() else ""
    return f"\n-- {what}, its end --\n" + "\n".join(text.splitlines()[-lines:]) if text else ""


def keep(logs: Path, share: Path, private: Path) -> None:
    """Copies what tells of a run to where a person can read it."""
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    for path in (share / "out", share / "dmesg", share / "junit.xml", private / "console", private / "qemu.log"):
        if path.exists():
            shutil.copy(path, logs)
