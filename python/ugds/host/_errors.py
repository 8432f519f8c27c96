# SPDX-License-Identifier: Apache-2.0
"""`ugds.Error` for what goes wrong on the host, with the fields that the library's own errors have."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

from ugds._core import Error


@dataclass(frozen=True)
class Refusal:
    """Why a controller is not moved, and what to do about it. `forcible` ones are those that `force` overrides."""

    reason: str
    remedy: str
    forcible: bool = False


def failure(code: int, operation: str, address: str, cause: str, hint: str = "") -> Error:
    """An error to raise; `code` is an errno."""
    device = f"pci:{address}" if address else ""
    where = f" on {device}" if device else ""
    error = Error(code, f"{operation}{where}: {cause}" + (f"; {hint}" if hint else ""))
    error.operation, error.device = operation, device
    error.offset = error.length = error.completed = 0
    error.status, error.status_text = None, ""
    error.cause, error.hint = cause, hint
    return error


def refused(operation: str, address: str, refusals: Sequence[Refusal]) -> Error:
    """One error for all refusals, so that nobody has to find them one by one."""
    code = errno.EBUSY
    if len(refusals) == 1:
        return failure(code, operation, address, f"refused, because {refusals[0].reason}", refusals[0].remedy)
    cause = "refused, because\n" + "\n".join(f"  - {refusal.reason}" for refusal in refusals)
    remedies = list(dict.fromkeys(refusal.remedy for refusal in refusals))
    return failure(code, operation, address, cause, "\n              ".join(remedies))


def why(error: OSError) -> str:
    """An error of the operating system as the reason for not knowing something."""
    path = f"{error.filename} " if error.filename else ""
    if error.errno == errno.ENOENT:
        return f"{path}is absent"
    return f"{path}cannot be read: {error.strerror or error}"
