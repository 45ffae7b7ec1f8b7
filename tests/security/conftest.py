"""Every test here may attack a real server process."""

from tests.integration.servers import api, launched, server, stage_of, start_server, until

__all__ = ["api", "launched", "server", "stage_of", "start_server", "until"]
