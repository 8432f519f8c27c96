# SPDX-License-Identifier: Apache-2.0
"""What of batches is not native: results as a sequence, waiting for all of them, and the end of a `with` block.

The native `Batch` and `Completions` are public themselves; importing `ugds` gives them what is made here.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ugds._core import Batch, Completions, Error

if TYPE_CHECKING:
    import numpy

    Integers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


class Done(NamedTuple):
    """What became of one request of a batch."""

    cookie: int
    size: int  #: bytes that are right: all of them, or of a request that failed the contiguous prefix
    error: Error | None

    def result(self) -> int:
        """The size. Raises the error, if there is one."""
        if self.error is not None:
            raise self.error
        return self.size


def column(values: Any, name: str) -> Integers:
    """Integers in one piece. Raises TypeError for others."""
    import numpy

    array = numpy.asarray(values)
    if array.ndim == 0:
        array = array.reshape(1)
    if array.size == 0 and not isinstance(values, numpy.ndarray):
        array = array.astype(numpy.int64)  # an empty list has no type
    if array.dtype.kind not in "iu":
        raise TypeError(f'{name} must be an int, text such as "64MiB", or an array of integers, not {array.dtype}')
    if array.dtype.kind == "u" and array.dtype.itemsize == 8:
        return numpy.ascontiguousarray(array, numpy.uint64).view(numpy.int64)
    return numpy.ascontiguousarray(array, numpy.int64)


def repeated(cookie: int, count: int) -> Integers:
    import numpy

    return numpy.full(count, cookie, numpy.int64)


def _getitem(done: Completions, index: int | slice) -> Done | list[Done]:
    if isinstance(index, slice):
        return [Done(*done.item(i)) for i in range(*index.indices(len(done)))]
    return Done(*done.item(range(len(done))[index]))


def _iter(done: Completions) -> Iterator[Done]:
    for i in range(len(done)):
        yield Done(*done.item(i))


def _wait(batch: Batch, timeout: float | None = None) -> Completions:
    """Waits until every request has ended, and gives their results. Where some failed, raises the error of the first,
    with `failures`, a list of the `Done` of those, and `completions`, all results. timeout: seconds, or None.

    Raises `ugds.Error` besides: ETIMEDOUT, which loses nothing; EBADF (closed). Thread-safe; of requests whose results
    other threads collect it tells nothing."""
    done = batch.collect_all(timeout)
    failures = done.errors
    if failures:
        error = failures[0].error
        assert error is not None
        error.failures, error.completions = failures, done
        raise error
    return done


def _enter(batch: Batch) -> Batch:
    return batch


def _exit(batch: Batch, *exception: object) -> None:
    if exception and exception[0] is not None:
        batch.close()
        return
    try:
        if not batch.closed and batch.unknown():
            batch.collect_all(None)
    except BaseException as error:
        batch.abandon()
        if isinstance(error, Error) and error.errno == errno.EBADF:
            raise _failed(
                errno.EBADF, batch, f"what became of {batch.unknown()} requests is not known", error
            ) from None
        raise
    batch.close()
    if (count := batch.unseen()) == 0:
        return
    failures: list[Done] = batch.take_unseen()
    raise _missed(batch, count, failures)


def _missed(batch: Batch, count: int, failures: list[Done]) -> Error:
    """The error of requests that failed while nobody looked."""
    whose = "1 request of the batch failed, and nobody looked at its error"
    if count > 1:
        whose = f"{count} requests of the batch failed, and nobody looked at their errors; the first"
    first = failures[0].error if failures else None
    error = _failed(first.errno if first else errno.EIO, batch, whose, first)
    error.failures = failures
    return error


def _failed(code: int | None, batch: Batch, what: str, why: Error | None) -> Error:
    """An error of the whole batch, with what is known of one that led to it."""
    error = Error(code, f"{what}: {why.strerror}" if why else f"{what} on {batch.device.uri}")
    error.operation, error.device, error.cause, error.hint = "batch", batch.device.uri, what, ""
    error.offset = error.length = error.completed = 0
    error.status, error.status_text = None, ""
    if why is not None:
        for name in ("operation", "offset", "length", "completed", "status", "status_text", "hint"):
            setattr(error, name, getattr(why, name))
        error.cause = f"{what}: {why.cause}"
    return error


def attach() -> None:
    """Gives the native classes what is made here."""
    Error.failures = ()  # of what is no batch
    completions: Any = Completions
    completions.__getitem__ = _getitem
    completions.__iter__ = _iter
    Sequence.register(Completions)
    batch: Any = Batch
    batch.wait = _wait
    batch.__enter__ = _enter
    batch.__exit__ = _exit
