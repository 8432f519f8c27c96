# SPDX-License-Identifier: Apache-2.0
"""Arrays of those who use GPUs: what can be registered, and streams as each of them names its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ugds
from gpu_support import FAKE, KIB, MIB, expected, store, stored_wrong

# It would take most of the GPU's memory otherwise.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

pytestmark = pytest.mark.skipif(FAKE, reason="frameworks need a GPU")
STORED = 5
SIZE = MIB


def torch_() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


def cupy_() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.parametrize("kind", ["uint8", "float32", "bfloat16", "int64"])
def test_a_torch_tensor_is_read_into(ssd: Any, route: str, kind: str) -> None:
    torch = torch_()
    store(ssd, 0, SIZE, STORED)
    kind_ = getattr(torch, kind)
    tensor = torch.empty(SIZE // kind_.itemsize, dtype=kind_, device="cuda")
    with ugds.register(tensor, require=route) as buffer:
        assert (buffer.memory, buffer.route, buffer.gpu) == ("cuda", route, tensor.device.index)
        assert (buffer.address, buffer.nbytes) == (tensor.data_ptr(), SIZE)
        torch.cuda.synchronize()
        assert ssd.read(buffer) == SIZE
        wanted = torch.from_numpy(expected(0, SIZE, STORED)).cuda()
        assert torch.equal(tensor.view(torch.uint8), wanted)


def test_tensors_of_one_pool_are_registered_side_by_side(ssd: Any, route: str) -> None:
    torch = torch_()
    store(ssd, 0, SIZE, STORED)
    tensors = [torch.zeros(3000 + 4 * i, dtype=torch.uint8, device="cuda") for i in range(0, 40, 4)]
    torch.cuda.synchronize()
    registered = [ugds.register(tensor, require=route) for tensor in tensors]
    wanted = torch.from_numpy(expected(0, SIZE, STORED)).cuda()
    for tensor, buffer in zip(tensors, registered, strict=True):
        assert ssd.read(buffer) == tensor.nbytes
        assert torch.equal(tensor, wanted[: tensor.nbytes])
    for tensor, buffer in zip(tensors, registered, strict=True):
        assert torch.equal(tensor, wanted[: tensor.nbytes])
        buffer.close()


def test_a_tensor_that_is_not_in_one_piece_is_refused(ssd: Any) -> None:
    torch = torch_()
    with pytest.raises((ugds.Error, BufferError)):
        ugds.register(torch.empty(64, 64, device="cuda")[:, ::2])


@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
def test_torchs_current_stream_orders_requests(ssd: Any, route: str, own: bool) -> None:
    torch = torch_()
    stream = torch.cuda.Stream() if own else torch.cuda.default_stream()
    tensor = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    result = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with ugds.register(tensor, require=route) as buffer, torch.cuda.stream(stream):
        for turn in range(50):
            torch.cuda._sleep(10_000)
            tensor.fill_(turn + 1)
            ssd.write_async(buffer, turn % 4 * SIZE, stream=torch.cuda.current_stream())
            tensor.fill_(0)
            ssd.read_async(buffer, turn % 4 * SIZE, stream=torch.cuda.current_stream())
            result.copy_(tensor)
            ugds.synchronize(torch.cuda.current_stream())
            torch.cuda.current_stream().synchronize()
            assert bool((result == turn + 1).all()), turn


def test_torchs_default_stream_is_taken_where_none_is_named(ssd: Any, route: str) -> None:
    torch = torch_()
    tensor = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with ugds.register(tensor, require=route) as buffer:
        torch.cuda._sleep(20_000_000)
        tensor.fill_(7)
        ssd.write_async(buffer)
        tensor.fill_(9)
        ssd.read_async(buffer)
        assert bool((tensor == 7).all())
        ugds.synchronize()


def test_torchs_graph_capture_is_refused_and_goes_on(ssd: Any, route: str) -> None:
    torch = torch_()
    tensor = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    with ugds.register(tensor, require=route) as buffer:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor += 1
            with pytest.raises(ugds.Error):
                ssd.read_async(buffer, stream=torch.cuda.current_stream())
        graph.replay()
        torch.cuda.synchronize()
        assert bool((tensor == 1).all())


def test_a_cupy_array_and_its_current_stream(ssd: Any, route: str) -> None:
    cupy = cupy_()
    store(ssd, 0, SIZE, STORED)
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        array = cupy.zeros(SIZE // 4, cupy.float32)
        cupy.cuda.Device().synchronize()
        with ugds.register(array, require=route) as buffer, stream:
            assert buffer.nbytes == SIZE
            ssd.read_async(buffer, stream=cupy.cuda.get_current_stream())
            copy = array.view(cupy.uint8).copy()
            ugds.synchronize(cupy.cuda.get_current_stream())
            stream.synchronize()
            assert (cupy.asnumpy(copy) == expected(0, SIZE, STORED)).all()


def test_a_numba_array_and_its_stream(ssd: Any, route: str) -> None:
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("this numba has no CUDA")
    store(ssd, 0, SIZE, STORED)
    array, stream = cuda.device_array(SIZE, np.uint8), cuda.stream()
    with ugds.register(array, require=route) as buffer:
        assert ssd.read_async(buffer, stream=stream).result(timeout=10) == SIZE
        stream.synchronize()
        assert (array.copy_to_host() == expected(0, SIZE, STORED)).all()


def test_a_jax_array_is_written_from(ssd: Any, route: str) -> None:
    """Whose contents nobody may change, so that is all that is asked of one."""
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"this jax has no CUDA: {error}")
    array = jax.device_put(expected(0, SIZE, STORED), device)
    array.block_until_ready()
    with ugds.register(array, require=route) as buffer:
        assert ssd.write(buffer) == SIZE
    assert stored_wrong(ssd, 0, SIZE, 0, STORED) == 0


class OnlyDlpack:
    """What an array says of itself by DLPack alone."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class OnlyInterface:
    """And by the CUDA array interface alone."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self.kept = array


@pytest.mark.parametrize("by", [OnlyDlpack, OnlyInterface])
@pytest.mark.parametrize("made", ["torch", "cupy"])
def test_either_protocol_is_enough(ssd: Any, route: str, made: str, by: Callable[[Any], Any]) -> None:
    store(ssd, 0, 64 * KIB, STORED)
    if made == "torch":
        torch = torch_()
        array = torch.zeros(64 * KIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
    else:
        array = cupy_().zeros(64 * KIB, "u1")
        cupy_().cuda.Device().synchronize()
    with ugds.register(by(array), require=route) as buffer:
        assert (buffer.memory, buffer.nbytes) == ("cuda", 64 * KIB)
        assert ssd.read(buffer) == 64 * KIB
    host = array.cpu().numpy() if made == "torch" else cupy_().asnumpy(array)
    assert (host == expected(0, 64 * KIB, STORED)).all()


def test_the_dlpack_of_a_closed_registration_is_let_go(ssd: Any, route: str) -> None:
    torch = torch_()
    tensor = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
    held = torch.cuda.memory_allocated()
    buffer = ugds.register(OnlyDlpack(tensor), require=route)
    del tensor
    assert torch.cuda.memory_allocated() == held  # the registration holds it
    buffer.close()
    del buffer
    assert torch.cuda.memory_allocated() <= held - 8 * MIB
