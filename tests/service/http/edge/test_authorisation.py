"""What a request is found to be: whose, whether it may be served, and what is told of a refusal."""

import logging
from dataclasses import dataclass, field

import pytest
from normserve.admission.callers import Caller
from normserve.admission.keys import Keyring, parse_keys
from normserve.errors import ForbiddenError, NormserveError, RateLimitedError, UnauthorizedError
from normserve.http.edge.authorisation import Authorisation
from normserve.http.routes.scopes import RouteScopes
from normserve.metrics.requests import RequestRecord

from tests.security.keys import table

FILE = (
    table("reader", "infer-key", '["infer"]', "max_inflight_bytes = 1000\n")
    + table("old", "old-key", '["infer"]', "expires = 2020-01-01T00:00:00Z\n")
    + table("slow", "slow-key", '["infer"]', "requests_per_second = 0.001\n")
)


@dataclass
class Exchange:
    """As much of one as is asked for."""

    caller: Caller = field(default_factory=lambda: Caller("10.0.0.1"))
    record: RequestRecord = field(default_factory=RequestRecord)
    log_fields: dict[str, str] = field(default_factory=lambda: {"request_id": "an-id", "trace_id": "a-trace"})


def scope(path: str = "/v1/layer_norm", method: str = "POST", server: str = "127.0.0.1") -> dict:
    return {"type": "http", "method": method, "path": path, "root_path": "", "server": (server, 0)}


@pytest.fixture
def authorisation() -> Authorisation:
    keys = Keyring(parse_keys(FILE.encode()))
    return Authorisation(keys, RouteScopes([], metrics_are_public=False))


@pytest.fixture
def refusals(caplog):
    """The fields of each refusal that was told of."""
    caplog.set_level(logging.INFO, "normserve.audit")
    return lambda: [record.fields for record in caplog.records if record.getMessage() == "key_refused"]


def test_an_exchange_is_its_keys(authorisation, refusals):
    exchange = Exchange()
    authorisation.admit(scope(), b"infer-key", exchange)
    assert (exchange.caller.address, exchange.caller.key, exchange.record.key) == ("10.0.0.1", "reader", "reader")
    assert exchange.caller.max_inflight_bytes == 1000
    assert not refusals()


def test_what_is_public_is_nobodys(authorisation):
    exchange = Exchange()
    authorisation.admit(scope("/livez", "GET"), b"old-key", exchange)
    assert (exchange.caller.key, exchange.record.key) == (None, None)


@pytest.mark.parametrize(
    ("token", "path", "error", "reason", "key"),
    [
        (None, "/v1/layer_norm", UnauthorizedError, "absent", None),
        (b"a-guess", "/v1/layer_norm", UnauthorizedError, "unknown", None),
        (b"old-key", "/v1/layer_norm", UnauthorizedError, "expired", "old"),
        (b"infer-key", "/metrics", ForbiddenError, "forbidden", "reader"),
    ],
)
def test_a_refusal_tells_why_and_whose(authorisation, refusals, token, path, error, reason, key):
    exchange = Exchange()
    with pytest.raises(error):
        authorisation.admit(scope(path, "GET" if path == "/metrics" else "POST"), token, exchange)
    (told,) = refusals()
    assert (told["reason"], told.get("key"), told["address"], told["path"]) == (reason, key, "10.0.0.1", path)
    assert exchange.record.key == key
    assert "a-guess" not in str(told)


def test_a_request_too_many_is_its_keys_and_no_refusal_of_the_key(authorisation, refusals):
    authorisation.admit(scope(), b"slow-key", Exchange())
    exchange = Exchange()
    with pytest.raises(RateLimitedError):
        authorisation.admit(scope(), b"slow-key", exchange)
    assert exchange.record.key == "slow"
    assert not refusals()


def test_strangers_do_not_crowd_out_known_keys(authorisation, refusals, monkeypatch):
    """In the audit trail, within one second."""
    monkeypatch.setattr("asyncio.get_running_loop", lambda: Loop())
    for token in [b"a-guess"] * 100 + [b"old-key"]:
        with pytest.raises(NormserveError):
            authorisation.admit(scope(), token, Exchange())
    assert refusals()[-1]["reason"] == "expired"
    assert len(refusals()) < 100


class Loop:
    """Whose timers never run."""

    def call_later(self, delay: float, call: object) -> "Loop":
        return self

    def cancel(self) -> None:
        pass
