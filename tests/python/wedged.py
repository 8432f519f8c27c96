# SPDX-License-Identifier: Apache-2.0
"""For tests of devices that could not be stopped."""

from __future__ import annotations

import time

import ugds


def close_in_the_end(ssd: ugds.Device) -> None:
    """Closes a wedged device once its server has ended the connection; fails where that takes long."""
    end = time.monotonic() + 10
    while not ssd.closed:
        try:
            ssd.close(0.1)
        except ugds.Error:
            assert time.monotonic() < end
