# SPDX-License-Identifier: Apache-2.0
"""The four ways in. Each begins a request and gives what became of it: a name and the bytes moved, command by command
where the way tells that."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from typing import Any

import ugds
from ugds.bench import cuda

#: Of one request: "ok" or the error's name, and the error.
Outcome = tuple[str, ugds.Error | None]


def name_of(error: BaseException) -> str:
    code = getattr(error, "errno", None)
    if code == errno.EOPNOTSUPP:  # which Python calls by its other name
        return "EOPNOTSUPP"
    return errno.errorcode.get(code, str(code)) if code else type(error).__name__


def caught(call: Callable[[], Any], wanted: int) -> Outcome:
    try:
        got = call()
    except OSError as error:
        return name_of(error), error if isinstance(error, ugds.Error) else None
    return ("ok", None) if got == wanted else (f"{got} bytes of {wanted}", None)


class Way:
    """A request in flight."""

    def __init__(self, device: ugds.Device, buffer: ugds.Registration, op: str, offset: int, parts: int) -> None:
        self.device, self.buffer, self.op, self.offset, self.parts = device, buffer, op, offset, parts

    def begin(self) -> None: ...
    def finish(self, timeout: float) -> list[Outcome]:
        """One outcome, or one for each part. Raises TimeoutError where there is none by then."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of what the way holds itself. The request has ended."""


class Sync(Way):
    def begin(self) -> None:
        self.outcome: list[Outcome] = []
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            call = getattr(self.device, self.op)
            self.outcome.append(caught(lambda: call(self.buffer, self.offset), self.buffer.nbytes))
        except BaseException as error:
            self.failure = error

    def finish(self, timeout: float) -> list[Outcome]:
        self.thread.join(timeout)
        if self.failure is not None:
            raise self.failure
        if not self.outcome:
            raise TimeoutError
        return self.outcome


class Batch(Way):
    def begin(self) -> None:
        self.batch = self.device.batch(self.parts)
        size = self.buffer.nbytes // self.parts
        places = [n * size for n in range(self.parts)]
        call = getattr(self.batch, self.op)
        self.cookies = list(call(self.buffer, [self.offset + at for at in places], size, places))

    def finish(self, timeout: float) -> list[Outcome]:
        size, got = self.buffer.nbytes // self.parts, {}
        done = self.batch.completed(self.parts, timeout)
        for one in done:
            assert one.cookie not in got, "a request was told twice"
            outcome = "ok" if one.size == size else f"{one.size} bytes of {size}"
            got[one.cookie] = (outcome if one.error is None else name_of(one.error), one.error)
        if len(got) < self.parts:
            raise TimeoutError
        return [got[cookie] for cookie in self.cookies]

    def close(self) -> None:
        self.batch.close()


class Stream(Way):
    def begin(self) -> None:
        self.stream = cuda.gpu(0).stream()
        call = getattr(self.device, f"{self.op}_async")
        try:
            self.operation = call(self.buffer, self.offset, stream=self.stream.handle)
        except BaseException:
            self.stream.close()
            raise

    def finish(self, timeout: float) -> list[Outcome]:
        def result() -> int:
            return int(self.operation.result(timeout))

        outcome = caught(result, self.buffer.nbytes)
        if outcome[0] == "TimeoutError" or (outcome[0] == "ETIMEDOUT" and not self.operation.done()):
            raise TimeoutError
        self.stream.synchronize()  # it goes on, whatever became of the request
        return [outcome]

    def close(self) -> None:
        del self.operation
        self.stream.close()


class Asyncio(Way):
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        call = getattr(self.device, f"a{self.op}")

        async def start() -> asyncio.Task[int]:
            task = asyncio.ensure_future(call(self.buffer, self.offset))
            await asyncio.sleep(0)
            return task

        try:
            self.task = self.loop.run_until_complete(start())
        except BaseException:
            self.loop.close()
            raise

    def finish(self, timeout: float) -> list[Outcome]:
        async def wait() -> int:
            done, _ = await asyncio.wait([self.task], timeout=timeout)
            if not done:
                raise TimeoutError
            return self.task.result()

        return [caught(lambda: self.loop.run_until_complete(wait()), self.buffer.nbytes)]

    def close(self) -> None:
        del self.task
        self.loop.close()


WAYS: dict[str, type[Way]] = {"sync": Sync, "batch": Batch, "stream": Stream, "asyncio": Asyncio}
