"""`python -m normload` is `normload`."""

import sys

from normload.command import main

if __name__ == "__main__":
    sys.exit(main())
