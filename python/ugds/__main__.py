# SPDX-License-Identifier: Apache-2.0
"""`python -m ugds` is the command `ugds`."""

import sys

from ugds.cli import main

if __name__ == "__main__":
    sys.exit(main())
