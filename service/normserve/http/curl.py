"""Examples for users of curl, and recognition of bodies that its option -d changed."""

from normserve.errors import NormserveError

_FORM = "application/x-www-form-urlencoded"
# Bytes that `curl -d @FILE` removes.
_REMOVED_BYTES = (b"\0", b"\r", b"\n")
# A file in either format has one of these bytes within its beginning.
_EXAMINED_BYTES = 4096


def make_sample_command(url: str, *, with_key: bool, with_certificate: bool = False) -> str:
    """Format a shell command that sends the server's `/sample.npy` to LayerNorm, using only curl.

    With a key, the command reads the key from `$NORMSERVE_API_KEY`.
    """
    curl = make_curl_prefix(url, with_certificate=with_certificate)
    key = ' -H "Authorization: Bearer $NORMSERVE_API_KEY"' if with_key else ""
    return f"{curl} {url}/sample.npy | {curl}{key} --data-binary @- -D - -o y.npy {url}/v1/layer_norm"


def make_curl_prefix(url: str, *, with_certificate: bool) -> str:
    """Format the beginning of a curl command line, `curl -s`, with TLS options if the URL is `https`.

    The options name the file of the server's certificate authority, and the client's certificate if one
    is required.
    """
    if not url.startswith("https:"):
        return "curl -s"
    return "curl -s --cacert ca.pem" + (" --cert client.pem" if with_certificate else "")


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
