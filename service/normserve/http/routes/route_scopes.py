"""The scope that a key needs for each route, in one table.

If keys are required, routes that are not in the table are refused, including mounted ones.
"""

from collections.abc import Iterator, Mapping, Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from normserve.admission.keys import KeyScope
from normserve.http.http_exchange import NO_ROUTE
from normserve.jobs.job import Op, PassDirection

#: A key with any of these scopes is sufficient; if the set is empty, no key is needed.
Needed = frozenset[KeyScope]

PUBLIC: Needed = frozenset()
ANY_KEY: Needed = frozenset(KeyScope)
_INFER: Needed = frozenset([KeyScope.INFER])
_LAYERS: Needed = frozenset([KeyScope.LAYERS])
_METRICS: Needed = frozenset([KeyScope.METRICS])

_READS = ("GET", "HEAD")
_PROBES = ("/livez", "/readyz", "/v2/health/live", "/v2/health/ready")


def _list_route_scopes() -> Iterator[tuple[Sequence[str], str, Needed]]:
    """List the methods, the path template and the accepted key scopes of each route."""
    for op in Op:
        for direction in op.passes:
            yield ("POST",), f"/v1/{op.value}" + ("" if direction is PassDirection.FORWARD else "/backward"), _INFER
    yield _READS, "/v1/layers", _INFER | _LAYERS
    yield _READS, "/v1/layers/{name}", _INFER | _LAYERS
    yield ("PUT", "DELETE"), "/v1/layers/{name}", _LAYERS
    yield _READS, "/v1/info", ANY_KEY
    yield from _list_inference_route_scopes()
    yield _READS, "/metrics", _METRICS
    for public in (*_PROBES, "/", "/assets/{name}", "/docs", "/openapi.json", "/sample.npy"):
        yield _READS, public, PUBLIC


def _list_inference_route_scopes() -> Iterator[tuple[Sequence[str], str, Needed]]:
    """List the methods, the path template and the accepted key scopes of each route below `/v2`."""
    for server in ("/v2", "/v2/"):
        yield _READS, server, ANY_KEY
    yield _READS, "/v2/models/stats", _INFER | _METRICS
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        yield ("POST",), f"{model}/infer", _INFER
        yield _READS, f"{model}/stats", _INFER | _METRICS
        for suffix in ("", "/ready", "/config"):
            yield _READS, f"{model}{suffix}", _INFER | _LAYERS
    for kind in ("system", "cuda"):
        for regions in (f"/v2/{kind}sharedmemory", f"/v2/{kind}sharedmemory/region/{{region}}"):
            yield _READS, f"{regions}/status", _INFER
            yield ("POST",), f"{regions}/unregister", _INFER
        yield ("POST",), f"/v2/{kind}sharedmemory/region/{{region}}/register", _INFER
    yield ("POST",), "/v2/repository/index", _INFER | _LAYERS
    for change in ("load", "unload"):
        yield ("POST",), f"/v2/repository/models/{{name}}/{change}", _LAYERS


DECLARED: Mapping[tuple[str, str], Needed] = {
    (method, path): needed for methods, path, needed in _list_route_scopes() for method in methods
}


class RouteScopes:
    """The key scopes that each request needs, looked up by the route that will handle the request.

    The routes themselves match the request, so that a spelling of a path cannot be interpreted
    differently here and by the router.
    """

    def __init__(self, routes: Sequence[BaseRoute], *, metrics_are_public: bool) -> None:
        """Args: routes: the list of the application itself, to which routes may be added later."""
        self._routes = routes
        self._scopes_by_template = {**DECLARED}
        if metrics_are_public:
            self._scopes_by_template |= {(method, "/metrics"): PUBLIC for method in _READS}
        # A path without parameters is its own template.
        self._scopes_by_path = {
            place: needed for place, needed in self._scopes_by_template.items() if "{" not in place[1]
        }

    def is_key_required(self, method: str, template: str) -> bool:
        """Return whether a route needs a key, if keys are required."""
        return self._scopes_by_template.get((method, template)) != PUBLIC

    def find_accepted_scopes(self, scope: Scope) -> Needed | None:
        """Return the scopes of which a request's key must have one.  An empty result means that no key is needed,
        None that no key suffices.

        No key is accepted for a route that declares no scopes.  A request that no route handles needs any key:
        clients without one cannot find out which paths exist.
        """
        if scope["method"] == "OPTIONS" and self.find_accepted_scopes({**scope, "method": "GET"}) == PUBLIC:
            # Proxies use this method to check whether a server answers.
            return PUBLIC
        exact = self._scopes_by_path.get((scope["method"], scope["path"]))
        below = scope.get("root_path")
        if exact is not None and not below:
            return exact
        route = self._find_route(scope)
        needed = (
            ANY_KEY
            if route is None
            else self._scopes_by_template.get((scope["method"], getattr(route, "path", "")))
        )
        # Below a root path, direct routes are found by the full path, and all others by the path after the root.
        return needed if exact is None or exact == needed else None

    def find_route_template(self, scope: Scope) -> str:
        """Return the path template of a request's route, for example `/v1/layers/{name}`.

        Return `UNMATCHED` if no route handles the request.
        """
        if not scope.get("root_path") and (scope["method"], scope["path"]) in self._scopes_by_path:
            path: str = scope["path"]
            return path
        return getattr(self._find_route(scope), "path", NO_ROUTE)

    def _find_route(self, scope: Scope) -> BaseRoute | None:
        """Return the first route that matches a request's path and method; None if there is none."""
        for route in self._routes:
            if route.matches(scope)[0] is Match.FULL:
                return route
        return None
