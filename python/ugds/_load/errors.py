# SPDX-License-Identifier: Apache-2.0
"""Errors of files as a whole, in the form of those of a request."""

from __future__ import annotations

from ugds._core import Error


def failure(
    code: int, operation: str, file: str, cause: str, hint: str, offset: int = 0, length: int = 0, completed: int = 0
) -> Error:
    """A `ugds.Error` of bytes [offset, offset + length) of a file."""
    span = f", bytes {offset} to {offset + length}" if length else ""
    error = Error(code, f"{operation} of {file}{span}: {cause}; {hint}")
    error.operation, error.device, error.cause, error.hint = operation, file, cause, hint
    error.offset, error.length, error.completed = offset, length, completed
    error.status, error.status_text = None, ""
    return error


class InvalidFile(ValueError):
    """A file that is not as its format says. The text tells the file, and what is wrong with it."""
