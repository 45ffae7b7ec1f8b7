"""The accepted API keys, with the rate limit of each."""

import hashlib
import time
from collections.abc import Callable, Iterable, Set

from normserve.admission.client_identity import ClientIdentity
from normserve.admission.keys.keys_file import ApiKey, KeyScope
from normserve.errors import ForbiddenError, RateLimitedError, UnauthorizedError


class TokenBucket:
    """A token bucket for requests: it gains `per_second` tokens a second, and holds at most one second's worth.

    Not thread-safe: it belongs to the event loop's thread.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: per_second: above 0; below 1, bursts are of one request."""
        self.tokens_per_s = per_second
        self._clock = clock
        self._capacity = max(1.0, per_second)
        self._tokens = self._capacity
        self._refilled_at = clock()

    def refill_and_get_wait_s(self) -> float:
        """Refill the bucket; return the seconds until it has a token, 0 if it has one now."""
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._refilled_at) * self.tokens_per_s)
        self._refilled_at = now
        return max(0.0, (1 - self._tokens) / self.tokens_per_s)

    def take_token(self) -> None:
        """Take a token for a request, after `refill_and_get_wait_s` has returned 0."""
        self._tokens -= 1


#: The name of the one key that `--api-key` sets.
DEFAULT_NAME = "default"

_MAX_CALLERS = 256


class KeyringEntry:
    """One accepted key, with its token bucket and the cached identities of its clients.

    Attributes:
        token_bucket: limits the rate of its requests, also of those that need no permit; None without a
            limit.
    """

    __slots__ = ("_identities", "key", "token_bucket")

    def __init__(self, key: ApiKey, rate: TokenBucket | None) -> None:
        self.key = key
        self.token_bucket = rate
        self._identities: dict[str, ClientIdentity] = {}

    def get_identity(self, address: str) -> ClientIdentity:
        """Return the identity of a client with this key and address, cached because clients send many requests."""
        caller = self._identities.get(address)
        if caller is None:
            if len(self._identities) >= _MAX_CALLERS:
                self._identities.clear()
            caller = self._identities[address] = ClientIdentity(address, self.key.name, self.key.max_inflight_bytes)
        return caller

    def require_unexpired(self, now: float) -> None:
        """Refuse the key if it has expired by `now`, in seconds since 1970.

        Raises:
            UnauthorizedError: the key has expired.
        """
        expires = self.key.expires
        if expires is not None and now >= expires:
            raise UnauthorizedError("the API key has expired")

    def require_any_scope(self, sufficient_scopes: Set[KeyScope], now: float) -> None:
        """Refuse the key if it has expired by `now`, in seconds since 1970, or has none of the scopes
        `sufficient_scopes`.

        Raises:
            UnauthorizedError: the key has expired.
            ForbiddenError: it has none of these scopes.
        """
        self.require_unexpired(now)
        if not sufficient_scopes & self.key.scopes:
            raise ForbiddenError(
                f"the API key may not do this: it needs the scope {' or '.join(sorted(sufficient_scopes))}"
            )

    def take_token(self) -> None:
        """Take a token for one request from the key's bucket; do nothing for a key without a rate limit.

        Raises:
            RateLimitedError: the key has sent more requests a second than it may.
        """
        rate = self.token_bucket
        if rate is None:
            return
        if wait_s := rate.refill_and_get_wait_s():
            raise RateLimitedError(
                f"the API key may send {rate.tokens_per_s:g} requests a second, and has sent more", wait_s
            )
        rate.take_token()


class Keyring:
    """All accepted API keys, which are found by the key itself or by its name.

    Not thread-safe: it belongs to the event loop's thread.

    Keys are found by their SHA-256, so the time of a look-up depends only on how the hash of a guess
    compares, from which nothing can be learnt about the key.  Valid tokens are cached, so that they are
    hashed once; a guess is compared with a cached token byte by byte only if both have the same keyed
    64-bit hash (SipHash).  The cache has at most one token for each key, and no invalid ones: clients
    without a key add nothing.

    Attributes:
        version: a number that each change of the keys increments.
    """

    def __init__(self, keys: Iterable[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_digest: dict[bytes, KeyringEntry] = {}
        self._by_token: dict[bytes, KeyringEntry] = {}
        self._by_name: dict[str, KeyringEntry] = {}
        self.version = 0
        self.replace_keys(keys)

    @classmethod
    def from_secret(cls, secret: str) -> "Keyring":
        """Make a keyring of one key that has all scopes."""
        digest = hashlib.sha256(secret.encode()).digest()
        return cls([ApiKey(DEFAULT_NAME, digest, frozenset(KeyScope))])

    @property
    def key_names(self) -> list[str]:
        """The names of all accepted keys."""
        return [grant.key.name for grant in self._by_digest.values()]

    def replace_keys(self, keys: Iterable[ApiKey]) -> None:
        """Accept only these keys from now on; a key whose rate limit is unchanged keeps its token bucket."""
        rates = {grant.key.name: grant.token_bucket for grant in self._by_digest.values()}
        self._by_digest = {
            key.digest: KeyringEntry(key, self._reuse_or_make_token_bucket(key, rates.get(key.name)))
            for key in keys
        }
        self._by_name = {grant.key.name: grant for grant in self._by_digest.values()}
        self._by_token = {}
        self.version += 1

    def find_by_token(self, token: bytes) -> KeyringEntry | None:
        """Return the entry of the key that a client sent; None if the key is not accepted.

        An expired key is found too: `KeyringEntry` refuses it.
        """
        grant = self._by_token.get(token)
        if grant is None:
            grant = self._by_digest.get(hashlib.sha256(token).digest())
            if grant is not None:
                self._by_token[token] = grant
        return grant

    def find_by_name(self, name: str) -> KeyringEntry | None:
        """Return the entry of the key with this name; None if there is none."""
        return self._by_name.get(name)

    def _reuse_or_make_token_bucket(self, key: ApiKey, before: TokenBucket | None) -> TokenBucket | None:
        """Return the token bucket for a key's rate limit: `before` if the limit is unchanged, else a new one.
        Return None if the key has no limit.

        The bucket `before` the change is kept, with its tokens, if the limit is unchanged.
        """
        if key.requests_per_second is None:
            return None
        if before is not None and before.tokens_per_s == key.requests_per_second:
            return before
        return TokenBucket(key.requests_per_second, self._clock)
