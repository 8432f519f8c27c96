# SPDX-License-Identifier: Apache-2.0
"""What a driver does not do while streams wait for a word (see docs/gpu.md) ends nevertheless, and so do the requests
that the streams wait for: staged ones, on few streams and on many, with any number of connections.

Each case is a process of its own with a bound; a few run at a time, and the first test that needs one starts them all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from gpu_support import run_alone
from hazard import BOUND, HAZARDS

PROGRAM = Path(__file__).with_name("hazard.py")
MANY = 128
#: Streams, and CUDA_DEVICE_MAX_CONNECTIONS: what the driver has by itself, one for all, as many as there can be.
LOADS = {
    "fixed": ((MANY, "default"), (MANY, "1"), (MANY, "32"), (1, "1")),
    "late": ((MANY, "default"), (MANY, "1")),
}

Case = tuple[str, str, int, str]  # what, binding, streams, connections
CASES: list[Case] = [
    (what, binding, count, connections)
    for what in HAZARDS
    for binding, loads in LOADS.items()
    for count, connections in loads
]


def run(case: Case) -> str:
    what, binding, count, connections = case
    chosen = {} if connections == "default" else {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    # Starting a driver takes a while, more so for several processes at once.
    return run_alone(PROGRAM, what, binding, str(count), bound=BOUND + 60, **chosen)


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[str]]]:
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {one.params["case"] for one in chosen if one is not None and "case" in one.params}
    with ThreadPoolExecutor(max(1, min(8, len(os.sched_getaffinity(0)) // 2))) as pool:
        yield {case: pool.submit(run, case) for case in CASES if case in wanted}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_staged_requests_end_beside(running: dict[Case, Future[str]], case: Case) -> None:
    assert "every byte arrived" in running[case].result()
