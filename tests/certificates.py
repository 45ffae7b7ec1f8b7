"""Certificates for tests: authorities, servers and clients, in files."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography import x509


@dataclass
class Certificates:
    """One authority, with a server's and a client's certificates in a folder of their own.

    Attributes:
        ca: the authority's certificate.
        cert, key: the server's, for 127.0.0.1 and localhost.
        client: a client's certificate and key in one file.
    """

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._authority = trustme.CA()
        self.ca, self.cert, self.key = (self.folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
        self.client = self.folder / "client.pem"
        self._authority.cert_pem.write_to_path(self.ca)
        self._authority.issue_cert("somebody@example.org").private_key_and_cert_chain_pem.write_to_path(self.client)
        self.renew()

    def renew(self) -> None:
        """Another certificate and key for the server, in the same files."""
        issued = self._authority.issue_cert("127.0.0.1", "localhost")
        self.key.write_bytes(issued.private_key_pem.bytes())
        self.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))

    def options(self) -> tuple[str, ...]:
        """What a server is started with."""
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key))

    def trust(self, *, client: Path | None = None) -> ssl.SSLContext:
        """Of a client that trusts the authority, and has a certificate if one is given."""
        context = ssl.create_default_context(cafile=self.ca)
        if client is not None:
            context.load_cert_chain(client)
        return context

    def serial(self) -> str:
        """The serial number of the server's certificate, as `SSLSocket.getpeercert` has it."""
        number = f"{x509.load_pem_x509_certificate(self.cert.read_bytes()).serial_number:X}"
        return number if len(number) % 2 == 0 else f"0{number}"
