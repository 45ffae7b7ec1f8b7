"""`normserve` whose processes may write files of $FILE_BYTES at most, as on a disk that is full."""

import os
import resource
import sys

from normserve.cli.commands import main

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FILE_BYTES"]),) * 2)
    sys.exit(main())
