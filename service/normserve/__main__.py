"""`python -m normserve` is `normserve`."""

import sys

from normserve.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
