# SPDX-License-Identifier: Apache-2.0
"""QEMU: finding or installing it, its command line, and its machine protocol (QMP)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from boots import Boot

PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "modprobe": "kmod",
    "depmod": "kmod",
    "mkfs.ext4": "e2fsprogs",
}


class Unavailable(Exception):
    """Why a virtual machine cannot be had here, and what a person can do about it."""


def which(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin:/usr/bin:/bin")


def apt(*arguments: str, cwd: Path | None = None) -> None:
    """Runs apt-get. Raises Unavailable with the end of what it said."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        raise Unavailable(f"{' '.join(command)} failed:\n{said}")


def ensure() -> str:
    """The path of QEMU, with what else the suite needs. Installs Debian's packages where they are missing and we are
    root; else raises Unavailable."""
    machine = os.uname().machine
    if machine != "x86_64":
        raise Unavailable(f"the virtual machines are x86-64, and emulating them on {machine} was never tried")
    missing = sorted({package for program, package in PACKAGES.items() if which(program) is None})
    if missing:
        wanted = " ".join(missing)
        if which("apt-get") is None:
            raise Unavailable(f"these are missing, by their Debian names: {wanted}")
        if os.geteuid() != 0:
            raise Unavailable(f"these are missing; install them by: sudo apt-get install -y {wanted}")
        print(f"  installing {wanted}", flush=True)
        apt("update", "-qq")
        apt("install", "-y", "-qq", "--no-install-recommends", *missing)
    named = os.environ.get("UGDS_VM_QEMU")
    found = which(named or "qemu-system-x86_64")
    if named and found is None:
        raise Unavailable(f"UGDS_VM_QEMU names {named}, which is no program")
    if found is None:
        raise Unavailable("qemu-system-x86_64 is still not there after its package was installed")
    return found


def command_line(
    qemu: str, boot: Boot, kernel: Path, initramfs: Path, share: Path, sockets: Path, console: Path, append: str
) -> list[str]:
    """Everything but the devices under test. Emulated (TCG), so that it runs wherever QEMU does."""
    words = "console=ttyS0 mitigations=off nokaslr quiet panic=-1 random.trust_cpu=on intel_iommu=on"
    words += " no_timer_check"  # on a busy host the timer is found not to work, and the guest panics
    plain = "security_model=none,multidevs=remap"
    return [
        *[qemu, "-machine", "q35,kernel-irqchip=split", "-accel", "tcg,thread=multi", "-cpu", f"{boot.cpu},la57=off"],
        *["-smp", str(boot.cpus), "-m", f"{boot.memory >> 20}M", "-display", "none", "-vga", "none", "-nodefaults"],
        *["-no-reboot", "-serial", f"file:{console}", "-qmp", f"unix:{sockets / 'qmp'},server=on,wait=off"],
        *["-kernel", str(kernel), "-initrd", str(initramfs), "-append", f"{words} {append} {boot.append}".strip()],
        *(["-device", "intel-iommu,intremap=on,caching-mode=on"] if boot.iommu else []),
        *["-virtfs", f"local,path=/,mount_tag=root,readonly=on,{plain}"],
        *["-virtfs", f"local,path={share},mount_tag=job,{plain}"],
        *["-chardev", f"socket,id=rpc,path={sockets / 'rpc'},server=on,wait=off", "-device", "virtio-serial-pci"],
        *["-device", "virtserialport,chardev=rpc,name=ugds.rpc"],
    ]


class QmpError(Exception):
    """What QEMU answered instead of a result."""


def connect(path: Path, seconds: float) -> socket.socket:
    """A connection to a socket that QEMU is about to make. Raises ConnectionError when it does not in time."""
    deadline = time.monotonic() + seconds
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(str(path))
            return link
        except OSError as error:
            link.close()
            if time.monotonic() > deadline:
                raise ConnectionError(f"QEMU's socket {path.name} cannot be reached: {error}") from error
            time.sleep(0.05)


class Qmp:
    """A QMP connection. Thread-safe: a reader thread sorts answers from events, which are kept, with their order."""

    def __init__(self, path: Path) -> None:
        self._link = connect(path, 20)
        self._changed = threading.Condition()
        self._calling = threading.Lock()
        self._answers: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._closed = False
        threading.Thread(target=self._read, args=(self._link.makefile("rb"),), daemon=True).start()
        self.call("qmp_capabilities")

    def _read(self, lines: Iterable[bytes]) -> None:
        try:
            for line in lines:
                message = json.loads(line)
                with self._changed:
                    if "event" in message:
                        self._events.append(message)
                    elif "QMP" not in message:
                        self._answers.append(message)
                    self._changed.notify_all()
        except (OSError, ValueError):
            pass
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def call(self, command: str, arguments: dict[str, Any] | None = None) -> Any:
        """Runs a command. Raises QmpError with QEMU's words, ConnectionError where it has gone."""
        with self._calling, self._changed:
            self._answers.clear()
            request = {"execute": command, **({"arguments": arguments} if arguments else {})}
            self._link.sendall(json.dumps(request).encode() + b"\n")
            if not self._changed.wait_for(lambda: self._answers or self._closed, 30):
                raise ConnectionError(f"QEMU did not answer {command} within 30 s")
            if not self._answers:
                raise ConnectionError(f"QEMU ended during {command}")
            answer = self._answers.pop(0)
        if "error" in answer:
            raise QmpError(f"{command}: {answer['error'].get('desc')}")
        return answer.get("return")

    def monitor(self, line: str) -> str:
        """Runs a line of the human monitor and gives what it prints."""
        return str(self.call("human-monitor-command", {"command-line": line}))

    def events(self) -> list[dict[str, Any]]:
        """Every event so far, oldest first."""
        with self._changed:
            return list(self._events)

    def wait_event(self, name: str, data: dict[str, Any], since: int, seconds: float) -> dict[str, Any] | None:
        """The first event called `name`, from number `since` on, that has all of `data`; None if none came in time."""

        def found() -> dict[str, Any] | None:
            for event in self._events[since:]:
                if event["event"] == name and data.items() <= event.get("data", {}).items():
                    return event
            return None

        with self._changed:
            self._changed.wait_for(lambda: found() or self._closed, seconds)
            return found()

    def close(self) -> None:
        self._link.close()
