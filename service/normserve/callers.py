"""Who a request comes from."""

from dataclasses import dataclass

from normserve.quotas import Quota


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as far as the server knows it.

    Attributes:
        address: the client's IP address; `unix` on a Unix socket.
        key: the name of its API key, never the key itself; None where no key was given or none is asked for.
        quota: what its key may have at most; None where there is no such limit.
    """

    address: str
    key: str | None = None
    quota: Quota | None = None

    @property
    def tenant(self) -> str:
        """Whose share of the server's capacity the request takes: its key's, without one its address's."""
        return self.address if self.key is None else f"key:{self.key}"
