# SPDX-License-Identifier: Apache-2.0
"""The first root of a guest: it mounts the host's root read-only over 9p, a tmpfs over that, and runs the job in it."""

from __future__ import annotations

import gzip
import lzma
import os
import stat
from pathlib import Path

import kernel
import qemu
from kernel import Kernel

APPLETS = ["sh", "mount", "umount", "insmod", "mkdir", "cat", "cut", "echo", "sed", "dmesg", "chroot", "poweroff", "ln"]
EARLY_MODULES = ["virtio_pci", "9pnet_virtio", "9p", "overlay"]

# cache=loose suits a root that nobody changes meanwhile; the job's folder is shared with the host at every moment.
INIT = """#!/bin/sh
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for m in $(cat /mods/order); do insmod "/mods/$m" || echo "guest: module $m failed"; done
o=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o ro,$o,cache=loose root /ro || echo "guest: no root"
mount -t tmpfs -o size=75% t /rw; mkdir /rw/u /rw/w
mount -t overlay -o lowerdir=/ro,upperdir=/rw/u,workdir=/rw/w o /new || echo "guest: no overlay"
n=/new
mount -t proc proc $n/proc; mount -t sysfs sys $n/sys; mount -t devtmpfs dev $n/dev
mkdir -p $n/dev/pts $n/dev/shm $n/job $n/lib/modules
mount -t devpts pts $n/dev/pts; mount -t tmpfs shm $n/dev/shm; mount -t tmpfs run $n/run
mount -t debugfs d $n/sys/kernel/debug 2>/dev/null
ln -sf /proc/self/fd $n/dev/fd 2>/dev/null
mount -t 9p -o rw,$o,cache=none job $n/job || echo "guest: no job"
m=$(sed -n 's/.*guest.modules=\\([^ ]*\\).*/\\1/p' /proc/cmdline)
[ -n "$m" ] && mount -o bind "$n$m" $n/lib/modules
echo "guest: up after $(cut -d' ' -f1 /proc/uptime) s"
chroot $n /bin/bash /job/command >$n/job/out 2>&1 </dev/null
echo $? >$n/job/status
dmesg >$n/job/dmesg
umount $n/job
echo "guest: done"
poweroff -f
"""


def entry(name: str, mode: int, data: bytes, number: int) -> bytes:
    """One member of a cpio archive in the "newc" form that the kernel reads."""
    path = name.encode() + b"\0"
    fields = [number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0]
    head = b"070701" + b"".join(b"%08X" % value for value in fields) + path
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)


def make(out: Path, chosen: Kernel) -> None:
    """Writes the archive for that kernel to `out`."""
    busybox = Path(qemu.which("busybox") or "/bin/busybox")
    members: list[tuple[str, int, bytes]] = [
        (folder, stat.S_IFDIR | 0o755, b"") for folder in ("bin", "proc", "sys", "dev", "mods", "ro", "rw", "new")
    ]
    members.append(("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes()))
    members += [(f"bin/{applet}", stat.S_IFLNK | 0o777, b"busybox") for applet in APPLETS]
    order = []
    for file in kernel.module_files(chosen, EARLY_MODULES):
        data = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
        order.append(file.name.removesuffix(".xz"))
        members.append((f"mods/{order[-1]}", stat.S_IFREG | 0o644, data))
    members.append(("mods/order", stat.S_IFREG | 0o644, "\n".join(order).encode()))
    members.append(("init", stat.S_IFREG | 0o755, INIT.encode()))
    archive = b"".join(entry(*member, number) for number, member in enumerate(members, 1))
    archive += entry("TRAILER!!!", 0, b"", 0)
    temporary = out.with_suffix(".new")
    temporary.write_bytes(gzip.compress(archive, 1))
    os.replace(temporary, out)
