# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the GPU tests. They run on a GPU, and on a driver made of host memory that UGDS_CUDA_LIBRARY names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ugds
import ugds.testing
from ugds.bench import cuda

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # Frameworks warn of each other, and of what is to come.
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)


@pytest.fixture(scope="session")
def gpu() -> cuda.Gpu:
    """The first GPU. Where there is none every test fails by it, and says why: none was asked for without a GPU."""
    return cuda.gpu(0)


@pytest.fixture
def open_ssd() -> Iterator[Callable[..., Any]]:
    """Opens emulated devices, as many as a test wants. None of them may have seen a violation of the protocol."""
    with ExitStack() as stack:

        def open_one(uri: str = "emulated:64MiB", **options: Any) -> Any:
            device = stack.enter_context(ugds.open(uri, **options))
            stack.enter_context(ugds.testing.strict(device))
            return device

        yield open_one


@pytest.fixture
def ssd(open_ssd: Callable[..., Any]) -> Any:
    return open_ssd()


@pytest.fixture
def stream(gpu: cuda.Gpu) -> Iterator[cuda.Stream]:
    with gpu.stream() as made:
        yield made


@pytest.fixture(params=["direct", "staged"])
def route(request: pytest.FixtureRequest) -> str:
    return str(request.param)
