"""The check of a call's key before its message is received."""

import time
from collections.abc import Iterable

from normserve.grpc.caller import Header
from normserve.grpc.server_client import ServerClient, make_response_error
from normserve.grpc.statuses import CallError, Code

# The server checks the key of every request itself; this saves a request for each message.
_VALID_S = 5.0
_MAX_KEYS = 1024

# Needs a key with which inference is possible, and says whether the server is ready.
_PATH = "/v2/models/layer_norm/ready"


class AdmissionCheck:
    """A check, by asking the server, whether a caller's key would be accepted now."""

    def __init__(self, server: ServerClient) -> None:
        self._server = server
        # By the key, until when it counts as accepted.
        self._valid_until: dict[bytes, float] = {}

    async def require_accepted(self, headers: Iterable[Header]) -> None:
        """Require that the server accepts requests with these headers.  Accepted keys are asked for only now and
        then.

        Raises:
            CallError: the key is refused, or the server is not ready or cannot be reached.
        """
        headers = list(headers)
        key = next((value for name, value in headers if name == b"authorization"), b"")
        now = time.monotonic()
        if self._valid_until.get(key, 0.0) > now:
            return
        response = await self._server.send_request("GET", _PATH, headers)
        if response.status != 200:
            self._valid_until.pop(key, None)
            error = make_response_error(response)
            # The route's status for a server that is not ready.
            raise CallError(Code.UNAVAILABLE, error.detail, 1.0) if response.status == 400 else error
        if len(self._valid_until) >= _MAX_KEYS:
            self._valid_until.clear()
        self._valid_until[key] = now + _VALID_S
