"""TLS on the port, with certificate and key from files, which may be replaced while the server runs."""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from normserve.regular_files import open_regular_file
from normserve.settings import Settings

log = logging.getLogger(__name__)


class TlsFileError(Exception):
    """A file of a TLS setting cannot be read or used; the message names the setting and the reason.

    Attributes:
        setting: the name of the setting that names the file.
        detail: the reason.
    """

    def __init__(self, setting: str, detail: str) -> None:
        super().__init__(f"{setting}: {detail}")
        self.setting, self.detail = setting, detail


class _EncryptedKeyError(Exception):
    """An error raised when OpenSSL asks for a private key's password, since the server supports no encrypted
    keys.
    """


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The paths of the server's TLS files, all in PEM format.

    Attributes:
        certificate: the server's certificate, followed by the intermediate certificates of its chain.
        key: the certificate's private key; None if it is in the certificate's file.
        client_ca: certificate authorities for clients; None: clients need no certificate.
    """

    certificate: Path
    key: Path | None
    client_ca: Path | None

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the TLS files that the settings name; None if the server uses plain HTTP."""
        if settings.tls_cert is None:
            return None
        return cls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)

    def load_context(self) -> ssl.SSLContext:
        """Load the files and make an SSL context for TLS 1.2 or newer.  With `client_ca`, clients must have a
        certificate.

        Raises:
            TlsFileError: a file cannot be used.
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
        """Load certificate and private key into the context; raise TlsFileError if the key is encrypted or does
        not match.
        """
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
    """A server's SSL context whose files can be read again while it is in use.  New handshakes use the new
    files; existing connections keep the old ones.
    """

    def __new__(cls, files: TlsFiles) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: TlsFiles) -> None:
        """Read the files.

        Raises: TlsFileError: one of the files cannot be used.
        """
        self._files = files
        self._current = files.load_context()

    def reload_files(self) -> None:
        """Read the TLS files again and use them for later handshakes.

        Raises:
            TlsFileError: one of them cannot be used; nothing has changed.
        """
        self._current = self._files.load_context()

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Begin a handshake with the files that were read last; event loops call this for each connection."""
        return self._current.wrap_bio(*arguments, **options)


def log_ignored_reload() -> None:
    """Log that SIGHUP is ignored, because the server has no TLS files to read again."""
    log.info("SIGHUP came and is ignored: without TLS there are no files to read again")


def _refuse_password() -> str:
    """Raise an error in place of a password, since OpenSSL would otherwise ask for one at the terminal."""
    raise _EncryptedKeyError


def _require_readable(setting: str, path: Path) -> None:
    """Raise a TlsFileError, which names the setting, if the file cannot be opened or is no regular file."""
    try:
        open_regular_file(path).close()
    except OSError as error:
        raise TlsFileError(setting, f"{path} cannot be read: {error.strerror}") from None


def _require_certificates(setting: str, path: Path) -> None:
    """Raise a TlsFileError, which names the setting, if the file has no certificate in PEM format."""
    _require_readable(setting, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except (ssl.SSLError, OSError):
        raise TlsFileError(setting, f"{path} holds no certificate in PEM form") from None
