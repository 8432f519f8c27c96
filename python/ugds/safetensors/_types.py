# SPDX-License-Identifier: Apache-2.0
"""Types of elements as the format, PyTorch and NumPy name them, and tensors made of bytes."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy

from ugds._load.memory import Arena, Bytes, HostArray, TorchArena, torch_device, torch_module
from ugds.safetensors._header import BITS, METADATA, Entry

#: By the format's names; the same in PyTorch and NumPy, or in ml_dtypes.
_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_PACKED = "float4_e2m1fn_x2"  # two elements a byte: the format counts elements, PyTorch pairs


class Framework(NamedTuple):
    """What makes tensors of bytes. `dtype` and `shape` raise ValueError for what it has not."""

    device: Callable[[Any], Any]
    arena: Callable[[int, Any], Arena]
    check: Callable[[Entry], None]  #: raises ValueError for a tensor that the framework cannot have
    tensor: Callable[[Entry, Any, Any], Any]  #: of an entry, its bytes (None where there are none) and a device


def framework(name: str) -> Framework:
    """Raises ValueError for an unknown one, and ImportError where PyTorch is missing."""
    if name in ("pt", "torch", "pytorch"):
        torch_module()
        return Framework(torch_device, TorchArena, _torch_check, _torch_tensor)
    if name in ("np", "numpy"):
        return Framework(_host, lambda size, device: HostArray(size), _numpy_check, _numpy_tensor)
    raise ValueError(f'framework "{name}" is none of "pt" (PyTorch) and "np" (NumPy)')


def align(entry: Entry, on_host: bool) -> int:
    """What the address is a multiple of: of the type's size; and on a GPU of 16 from some size on, as kernels that read
    16 bytes at once like it."""
    own = max(1, BITS[entry.dtype] // 8)
    return own if on_host or entry.size < 4096 else 16


def _host(device: Any) -> str:
    if str(device) != "cpu":
        raise ValueError(f'NumPy has arrays on "cpu" alone, not on "{device}"; what to do: framework="pt"')
    return "cpu"


@functools.cache
def _numpy_dtype(dtype: str) -> Any:
    name = _NAMES.get(dtype)
    try:
        if name is not None:
            return numpy.dtype(name)
    except TypeError:
        try:
            import ml_dtypes

            return numpy.dtype(getattr(ml_dtypes, name or ""))
        except (ImportError, AttributeError):
            pass
    raise ValueError(f"NumPy has no {dtype}; what to do: pip install ml_dtypes" if name else f"NumPy has no {dtype}")


def _numpy_check(entry: Entry) -> None:
    try:
        _numpy_dtype(entry.dtype)
    except ValueError as error:
        raise ValueError(f'tensor "{entry.name}": {error}, or framework="pt"') from None


def _numpy_tensor(entry: Entry, memory: Any, device: Any) -> Any:
    dtype = _numpy_dtype(entry.dtype)
    return numpy.empty(entry.shape, dtype) if memory is None else memory.view(dtype).reshape(entry.shape)


def _torch_dtype(dtype: str) -> Any:
    name = _PACKED if dtype == "F4" else _NAMES.get(dtype)
    found = getattr(torch_module(), name, None) if name else None
    if found is None:
        raise ValueError(f"this PyTorch has no {dtype}")
    return found


def _torch_shape(entry: Entry) -> tuple[int, ...]:
    if entry.dtype != "F4":
        return entry.shape
    if not entry.shape or entry.shape[-1] % 2:
        raise ValueError(f"PyTorch has F4 in pairs, and the last of the shape {entry.shape} is odd")
    return (*entry.shape[:-1], entry.shape[-1] // 2)


def _torch_check(entry: Entry) -> None:
    try:
        _torch_dtype(entry.dtype)
        _torch_shape(entry)
    except ValueError as error:
        raise ValueError(f'tensor "{entry.name}": {error}') from None


def _torch_tensor(entry: Entry, memory: Any, device: Any) -> Any:
    dtype, shape = _torch_dtype(entry.dtype), _torch_shape(entry)
    if memory is None:
        return torch_module().empty(shape, dtype=dtype, device=device)
    return memory.view(dtype).reshape(shape)


# --- Tensors to be saved ---------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: Bytes


def to_save(tensors: Mapping[str, Any]) -> dict[str, Saved]:
    """What the format has of each. Raises ValueError for what it cannot have, by name."""
    if not isinstance(tensors, Mapping):
        raise ValueError(f"tensors are a dict of names and tensors, not {type(tensors).__name__}")
    made: dict[str, Saved] = {}
    spans: list[tuple[tuple[str, int, int], str]] = []
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == METADATA:
            raise ValueError(f"{name!r} is no name of a tensor: names are strings, and not {METADATA}")
        try:
            name.encode()
            made[name] = _of_numpy(tensor) if isinstance(tensor, numpy.ndarray) else _of_torch(tensor)
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from None
        if made[name].data.size and not isinstance(tensor, numpy.ndarray):
            spans.append(((str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes), name))
    spans.sort()
    for (before, first), (after, second) in itertools.pairwise(spans):
        if before[0] == after[0] and after[1] < before[2]:
            raise ValueError(
                f'tensors "{first}" and "{second}" share memory, which the format cannot say; what to do: leave one '
                "out, or save a .clone() of it"
            )
    return made


def _of_numpy(array: Any) -> Saved:
    dtype = next((ours for ours, name in _NAMES.items() if name == array.dtype.name), None)
    if dtype is None:
        raise ValueError(f"the format has no {array.dtype.name}")
    if not array.flags.c_contiguous:
        raise ValueError("it is not in one piece, in C's order; what to do: numpy.ascontiguousarray()")
    shape = array.shape
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.byteswap()
    return Saved(dtype, shape, Bytes(array.reshape(-1).view(numpy.uint8)))


def _of_torch(tensor: Any) -> Saved:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise ValueError(f"it is no tensor or array, but {type(tensor).__name__}")
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = "F4" if name == _PACKED else next((ours for ours, known in _NAMES.items() if known == name), None)
    if dtype is None:
        raise ValueError(f"the format has no {name}")
    if tensor.layout != torch.strided:
        raise ValueError(f"its layout is {tensor.layout}, and the format has dense ones; what to do: .to_dense()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"it is on {tensor.device}, and cpu and cuda can be saved")
    if not tensor.is_contiguous():
        raise ValueError("it is not in one piece, in C's order; what to do: .contiguous()")
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    shape = tuple(tensor.shape)
    if dtype == "F4":
        if not shape:
            raise ValueError("a single pair of F4 has no shape in the format")
        shape = (*shape[:-1], shape[-1] * 2)
    assert flat.numel() * 8 == math.prod(shape) * BITS[dtype]
    return Saved(dtype, shape, Bytes(flat))
