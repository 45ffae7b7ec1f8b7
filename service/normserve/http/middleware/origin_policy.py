"""The hosts that a request may name, and the origins whose web pages may send requests.

A browser lets a page of any origin send simple requests to any server, and any host name may resolve to the
loopback address (DNS rebinding).  Therefore a request must name a host of this server, and if it has an `Origin`,
that must be the server's own or one allowed by the settings (CORS).  Browsers send both headers and pages cannot
change them.  Requests over a Unix domain socket do not come from browsers.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping

from starlette.datastructures import Headers as RequestHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Scope

from normserve.errors import ForbiddenOriginError, MisdirectedRequestError
from normserve.http.transport import Headers

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
# Kubernetes names a pod's address; a web page learns nothing from these responses.
_PROBES = ("/livez", "/readyz", "/v2/health/live", "/v2/health/ready")

_METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")
_REQUEST_HEADERS = ("Authorization", "Inference-Header-Content-Length", "Traceparent", "Tracestate", "X-Request-ID")
_EXPOSED = (
    *("Server-Timing", "X-Kernel-Bytes", "X-Kernel-Bandwidth", "X-Batch-Size"),
    *("X-Error-Code", "X-Request-ID", "Retry-After", "Inference-Header-Content-Length"),
)

_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)\.?(?::(\d{0,5}))?")
_ORIGIN = re.compile(r"(https?)://(.+)")
_PORTS = {"http": 80, "https": 443}
# Characters of a name, a port and the separators.
_LONGEST_AUTHORITY = 300
_MAX_ACCEPTED_HOSTS = 1024


class OriginPolicy:
    """The rules for the `Host` that a request names, and for the `Origin` of the web page that sends it."""

    def __init__(self, hosts: Iterable[str] | None, cors_origins: Iterable[str] = ()) -> None:
        """Args:
        hosts: names and addresses of the server, without ports, besides those of the loopback interface; None
            allows any.
        cors_origins: origins whose pages may send requests and read the responses, as `https://app.example`.
        """
        self._known_hosts = (
            None if hosts is None else _LOOPBACK | {name for each in hosts if (name := _normalise_host(each))}
        )
        self._accepted_hosts: set[bytes] = set()
        allowed = tuple(origin.lower() for origin in cors_origins)
        self._cors = CORSMiddleware(
            _ignore_call,
            allow_origins=allowed,
            allow_methods=_METHODS,
            allow_headers=_REQUEST_HEADERS,
            expose_headers=_EXPOSED,
            allow_private_network=True,
        )
        # A cached response may lack headers that another origin needs.
        vary = ((b"vary", b"Origin"),) if allowed else ()
        self._same_origin_result: tuple[Headers, None] = (vary, None)
        exposed = (b"access-control-expose-headers", ", ".join(_EXPOSED).encode())
        self._cors_headers: dict[bytes, Headers] = {
            origin.encode(): ((b"access-control-allow-origin", origin.encode()), exposed, *vary)
            for origin in allowed
        }

    def check_request(self, scope: Scope, headers: Mapping[bytes, bytes]) -> tuple[Headers, Response | None]:
        """Check a request's host and origin; return the CORS headers, and the complete response if it is a
        preflight.

        The second value is None unless the request is a CORS preflight, which no route handles.

        Raises:
            MisdirectedRequestError: the request names a host that is not the server's.
            ForbiddenOriginError: the request is from a page whose origin is not allowed.
        """
        if scope["client"] is None:
            return (), None
        if (
            self._known_hosts is not None
            and (host := headers.get(b"host")) not in self._accepted_hosts
            and host is not None
        ):
            self._require_known_host(host, scope["path"])
        origin = headers.get(b"origin")
        return self._same_origin_result if origin is None else self._check_origin(origin, scope, headers)

    def _require_known_host(self, host: bytes, path: str) -> None:
        """Refuse a `Host` that is not the server's, except for health probes.

        A valid value is remembered, so that it is parsed only once.

        Raises:
            MisdirectedRequestError: the host is not the server's.
        """
        assert self._known_hosts is not None
        found = _parse_authority(host.decode("latin-1"))
        if found is not None and found[0] in self._known_hosts:
            if len(self._accepted_hosts) < _MAX_ACCEPTED_HOSTS:
                self._accepted_hosts.add(host)
        elif path not in _PROBES:
            raise MisdirectedRequestError(
                "Host must be a name or an address that the server answers for, it is another;"
                " the setting --allowed-hosts lists them"
            )

    def _check_origin(
        self, origin: bytes, scope: Scope, headers: Mapping[bytes, bytes]
    ) -> tuple[Headers, Response | None]:
        """Check the origin of a request; return the CORS headers, and the complete response if it is a preflight.

        Raises:
            ForbiddenOriginError: the origin is neither the server's own nor an allowed one.
        """
        shared = self._cors_headers.get(origin)
        if shared is None:
            if not _is_own_origin(origin, scope["scheme"], headers.get(b"host", b"")):
                raise ForbiddenOriginError(
                    "Origin must be the server's own or one of the setting --cors-origins, it is another"
                )
            return self._same_origin_result
        if scope["method"] != "OPTIONS" or b"access-control-request-method" not in headers:
            return shared, None
        response = self._cors.preflight_response(RequestHeaders(scope=scope))
        if response.status_code != 200:
            raise ForbiddenOriginError(
                f"a page may send {', '.join(_METHODS)} with the headers"
                f" {', '.join((*_REQUEST_HEADERS, 'Accept', 'Content-Type'))}; it asked for others"
            )
        return (), response


def list_allowed_hosts(host: str, allowed: str) -> list[str] | None:
    """List the hosts that requests may name; return None if they may name any host.

    Args:
        host: the address that the server listens on.
        allowed: the setting; if it is empty, a server on a loopback address accepts only that, since
            only this machine can reach it.
    """
    if allowed == "*":
        return None
    if allowed:
        return allowed.split(",")
    return [host] if _is_loopback_host(host) else None


async def _ignore_call(*_: object) -> None:
    """Do nothing, in place of an application: the CORS middleware is used for its responses and wraps nothing."""


def _is_loopback_host(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_own_origin(origin: bytes, scheme: str, host: bytes) -> bool:
    """Return whether a page's origin has the host and port that the request's `Host` names.

    If the server uses plain HTTP, the origin may be `https`: a proxy before the server may use TLS.
    """
    parsed_origin = _ORIGIN.fullmatch(origin.decode("latin-1").lower())
    if parsed_origin is None or (scheme == "https" and parsed_origin[1] != scheme):
        return False
    from_page, to_server = _parse_authority(parsed_origin[2]), _parse_authority(host.decode("latin-1"))
    if from_page is None or to_server is None:
        return False
    port = _PORTS[parsed_origin[1]]
    return (from_page[0], from_page[1] or port) == (to_server[0], to_server[1] or port)


def _normalise_host(host: str) -> str | None:
    """Return a host of the settings, spelled as `_parse_authority` returns it; None if it is no host name or
    address.
    """
    bare = host.count(":") > 1 and not host.startswith("[")
    found = _parse_authority(f"[{host}]" if bare else host)
    return None if found is None else found[0]


def _parse_authority(text: str) -> tuple[str, int | None] | None:
    """Parse `name[:port]` into name and port; return None if the text has another form.

    The name is in lower case, an IPv6 address in its shortest spelling.  Without a port, the port is
    None.
    """
    if len(text) > _LONGEST_AUTHORITY or (found := _AUTHORITY.fullmatch(text.lower())) is None:
        return None
    name, port = found[1], int(found[2]) if found[2] else None
    if name.startswith("["):
        try:
            name = f"[{ipaddress.IPv6Address(name[1:-1]).compressed}]"
        except ValueError:
            return None
    return name, port
