"""TLS on the port: the server's certificate and key from files, which may be replaced while the server runs."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from normserve.settings import Settings


class TlsFileError(Exception):
    """A file that TLS cannot be served with.

    Attributes:
        setting: the name of the setting that names the file.
        detail: what is wrong with it.
    """

    def __init__(self, setting: str, detail: str) -> None:
        super().__init__(f"{setting}: {detail}")
        self.setting, self.detail = setting, detail


class _EncryptedKeyError(Exception):
    """The key asks for a password."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What the settings say about TLS; all files are PEM.

    Attributes:
        certificate: the server's, and behind it those between it and its authority.
        key: of the certificate; None where the certificate's file holds it.
        client_ca: the authorities of which a client must have a certificate; None asks clients for none.
    """

    certificate: Path
    key: Path | None
    client_ca: Path | None

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """None where the server speaks plain HTTP."""
        if settings.tls_cert is None:
            return None
        return cls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)

    def load(self) -> ssl.SSLContext:
        """TLS 1.2 or newer with these files, as they are now.

        Raises:
            TlsFileError: one cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        _require_certificates("tls_cert", self.certificate)
        self._load_key(context)
        if self.client_ca is not None:
            _require_certificates("tls_client_ca", self.client_ca)
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _load_key(self, context: ssl.SSLContext) -> None:
        setting = "tls_cert" if self.key is None else "tls_key"
        if self.key is not None:
            _require_readable(setting, self.key)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_refuse_password)
        except _EncryptedKeyError:
            raise TlsFileError(setting, "the key is encrypted; store it without a password") from None
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise TlsFileError(setting, "the key does not belong to the certificate") from None
            raise TlsFileError(setting, f"holds no private key that can be used ({error.reason})") from None


class TlsContext(ssl.SSLContext):
    """Begins each handshake with the files as they were last read; those before go on as they began."""

    def __new__(cls, files: TlsFiles) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: TlsFiles) -> None:
        """Raises: TlsFileError: one of the files cannot be used."""
        self._files = files
        self._current = files.load()

    def reload(self) -> None:
        """Read the files again, for the handshakes to come.

        Raises:
            TlsFileError: one of them cannot be used; nothing has changed.
        """
        self._current = self._files.load()

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """What event loops begin a handshake with."""
        return self._current.wrap_bio(*arguments, **options)


def _refuse_password() -> str:
    raise _EncryptedKeyError


def _require_readable(setting: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise TlsFileError(setting, f"{path} cannot be read: {error.strerror}") from None


def _require_certificates(setting: str, path: Path) -> None:
    _require_readable(setting, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except (ssl.SSLError, OSError):
        raise TlsFileError(setting, f"{path} holds no certificate in PEM form") from None
