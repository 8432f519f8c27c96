# SPDX-License-Identifier: Apache-2.0
"""Events of the native part, by Python's `logging`. Loaded when there is the first of them."""

from __future__ import annotations

import json
import logging

LOGGER = logging.getLogger("ugds")
LOGGER.addHandler(logging.NullHandler())  # silent, unless the program asks for logs
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def emit(line: str) -> None:
    """Logs one event: the line is the message, and its fields are the record's `ugds`."""
    fields = json.loads(line)
    LOGGER.log(_LEVELS[fields["level"]], "%s", line, extra={"ugds": fields})
