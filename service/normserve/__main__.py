"""`python -m normserve` is `normserve`."""

import sys

from normserve.cli import main

sys.exit(main())
