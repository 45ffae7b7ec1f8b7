"""Which API key a request brings, and whether it comes too often."""

import hashlib
import time
from collections.abc import Callable, Iterable

from normserve.errors import RateLimitedError, UnauthorizedError
from normserve.keys.file import ApiKey, KeyScope

#: The name of the one key that `--api-key` sets.
DEFAULT_NAME = "default"


class RequestRate:
    """A token bucket: `per_second` requests on average, and one second's worth of them at once."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self.per_second = per_second
        self._clock = clock
        self._capacity = max(1.0, per_second)
        self._tokens = self._capacity
        self._filled = clock()

    def take(self) -> float:
        """Take one token; 0 if there was one, else the seconds until there is."""
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._filled) * self.per_second)
        self._filled = now
        if self._tokens < 1:
            return (1 - self._tokens) / self.per_second
        self._tokens -= 1
        return 0.0


class Grant:
    """A key that is known, and what it has used up."""

    __slots__ = ("_rate", "key")

    def __init__(self, key: ApiKey, rate: RequestRate | None) -> None:
        self.key = key
        self._rate = rate

    @property
    def rate(self) -> RequestRate | None:
        """What its requests are counted in."""
        return self._rate

    def require_valid(self, now: float) -> None:
        """Raises: UnauthorizedError: it has expired by `now`, in seconds since 1970."""
        expires = self.key.expires
        if expires is not None and now >= expires:
            raise UnauthorizedError("the API key has expired")

    def take_request(self) -> None:
        """Raises: RateLimitedError: it has sent more requests a second than it may."""
        if self._rate is not None and (wait_s := self._rate.take()):
            raise RateLimitedError(
                f"the API key may send {self._rate.per_second:g} requests a second, and has sent more", wait_s
            )


class Keyring:
    """Every key that the server knows.  Not thread-safe: it belongs to the event loop's thread.

    Keys are found by their SHA-256, so how long a look-up takes tells of a guess only how its hash compares, from
    which nothing can be learnt about the key.  Tokens that were right are remembered, to spare them the hashing; to
    be compared with one of those byte by byte, a guess must have the same keyed 64-bit hash (SipHash) first.  There
    is one for each key at most, and none for what was wrong: strangers add nothing.
    """

    def __init__(self, keys: Iterable[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_digest: dict[bytes, Grant] = {}
        self._by_token: dict[bytes, Grant] = {}
        self.replace(keys)

    @classmethod
    def of_one(cls, secret: str) -> "Keyring":
        """One key that may do everything."""
        digest = hashlib.sha256(secret.encode()).digest()
        return cls([ApiKey(DEFAULT_NAME, digest, frozenset(KeyScope))])

    @property
    def names(self) -> list[str]:
        """Of every key."""
        return [grant.key.name for grant in self._by_digest.values()]

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Know these keys from now on and no others; what one has used up of its rate stays used up."""
        rates = {grant.key.name: grant.rate for grant in self._by_digest.values()}
        self._by_digest = {key.digest: Grant(key, self._rate(key, rates.get(key.name))) for key in keys}
        self._by_token = {}

    def find(self, token: bytes) -> Grant | None:
        """What a key is known as; None if it is not."""
        grant = self._by_token.get(token)
        if grant is None:
            grant = self._by_digest.get(hashlib.sha256(token).digest())
            if grant is not None:
                self._by_token[token] = grant
        return grant

    def _rate(self, key: ApiKey, before: RequestRate | None) -> RequestRate | None:
        if key.requests_per_second is None:
            return None
        if before is not None and before.per_second == key.requests_per_second:
            return before
        return RequestRate(key.requests_per_second, self._clock)
