# SPDX-License-Identifier: Apache-2.0
"""Memory that loading a file takes beside its tensors, at its most: of the GPU and of the process, staging memory and
whatever a library sets up at its first use. So each is loaded once, in a fresh process.

    python -m ugds.bench._beyond WHO PATH GPU
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ugds._load.memory import torch_module
from ugds._report import CommandError

MIB = 1 << 20
#: Between two looks.
_INTERVAL_S = 0.002


def measure(who: str, path: Path, gpu: int | None) -> float:
    """MiB. Raises CommandError where it cannot be loaded."""
    command = [sys.executable, "-m", "ugds.bench._beyond", who, str(path), "none" if gpu is None else str(gpu)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        said = "\n  ".join(done.stderr.strip().splitlines()[-3:])
        raise CommandError(f"loading by {who} in a process of its own failed:\n  {said}")
    return float(json.loads(done.stdout.splitlines()[-1])["mib"])


def _host_bytes() -> int:
    """Of the process, without what the kernel could drop: pages of files."""
    status = Path("/proc/self/status").read_text()
    return sum(int(status.split(f"{name}:")[1].split()[0]) << 10 for name in ("RssAnon", "RssShmem", "HugetlbPages"))


def _gpu_bytes(gpu: int) -> int:
    free, total = torch_module().cuda.mem_get_info(gpu)
    return int(total - free)


def most(load: Callable[[], Any], used: Callable[[], int]) -> tuple[int, Any]:
    """By how many bytes what is used grows while `load` runs, at its most, and what that gave."""
    gc.collect()
    before = used()
    seen = [before]
    over = threading.Event()

    def look() -> None:
        while not over.wait(_INTERVAL_S):
            seen.append(used())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        loaded = load()
    finally:
        over.set()
        looking.join()
    seen.append(used())
    return max(seen) - before, loaded


def _main(who: str, path: Path, gpu: int | None) -> None:
    from ugds.bench.weights import loaders

    load = loaders(path, gpu)[who]
    if gpu is not None:
        torch_module().empty(1, device=f"cuda:{gpu}")  # CUDA itself is in use before

    def used() -> int:
        return _host_bytes() + (0 if gpu is None else _gpu_bytes(gpu))

    grown, loaded = most(load, used)
    tensors = sum(tensor.nbytes for tensor in loaded.values())
    print(json.dumps({"mib": (grown - tensors) / MIB}))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), None if sys.argv[3] == "none" else int(sys.argv[3]))
