# SPDX-License-Identifier: Apache-2.0
"""Events of the native part, by Python's `logging`.

Loaded with the package: an opening shall not wait for it, and with the first event there may be neither a descriptor
nor memory left to load it with.
"""

from __future__ import annotations

import json
import logging
import threading
from datetime import datetime

from ugds import _core

LOGGER = logging.getLogger("ugds")
LOGGER.addHandler(logging.NullHandler())  # silent, unless the program asks for logs
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def emit(line: str) -> None:
    """Logs one event: the line is the message, its fields are the record's `ugds`, and its time is the record's."""
    fields = json.loads(line)
    level = _LEVELS[fields["level"]]
    if not LOGGER.isEnabledFor(level):
        return
    record = LOGGER.makeRecord(LOGGER.name, level, __file__, 0, "%s", (line,), None, "emit", {"ugds": fields})
    created = datetime.fromisoformat(fields["time"].replace("Z", "+00:00")).timestamp()
    record.relativeCreated += (created - record.created) * 1000
    record.created = created
    record.msecs = float(int(created % 1 * 1000))
    LOGGER.handle(record)


def _log_all() -> None:
    """Logs what waits, unless somebody is at it."""
    failed: Exception | None = None
    while _core.begin_log():
        try:
            while (line := _core.next_event()) is not None:
                try:
                    emit(line)
                except Exception as error:  # of a handler: the others are logged all the same
                    failed = error
        finally:
            _core.end_log()
    if failed is not None:
        raise failed


def start() -> None:
    """Starts the thread that logs what waits. Not in the main thread, which may be inside of `threading` just now; and
    not in this one, which `threading` would take for a thread that never ends."""
    try:
        threading.Thread(target=_log_all, name="ugds-log", daemon=True).start()
    except (RuntimeError, MemoryError):  # there is none to be had, or the interpreter ends
        _log_all()
