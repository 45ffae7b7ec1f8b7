"""`normserve` that writes how bodies came: `placed N` bytes into their memory, or `copied N` through a parser."""

import sys

from normserve.cli.commands import main
from normserve.http.transport.incoming_body import IncomingBody

advance, take = IncomingBody.count_received, IncomingBody._store


def placed(self, nbytes):
    print(f"placed {nbytes}", flush=True)
    advance(self, nbytes)


def copied(self, data):
    print(f"copied {len(data)}", flush=True)
    take(self, data)


if __name__ == "__main__":
    IncomingBody.count_received, IncomingBody._store = placed, copied
    sys.exit(main())
