"""Reception of a response, up to its expected size."""

from collections.abc import Mapping
from types import TracebackType

import httpx

from normserve.client.deadlines import Deadline
from normserve.client.errors import ClientError, ConnectionFailedError, UnexpectedAnswerError
from normserve.client.quoting import sanitise_text

#: The most bytes of one document: a problem, a layer or the server's description.  All are a few KiB.
DOCUMENT_BYTES = 2**20
#: The most bytes of the list of all layers.  The server limits the number of layers: some 300 bytes each, and by
#: default 10,000 at most; this limit is twenty times as many.
LIST_BYTES = 64 * 2**20

_FIRST_ERROR = 400


def is_compressed(headers: Mapping[str, str]) -> bool:
    """Return whether a body is compressed; a small compressed body could expand without limit."""
    return headers.get("content-encoding", "").strip().lower() not in ("", "identity")


def parse_content_length(headers: Mapping[str, str]) -> int | None:
    """Return the length in the Content-Length header; None where the header is absent or holds no valid length."""
    text = headers.get("content-length", "").strip()
    # Longer numbers than 63 bits have are no lengths, and take Python time to read.
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


class LimitedBody:
    """A buffer for the pieces of a response body, with a limit on their total size.

    An error's body only explains its status, so one that is too long or compressed is left unread.
    """

    def __init__(self, status: int, headers: Mapping[str, str], most_bytes: int) -> None:
        """Args:
        status, headers: of the response.
        most_bytes: the most bytes that the body of a successful response can have.

        Raises:
            UnexpectedAnswerError: the head alone shows that the body is compressed or too long.
        """
        self._is_error = status >= _FIRST_ERROR
        self._max_bytes = DOCUMENT_BYTES if self._is_error else most_bytes
        self._content = bytearray()
        #: Whether the remaining pieces of the body are needed.
        self.is_wanted = True
        if is_compressed(headers):
            self._refuse("the answer must not be compressed, it is")
        elif (length := parse_content_length(headers) or 0) > self._max_bytes:
            self._refuse(f"the answer must have at most {self._max_bytes} bytes, {length} are announced")

    def append_if_wanted(self, piece: bytes | memoryview) -> None:
        """Append the next piece, or drop it if the body is no longer wanted.

        Raises:
            UnexpectedAnswerError: the body of a successful response is longer than the limit.
        """
        if len(self._content) + len(piece) > self._max_bytes:
            self._refuse(f"the answer must have at most {self._max_bytes} bytes, more came")
        elif self.is_wanted:
            self._content += piece

    def get_body(self) -> memoryview:
        """Return all pieces that were kept, as one buffer."""
        return memoryview(self._content)

    def _refuse(self, reason: str) -> None:
        """Drop a body that is too long or compressed if the response is an error, whose body is not essential.
        Otherwise raise an error with this reason.

        Raises:
            UnexpectedAnswerError: the response is not an error, so its body is needed.
        """
        if not self._is_error:
            raise UnexpectedAnswerError(reason)
        self.is_wanted = False
        self._content = bytearray()


def refuse_redirect(status: int) -> None:
    """Refuse a response that is a redirection.

    Raises:
        UnexpectedAnswerError: the status is 3xx.
    """
    if 300 <= status < _FIRST_ERROR:
        raise UnexpectedAnswerError(f"the answer must not be a redirection, its status is {status}")


class TransportErrorTranslator:
    """A context manager that converts the exceptions of a transport, such as httpx's, to the client's errors."""

    __slots__ = ("_deadline",)

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, ClientError):
            return
        deadline = self._deadline
        if isinstance(error, httpx.TimeoutException | TimeoutError):
            if isinstance(error, httpx.ConnectTimeout) and not deadline.is_over():
                raise ConnectionFailedError("no connection was made in time") from error
            raise deadline.make_error() from error
        if isinstance(error, httpx.NetworkError | httpx.ProxyError | OSError):
            raise ConnectionFailedError(sanitise_text(str(error), 200) or type(error).__name__) from error
        # The texts of these errors quote the server, so they stay out of the message and the chain of causes.
        if isinstance(error, httpx.HTTPError):
            raise ConnectionFailedError("the connection ended early, or the answer is not HTTP") from None
