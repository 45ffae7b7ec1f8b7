"""Every test here may use a real server process."""

from tests.integration.harness.servers import (
    api,
    launched,
    server,
    settled,
    shared_stage,
    stage,
    stage_of,
    start_server,
    until,
)

__all__ = ["api", "launched", "server", "settled", "shared_stage", "stage", "stage_of", "start_server", "until"]
