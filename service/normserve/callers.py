"""Who a request comes from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as far as the server knows it.

    Attributes:
        address: the client's IP address; `unix` on a Unix socket.
        key: the name of its API key, never the key itself; None where no key was given or none is asked for.
    """

    address: str
    key: str | None = None

    @property
    def tenant(self) -> str:
        """Whose share of the server's capacity the request takes: its key's, without one its address's."""
        return self.address if self.key is None else f"key:{self.key}"
