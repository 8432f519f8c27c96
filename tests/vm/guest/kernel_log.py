# SPDX-License-Identifier: Apache-2.0
"""The kernel's log as evidence. QEMU completes a transfer whose address faults in the IOMMU with success, so that only
bytes and lines of the log tell that it went wrong."""

from __future__ import annotations

import errno
import os
import re

# What a kernel prints when something is wrong with it, or with how it is used.
TROUBLE = re.compile(
    r"DMAR:.*(fault|DMA Read|DMA Write|PTE|error)|DMA-API:|WARNING:|BUG:|Oops|general protection|"
    r"possible .*(deadlock|locking)|circular locking|inconsistent lock state|suspicious RCU usage|"
    r"INFO: task .* blocked|INFO: rcu.*stall|soft lockup|list_(add|del) corruption|ODEBUG:|refcount_t:|"
    r"kmemleak: [1-9]|bad page state|AER:.*error",
    re.IGNORECASE,
)


class KernelLog:
    """Reads /dev/kmsg from wherever it was last read."""

    def __init__(self) -> None:
        self._fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(self._fd, 0, os.SEEK_END)

    def new_lines(self) -> list[str]:
        """What was logged since the last call."""
        lines: list[str] = []
        while True:
            try:
                record = os.read(self._fd, 8192)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    return lines
                if error.errno == errno.EPIPE:  # the ring was overrun; reading goes on behind the gap
                    lines.append("(some lines of the kernel's log were lost)")
                    continue
                raise
            lines.append(record.split(b";", 1)[1].split(b"\n", 1)[0].decode(errors="replace"))

    def close(self) -> None:
        os.close(self._fd)


def judge(lines: list[str], allowed: tuple[str, ...] = (), tolerated: tuple[str, ...] = ()) -> str:
    """What is wrong with those lines, or nothing. Lines with an allowed word are fine, and each such word must come;
    those with a tolerated one are fine, too, and need not."""
    fine = allowed + tolerated
    bad = [line for line in lines if TROUBLE.search(line) and not any(word in line for word in fine)]
    absent = [word for word in allowed if not any(word in line for line in lines)]
    if bad:
        return "the kernel's log has, from this test:\n" + "\n".join(f"  {line}" for line in lines)
    if absent:
        return f"the kernel's log should have a line with {' and '.join(absent)} from this test, and has none"
    return ""
