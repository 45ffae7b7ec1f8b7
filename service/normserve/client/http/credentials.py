"""Credentials of the client, and its trust in server certificates."""

import ssl

import httpx


def validate_api_key(api_key: str) -> str:
    """Return the key if a header can contain it.

    Raises:
        ValueError: a header cannot contain the key.
    """
    # As part of a header, anything else fails with each request, and with the key in the error's text.
    if not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip() and api_key):
        raise ValueError("the API key must be printable ASCII, without a blank or a line break at its ends")
    return api_key


def make_verify_argument(
    verify: ssl.SSLContext | str | bool, certificate: str | tuple[str, str] | None
) -> ssl.SSLContext | bool:
    """Make httpx's `verify` argument, with an SSLContext in place of paths, which httpx deprecates."""
    if isinstance(verify, str):
        verify = ssl.create_default_context(cafile=verify)
    if certificate is None:
        return verify
    context = verify if isinstance(verify, ssl.SSLContext) else httpx.create_ssl_context(verify=verify)
    context.load_cert_chain(*((certificate,) if isinstance(certificate, str) else certificate))
    return context
