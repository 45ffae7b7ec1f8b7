"""`GET /`: a live page of the server, for users without Grafana; and `GET /docs`: its HTTP API.

The pages consist of the files in normserve/http/page and of Swagger UI's.  They read `/metrics` and
`/openapi.json` and load nothing from other hosts, which their Content-Security-Policy enforces.
"""

import hashlib
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

from fastapi import APIRouter, Request, Response
from swagger_ui_bundle import swagger_ui_path

from normserve.errors import NotFoundError
from normserve.http.curl import make_info_command, make_sample_command
from normserve.http.http_exchange import HttpExchange

_READS = ["GET", "HEAD"]
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_SOURCES = (
    *("index.html", "live.css", "live.js", "key.js", "metrics.js", "plots.js", "units.js", "icon.svg"),
    *("docs.html", "docs.css", "docs.js"),
)
_VENDORED = ("uplot/uPlot.iife.min.js", "uplot/uPlot.min.css")
_SWAGGER = ("swagger-ui.css", "swagger-ui-bundle.js")

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Swagger UI's style sheet contains its images.
_DOCS_POLICY = _POLICY.replace("img-src 'self'", "img-src 'self' data:")

_HEADERS = {
    "referrer-policy": "no-referrer",
    # Browsers revalidate each time, and receive 304 unless the server's version changed.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageRoutes:
    """The handlers of the live page, the page of API documentation, and the files that they load.

    Attributes:
        is_key_required: whether the operations require an API key.  The page itself does not; if
            /metrics does, the page asks its user for one.
        is_certificate_required: whether TLS requires client certificates.
    """

    is_key_required: bool
    is_certificate_required: bool = False

    def make_router(self) -> APIRouter:
        """Make the routes of the pages and of their files."""
        router = APIRouter(include_in_schema=False)
        router.add_api_route("/", self.show_live_page, methods=_READS)
        router.add_api_route("/docs", self.show_api_page, methods=_READS)
        router.add_api_route("/assets/{name}", self.show_asset, methods=_READS)
        return router

    async def show_live_page(self, request: Request) -> Response:
        """The page, with example commands that use the same URL as this request."""
        _label_request(request, "page")
        url = str(request.base_url).rstrip("/")
        lines = list_example_commands(
            url, with_key=self.is_key_required, with_certificate=self.is_certificate_required
        )
        shown = "".join(f"<pre><code>{escape(line)}</code></pre>\n" for line in lines)
        text = Template(_FILES["index.html"][0].decode()).substitute(url=escape(url), commands=shown)
        content = text.encode()
        return _make_response(request, "html", content, _compute_etag(content))

    async def show_api_page(self, request: Request) -> Response:
        """The documentation of the HTTP API, where requests can be tried."""
        _label_request(request, "docs")
        return _make_response(request, "html", *_FILES["docs.html"], _DOCS_POLICY)

    async def show_asset(self, request: Request, name: str) -> Response:
        """Style, scripts and libraries."""
        _label_request(request, "asset")
        if name.endswith(".html") or name not in _FILES:
            raise NotFoundError("there is no such file")
        return _make_response(request, name.rpartition(".")[2], *_FILES[name])


def list_example_commands(url: str, *, with_key: bool, with_certificate: bool = False) -> list[str]:
    """List shell commands to try the server; the server prints the first one at start."""
    options = {"with_key": with_key, "with_certificate": with_certificate}
    # In a shell of its own, which alone ends at the first error.
    repeated = make_sample_command(url, "/v1/rms_norm", **options)
    return [
        make_sample_command(url, with_headers=True, **options),
        make_sample_command(url, "/v1/group_norm?num_groups=2&activation=silu", **options),
        f"(for i in $(seq 500); do {repeated} || exit; done)",
        make_info_command(url, **options),
    ]


def _make_response(request: Request, extension: str, content: bytes, tag: str, policy: str = _POLICY) -> Response:
    """Make the response with a page's file; make a 304 if the client already has this content.

    Args:
        extension: the file's extension.
        tag: the entity tag of the content.
        policy: the Content-Security-Policy.
    """
    headers = {**_HEADERS, "content-security-policy": policy, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[extension])


def _compute_etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def _label_request(request: Request, route: str) -> None:
    exchange: HttpExchange = request.state.exchange
    exchange.record.op = route


def _read_files() -> dict[str, tuple[bytes, str]]:
    """Return the content and the entity tag of each file of the pages, by name."""
    folder = files("normserve.http") / "page"
    own = {name.rpartition("/")[2]: (folder / name).read_bytes() for name in (*_SOURCES, *_VENDORED)}
    swagger = {name: (swagger_ui_path / name).read_bytes() for name in _SWAGGER}
    return {name: (content, _compute_etag(content)) for name, content in (own | swagger).items()}


_FILES = _read_files()
