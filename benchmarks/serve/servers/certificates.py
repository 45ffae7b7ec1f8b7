"""Certificates of a server with TLS and of its authority."""

import ssl
from pathlib import Path

import trustme


def write_certificates(folder: Path) -> ssl.SSLContext:
    """Write the server's certificate, server.pem, and its authority's, authority.pem; return a client's context."""
    authority = trustme.CA()
    authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
        folder / "server.pem"
    )
    authority.cert_pem.write_to_path(folder / "authority.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context
