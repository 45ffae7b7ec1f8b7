"""`GET /`: a page that shows the server at work, for whoever has no Grafana at hand.

It is made of the files in normserve/page, reads `/metrics` and needs nothing from anywhere else; its
Content-Security-Policy sees to that.
"""

import hashlib
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

from fastapi import APIRouter, Request, Response

from normserve.errors import NotFoundError
from normserve.exchange import Exchange
from normserve.routes.status import curl_line

_READS = ["GET", "HEAD"]
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_SOURCES = ("index.html", "live.css", "live.js", "key.js", "metrics.js", "plots.js", "units.js", "icon.svg")
_VENDORED = ("uplot/uPlot.iife.min.js", "uplot/uPlot.min.css")

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # To be asked for each time, and answered with 304 unless the server is another version.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Page:
    """What the page's handlers work with.

    Attributes:
        with_key: whether the operations ask for an API key.  The page does not; where /metrics does, whoever looks
            at the page is asked for one.
    """

    with_key: bool

    def router(self) -> APIRouter:
        """The page and what it is made of."""
        router = APIRouter(include_in_schema=False)
        router.add_api_route("/", self.page, methods=_READS)
        router.add_api_route("/assets/{name}", self.asset, methods=_READS)
        return router

    async def page(self, request: Request) -> Response:
        """The page, with lines to try that reach the server as this request did."""
        _note(request, "page")
        url = str(request.base_url).rstrip("/")
        lines = "".join(
            f"<pre><code>{escape(line)}</code></pre>\n" for line in commands(url, with_key=self.with_key)
        )
        text = Template(_FILES["index.html"].decode()).substitute(url=escape(url), commands=lines)
        return _answer(request, "html", text.encode())

    async def asset(self, request: Request, name: str) -> Response:
        """Style, scripts and the plotting library."""
        _note(request, "asset")
        if name == "index.html" or name not in _FILES:
            raise NotFoundError("the page has no such part")
        return _answer(request, name.rpartition(".")[2], _FILES[name])


def commands(url: str, *, with_key: bool) -> list[str]:
    """Lines for a shell that try the server, the first of them what its start prints."""
    key = '-H "Authorization: Bearer $NORMSERVE_API_KEY" ' if with_key else ""
    sample = f"curl -s {url}/sample.npy | curl -s {key}--data-binary @- -o y.npy"
    return [
        curl_line(url, with_key=with_key),
        f"{sample} '{url}/v1/group_norm?num_groups=2&activation=silu'",
        f"for i in $(seq 500); do {sample} {url}/v1/rms_norm; done",
        f"curl -s {key}{url}/v1/info",
    ]


def _answer(request: Request, kind: str, content: bytes) -> Response:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[kind])


def _note(request: Request, route: str) -> None:
    exchange: Exchange = request.state.exchange
    exchange.record.op = route


def _read() -> dict[str, bytes]:
    folder = files("normserve") / "page"
    return {name.rpartition("/")[2]: (folder / name).read_bytes() for name in (*_SOURCES, *_VENDORED)}


_FILES = _read()
