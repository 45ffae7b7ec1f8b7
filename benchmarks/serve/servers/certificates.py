"""Whom a server with TLS shows, and whom its clients believe."""

import ssl
from pathlib import Path

import trustme


def certificates(folder: Path) -> ssl.SSLContext:
    """Of a server, in server.pem, and who vouches for it, in authority.pem; what a client of it trusts."""
    authority = trustme.CA()
    authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
        folder / "server.pem"
    )
    authority.cert_pem.write_to_path(folder / "authority.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context
