"""Every test here may attack a real server process."""

from tests.integration.harness.servers import api, launched, server, settled, stage_of, start_server, until
from tests.security.tls.encrypted import impatient, mutual, ours, secure, theirs, uds

__all__ = [
    "api",
    "impatient",
    "launched",
    "mutual",
    "ours",
    "secure",
    "server",
    "settled",
    "stage_of",
    "start_server",
    "theirs",
    "uds",
    "until",
]
