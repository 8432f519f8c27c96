# SPDX-License-Identifier: Apache-2.0
"""Which kernel a boot runs. Flavours "iommufd" and "debug" are files bzImage-*iommufd and bzImage-*debug in the folder
`$UGDS_VM_KERNELS`, or in shared/vm beside the checkout; "debian" is the distribution's stock kernel, fetched by apt;
"any" is iommufd, or else debian."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import qemu
from qemu import Unavailable


@dataclass(frozen=True)
class Kernel:
    image: Path
    version: str
    modules: Path | None = None  # the root below which lib/modules/VERSION lies


def version_of(image: Path) -> str:
    """The version that an x86 boot image carries (Linux/x86 boot protocol: offset 0x20e, from 0x200 on)."""
    data = image.read_bytes()[:0x10000]
    start = int.from_bytes(data[0x20E:0x210], "little") + 0x200
    return data[start : data.index(b"\0", start)].decode().split()[0]


def folder(root: Path) -> Path | None:
    named = os.environ.get("UGDS_VM_KERNELS")
    if named:
        if not Path(named).is_dir():
            raise Unavailable(f"UGDS_VM_KERNELS names {named}, which is no folder")
        return Path(named)
    beside = root.parent / "shared" / "vm"
    return beside if beside.is_dir() else None


def find(flavour: str, root: Path, cache: Path) -> Kernel:
    """The kernel of that flavour. Raises Unavailable with the reason."""
    if flavour == "debian":
        return debian(cache)
    if flavour == "any":
        try:
            return find("iommufd", root, cache)
        except Unavailable:
            return debian(cache)
    where = folder(root)
    images = sorted(where.glob(f"bzImage-*{flavour}")) if where else []
    if not images:
        place = f"{where} has none" if where else "UGDS_VM_KERNELS is not set"
        raise Unavailable(
            f"it wants a kernel bzImage-*{flavour}, and {place} (docs/virtual-machine.md says how to make it)"
        )
    return Kernel(images[-1], version_of(images[-1]))


def unpacked(cache: Path) -> Kernel | None:
    for image in sorted(cache.glob("boot/vmlinuz-*-amd64"), reverse=True):
        version = image.name.removeprefix("vmlinuz-")
        if (cache / "lib" / "modules" / version / "modules.dep").exists():
            return Kernel(image, version, cache)
    return None


def debian(cache: Path) -> Kernel:
    """Debian's stock kernel, unpacked into `cache` and not installed: nothing of this machine's boot changes."""
    if (found := unpacked(cache)) is not None:
        return found
    if qemu.which("apt-get") is None or qemu.which("dpkg-deb") is None:
        raise Unavailable("it wants Debian's kernel, and this system has no apt-get and dpkg-deb")
    cache.mkdir(parents=True, exist_ok=True)
    name = newest()
    if name is None and os.geteuid() == 0:
        qemu.apt("update", "-qq")
        name = newest()
    if name is None:
        raise Unavailable("apt knows no linux-image-amd64 (apt-get update may help)")
    print(f"  fetching {name}", flush=True)
    try:
        qemu.apt("download", "-qq", name, cwd=cache)
    except Unavailable:
        if os.geteuid() != 0:
            raise
        qemu.apt("update", "-qq")  # a list that is older than the archive names files that have gone
        name = newest() or name
        qemu.apt("download", "-qq", name, cwd=cache)
    for package in cache.glob(f"{name}_*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(cache)], check=True, stdin=subprocess.DEVNULL)
        package.unlink()
    version = name.removeprefix("linux-image-")
    subprocess.run([qemu.which("depmod") or "depmod", "-b", str(cache), version], check=True, stdin=subprocess.DEVNULL)
    if (found := unpacked(cache)) is None:
        raise Unavailable(f"{name} was unpacked, and holds no kernel with modules")
    return found


def newest() -> str | None:
    """The package that linux-image-amd64 stands for."""
    command = ["apt-cache", "depends", "linux-image-amd64"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    names = re.findall(r"Depends: (linux-image-[\w.+-]+)", done.stdout)
    return names[0] if names else None


def module_files(kernel: Kernel, names: list[str]) -> list[Path]:
    """The files of modules and of what they need, in the order of loading; those that are built in have none."""
    files: list[Path] = []
    if kernel.modules is None:
        return files
    for name in names:
        command = [qemu.which("modprobe") or "modprobe", "-d", str(kernel.modules), "-S", kernel.version]
        done = subprocess.run([*command, "--show-depends", name], capture_output=True, text=True)
        if done.returncode != 0:
            raise Unavailable(f"{kernel.image.name} has no module {name}: {done.stderr.strip()}")
        found = [Path(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("insmod ")]
        files += [file for file in found if file not in files]
    return files
