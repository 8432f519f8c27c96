# SPDX-License-Identifier: Apache-2.0
"""A GPU of the fake CUDA driver (tests/fakes/cuda), and what tests may tell that driver.

uGDS finds the same library by UGDS_CUDA_LIBRARY, which has to be set before the process first asks for a GPU.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from cuda_driver import Gpu

# Where ./test builds it, for who runs pytest alone.
_BUILT = Path(__file__).resolve().parents[2] / "build" / "test-release" / "tests" / "libfake_cuda.so"


def library() -> str | None:
    """The fake driver's file: FAKE_CUDA_LIBRARY, or the one that the last ./test built; None where there is none."""
    named = os.environ.get("FAKE_CUDA_LIBRARY")
    if named:
        return named
    return str(_BUILT) if _BUILT.exists() else None


class FakeGpu(Gpu):
    """A GPU of the fake driver. tests/fakes/cuda/fake_cuda.h says what each trait and name below means."""

    def __init__(self, ordinal: int = 0, library_path: str | None = None) -> None:
        path = library_path or library()
        if path is None:
            raise RuntimeError("there is no fake CUDA driver: set FAKE_CUDA_LIBRARY, or let ./test build it")
        fake = ctypes.CDLL(path)
        fake.fake_cuda_get.restype = ctypes.c_double
        fake.fake_cuda_misuse_text.restype = ctypes.c_char_p
        for name in ("calls", "live", "misuse"):
            getattr(fake, f"fake_cuda_{name}").restype = ctypes.c_uint64
        self._fake = fake
        super().__init__(ordinal, path)

    def set(self, trait: str, value: float) -> None:
        """Sets a trait of the driver, such as "connections", until `reset`. KeyError where there is no such."""
        if self._fake.fake_cuda_set(trait.encode(), ctypes.c_double(value)) != 0:
            raise KeyError(trait)

    def trait(self, name: str) -> float:
        return float(self._fake.fake_cuda_get(name.encode()))

    def fail(self, function: str, code: int, nth: int = 1) -> None:
        """Lets the nth call from now of the driver's function give `code`; nth 0: each, until `reset`."""
        if self._fake.fake_cuda_fail(function.encode(), ctypes.c_uint64(nth), code) != 0:
            raise KeyError(function)

    def calls(self, function: str | None = None) -> int:
        """How often the function was called since `reset`; None: all of them together."""
        return int(self._fake.fake_cuda_calls(function.encode() if function else None))

    def live(self, what: str) -> int:
        """How many "allocations", "pins", "streams" … there are."""
        count = int(self._fake.fake_cuda_live(what.encode()))
        if count == 2**64 - 1:
            raise KeyError(what)
        return count

    def misuse(self) -> tuple[int, str]:
        """How often the driver was misused since `reset`, and how it was the last time."""
        return int(self._fake.fake_cuda_misuse()), self._fake.fake_cuda_misuse_text().decode()

    def peek(self, address: int, nbytes: int) -> bytes:
        """Device memory as it is now, past all streams."""
        data = ctypes.create_string_buffer(max(nbytes, 1))
        if self._fake.fake_cuda_peek(data, ctypes.c_uint64(address), ctypes.c_size_t(nbytes)) != 0:
            raise ValueError(f"{nbytes} bytes at {address:#x} are in no allocation")
        return data.raw[:nbytes]

    def poke(self, address: int, data: bytes) -> None:
        if self._fake.fake_cuda_poke(ctypes.c_uint64(address), data, ctypes.c_size_t(len(data))) != 0:
            raise ValueError(f"{len(data)} bytes at {address:#x} are in no allocation")

    def release_waits(self) -> None:
        """Ends every wait for a word that was enqueued until now."""
        self._fake.fake_cuda_release_waits()

    def reset(self) -> None:
        """Traits, faults and counts as at first. What is live stays."""
        self._fake.fake_cuda_reset()
