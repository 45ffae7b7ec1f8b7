"""`normserve` with a file of shared memory that the process has mapped, as libraries do for memory of their own."""

import mmap
import os
import sys
from pathlib import Path

from normserve.cli.commands import main

if __name__ == "__main__":
    with Path(os.environ["MAPPED"]).open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    sys.exit(main())
