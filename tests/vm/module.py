# SPDX-License-Identifier: Apache-2.0
"""Builds ugds_drv.ko, with its fault points, for the kernel of a boot. Debian's headers are its package; those of
another kernel `bzImage-NAME` are `headers-NAME.tar.xz` beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import qemu
from kernel import Kernel
from qemu import Unavailable


class Broken(Exception):
    """The module does not build: what the compiler said."""


SOURCES = ("*.c", "*.h", "uapi/*.h", "Kbuild", "Makefile")


def build(chosen: Kernel, sources: Path, cache: Path) -> Path:
    """The module's file, built again where a source has changed. Raises Unavailable with the reason why it cannot be
    had, Broken where it is at fault."""
    if (make := qemu.which("make")) is None or qemu.which("gcc") is None:
        raise Unavailable("ugds_drv.ko cannot be built: install make and gcc")
    headers = headers_of(chosen, cache)
    folder = cache / "drv" / chosen.image.name
    copy_sources(sources, folder)
    command = [make, "-C", str(headers), f"M={folder}", "UGDS_DRV_FAULTS=1", "W=1", "KCFLAGS=-Werror", "modules"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    module = folder / "ugds_drv.ko"
    if done.returncode != 0 or not module.exists():
        raise Broken(f"ugds_drv.ko does not build for {chosen.version}:\n{done.stdout}{done.stderr}")
    return module


def copy_sources(sources: Path, folder: Path) -> None:
    """Copies what is newer or has never been copied, so that make builds only what it has to."""
    for pattern in SOURCES:
        for source in sources.glob(pattern):
            target = folder / source.relative_to(sources)
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


def headers_of(chosen: Kernel, cache: Path) -> Path:
    if chosen.modules is None:
        return unpacked(chosen.image, cache)
    installed = Path("/usr/src", f"linux-headers-{chosen.version}")
    if not (installed / "Makefile").exists():
        # They name one another by absolute paths, so they have to be installed.
        if qemu.which("apt-get") is None or os.geteuid() != 0:
            raise Unavailable(f"ugds_drv.ko wants the package linux-headers-{chosen.version}")
        print(f"  installing linux-headers-{chosen.version}", flush=True)
        qemu.apt("install", "-y", "-qq", "--no-install-recommends", f"linux-headers-{chosen.version}")
    return installed


def unpacked(image: Path, cache: Path) -> Path:
    """The headers of a kernel that came with an archive of them."""
    name = image.name.replace("bzImage-", "headers-")
    archive = image.with_name(f"{name}.tar.xz")
    folder = cache / "headers" / name
    if not archive.exists():
        raise Unavailable(f"ugds_drv.ko wants {archive.name} beside {image.name}")
    mark = folder / ".from"
    stamp = f"{archive.stat().st_size} {archive.stat().st_mtime_ns}"
    if not mark.exists() or mark.read_text() != stamp:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tarfile.open(archive) as file:
            file.extractall(folder)
        mark.write_text(stamp)
    inside = [path.parent for path in folder.glob("*/Module.symvers")] or [folder]
    return inside[0]
