"""Examples for users of curl, and recognition of bodies that its option -d changed."""

from normserve.errors import NormserveError

_FORM = "application/x-www-form-urlencoded"
# Characters that mean something else to a shell, which replaces a variable within double quotes, too.
_NEEDS_QUOTES = frozenset("$&?")
# Bytes that `curl -d @FILE` removes.
_REMOVED_BYTES = (b"\0", b"\r", b"\n")
# A file in either format has one of these bytes within its beginning.
_EXAMINED_BYTES = 4096


def make_sample_command(
    url: str,
    target: str = "/v1/layer_norm",
    /,
    *,
    with_key: bool = False,
    with_certificate: bool = False,
    with_headers: bool = False,
) -> str:
    """Format a shell command that sends the server's `/sample.npy` to an operation and saves the result as `y.npy`,
    using only curl.

    If the server refuses the request, the command prints the error, leaves no `y.npy`, and fails.  curl alone
    either drops the error (`--fail`) or saves it as the result (`--fail-with-body`).

    Args:
        url: the server's; it may be a shell variable.
        target: the operation's path and query.
        with_key: the command reads an API key from `$NORMSERVE_API_KEY`.
        with_certificate: the server requires a client's certificate.
        with_headers: the command prints the response's headers.
    """
    first = _format_curl("-sSf", url, with_certificate=with_certificate)
    second = _format_curl("-sS --fail-with-body", url, with_key=with_key, with_certificate=with_certificate)
    headers = " -D -" if with_headers else ""
    quote = '"' if _NEEDS_QUOTES & set(url + target) else ""
    return (
        f"{first} {url}/sample.npy | {second} --data-binary @-{headers} -o y.npy {quote}{url}{target}{quote}"
        " || { grep -s detail y.npy; rm -f y.npy; false; }"
    )


def make_info_command(url: str, *, with_key: bool, with_certificate: bool = False) -> str:
    """Format a shell command that prints the server's description, or an error."""
    curl = _format_curl("-sS --fail-with-body", url, with_key=with_key, with_certificate=with_certificate)
    return f"{curl} {url}/v1/info"


def _format_curl(options: str, url: str, *, with_key: bool = False, with_certificate: bool = False) -> str:
    """Format the beginning of a curl command line, with TLS options if the URL is `https`.

    The options name the file of the server's certificate authority, and the client's certificate if one
    is required.
    """
    tls = (
        " --cacert ca.pem" + (" --cert client.pem" if with_certificate else "") if url.startswith("https:") else ""
    )
    key = ' -H "Authorization: Bearer $NORMSERVE_API_KEY"' if with_key else ""
    return f"curl {options}{tls}{key}"


def is_form_type(content_type: str) -> bool:
    """Return whether a Content-Type is curl's default for a body."""
    return content_type.partition(";")[0].strip().lower() == _FORM


def add_curl_hint(error: NormserveError, body: memoryview) -> NormserveError:
    """Return the error with a hint at `curl --data-binary`, if `curl -d` seems to have changed the body.

    Otherwise the error is returned unchanged.
    """
    if not _is_altered_by_curl(body):
        return error
    return type(error)(f"{error.detail}; curl leaves out line breaks and zeros with -d, not with --data-binary")


def _is_altered_by_curl(body: memoryview) -> bool:
    """Return whether `curl -d @FILE` has probably removed zero bytes and line breaks from the body.

    It has if the beginning of the body contains none of them.

    Args: body: a format with such bytes near its beginning: npy, safetensors or another binary format.
    """
    beginning = bytes(body[:_EXAMINED_BYTES])
    return bool(beginning) and not any(byte in beginning for byte in _REMOVED_BYTES)
