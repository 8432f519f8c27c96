# SPDX-License-Identifier: Apache-2.0
"""The helper by which Python tests use a GPU, here the fake one; with a real one the GPU suite uses the same."""

from __future__ import annotations

import time
from collections.abc import Iterator

import fake_cuda
import pytest
from cuda_driver import CudaError, pattern
from fake_cuda import FakeGpu


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    if fake_cuda.library() is None:
        pytest.skip("there is no fake CUDA driver: ./test builds it")
    gpu = FakeGpu()
    gpu.reset()
    before = {kind: gpu.live(kind) for kind in ("allocations", "pins", "host_allocations", "streams")}
    yield gpu
    gpu.release_waits()
    gpu.close()
    assert {kind: gpu.live(kind) for kind in before} == before
    assert gpu.misuse() == (0, "")


def test_an_array_holds_what_was_put_there(gpu: FakeGpu) -> None:
    array = gpu.alloc(1000)
    array.put(b"abc", offset=7)
    assert array.get(7, 3) == b"abc"
    assert gpu.peek(array.ptr + 7, 3) == b"abc"
    gpu.poke(array.ptr + 999, b"z")
    assert array.get()[-1:] == b"z"
    interface = array.__cuda_array_interface__
    assert interface["data"] == (array.ptr, False)
    assert interface["shape"] == (1000,)


def test_kernels_fill_and_check_as_python_does(gpu: FakeGpu) -> None:
    array, stream = gpu.alloc(5000), gpu.stream()
    gpu.fill(array, 3, stream, offset=1000)
    stream.synchronize()
    assert array.get(1000) == pattern(4000, 3)
    assert gpu.check(array, 3, stream, offset=1000) == 0
    array.put(bytes([array.get(1500, 1)[0] ^ 1]), offset=1500)
    assert gpu.check(array, 3, stream, offset=1000) == 1
    assert gpu.check(array, 3, offset=1000, nbytes=500) == 0


def test_a_stream_waits_for_a_word_and_calls_python(gpu: FakeGpu) -> None:
    stream, words = gpu.stream(), gpu.pinned(4096)
    called: list[int] = []
    stream.write_word(words.ptr, 7)
    stream.wait_word(words.ptr + 64, 1)
    stream.call(lambda: called.append(1))
    deadline = time.monotonic() + 10
    while words.array[0] != 7 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert words.array[0] == 7
    assert not stream.query()
    assert gpu.live("waiting") == 1
    words.array.view("u8")[8] = 1
    stream.synchronize()
    assert stream.query()
    assert called == [1]


def test_faults_and_counts(gpu: FakeGpu) -> None:
    gpu.fail("cuMemAlloc_v2", 2, nth=2)
    gpu.alloc(10)
    with pytest.raises(CudaError, match="cuMemAlloc_v2 gave 2"):
        gpu.alloc(10)
    gpu.alloc(10)
    assert gpu.calls("cuMemAlloc_v2") == 3
    gpu.set("connections", 1)
    assert gpu.trait("connections") == 1
    for wrong in (lambda: gpu.set("nothing", 1), lambda: gpu.fail("cuNothing", 1), lambda: gpu.live("nothing")):
        with pytest.raises(KeyError):
            wrong()
    gpu.reset()
    assert gpu.trait("connections") == 8


def test_a_capture_records_instead_of_running(gpu: FakeGpu) -> None:
    stream, words = gpu.stream(), gpu.pinned(4096)
    stream.begin_capture()
    stream.write_word(words.ptr, 7)
    stream.end_capture()
    stream.synchronize()
    assert words.array[0] == 0
    stream.begin_capture()
    with pytest.raises(CudaError, match="900"):
        stream.synchronize()
    with pytest.raises(CudaError, match="901"):
        stream.end_capture()
