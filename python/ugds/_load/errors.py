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


def taken_for(head: bytes) -> str:
    """What a file is that begins so, and what to do, where it is often taken for one of tensors; "" for others."""
    if head.startswith(b"version https://git-lfs.github.com/"):
        return "it is a git-lfs pointer, which stands for the file; what to do: git lfs pull"
    if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return "it is a web page; what to do: download the file itself"
    return ""


CUT = "it is cut off; what to do: copy or download it again"


class InvalidFile(ValueError):
    """A file that is not as its format says. The text tells the file, and what is wrong with it."""
