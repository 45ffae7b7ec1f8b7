"""What a request is found to be: whose, whether it may be served, and what is told of a refusal."""

import logging
from dataclasses import dataclass, field

import pytest
from normserve.admission.client_identity import ClientIdentity
from normserve.admission.keys import Keyring, KeyScope, parse_keys
from normserve.errors import ForbiddenError, NormserveError, RateLimitedError, UnauthorizedError
from normserve.metrics.request_metrics import RequestRecord
from normserve.requests.key_authorisation import KeyAuthorisation

from tests.security.keys import table

FILE = (
    table("reader", "infer-key", '["infer"]', "max_inflight_bytes = 1000\n")
    + table("old", "old-key", '["infer"]', "expires = 2020-01-01T00:00:00Z\n")
    + table("slow", "slow-key", '["infer"]', "requests_per_second = 0.001\n")
)


INFER, METRICS = frozenset([KeyScope.INFER]), frozenset([KeyScope.METRICS])


@dataclass
class Request:
    """As much of one as is asked for."""

    client_identity: ClientIdentity = field(default_factory=lambda: ClientIdentity("10.0.0.1"))
    record: RequestRecord = field(default_factory=RequestRecord)
    log_fields: dict[str, str] = field(default_factory=lambda: {"request_id": "an-id", "trace_id": "a-trace"})


def admit(authorisation, token, needed=INFER, key_name=None) -> Request:
    request = Request()
    authorisation.authorise_request(request, token, needed, "POST", "/v1/layer_norm", key_name)
    return request


@pytest.fixture
def authorisation() -> KeyAuthorisation:
    return KeyAuthorisation(Keyring(parse_keys(FILE.encode())), "in a header")


@pytest.fixture
def refusals(caplog):
    """The fields of each refusal that was told of."""
    caplog.set_level(logging.INFO, "normserve.audit")
    return lambda: [record.fields for record in caplog.records if record.getMessage() == "key_refused"]


def test_a_request_is_its_keys(authorisation, refusals):
    request = admit(authorisation, b"infer-key")
    assert (request.client_identity.address, request.client_identity.key, request.record.key_name) == (
        "10.0.0.1",
        "reader",
        "reader",
    )
    assert request.client_identity.max_inflight_bytes == 1000
    assert not refusals()


def test_a_name_stands_for_a_key_that_is_not_given(authorisation):
    assert admit(authorisation, None, key_name="reader").client_identity.key == "reader"
    with pytest.raises(UnauthorizedError, match="not one that the server knows"):
        admit(authorisation, b"a-guess", key_name="reader")
    with pytest.raises(UnauthorizedError, match="must be given in a header"):
        admit(authorisation, None, key_name="gone")


@pytest.mark.parametrize(
    ("token", "needed", "error", "reason", "key"),
    [
        (None, INFER, UnauthorizedError, "absent", None),
        (b"a-guess", INFER, UnauthorizedError, "unknown", None),
        (b"old-key", INFER, UnauthorizedError, "expired", "old"),
        (b"old-key", None, UnauthorizedError, "expired", "old"),
        (b"infer-key", METRICS, ForbiddenError, "forbidden", "reader"),
        (b"infer-key", None, ForbiddenError, "forbidden", "reader"),
    ],
)
def test_a_refusal_tells_why_and_whose(authorisation, refusals, token, needed, error, reason, key):
    request = Request()
    with pytest.raises(error):
        authorisation.authorise_request(request, token, needed, "GET", "/metrics")
    (told,) = refusals()
    assert (told["reason"], told.get("key"), told["address"], told["path"]) == (reason, key, "10.0.0.1", "/metrics")
    assert (told["request_id"], told["trace_id"]) == ("an-id", "a-trace")
    assert request.record.key_name == key
    assert "a-guess" not in str(told)


def test_to_require_a_key_counts_and_tells_nothing(authorisation, refusals):
    grant = authorisation.find_key_entry(b"slow-key")
    for _ in range(3):
        assert authorisation.require_scope(grant, b"slow-key", INFER) is grant
    with pytest.raises(UnauthorizedError):
        authorisation.require_scope(None, b"a-guess", INFER)
    assert not refusals()
    assert admit(authorisation, b"slow-key").client_identity.key == "slow"


def test_a_request_too_many_is_its_keys_and_no_refusal_of_the_key(authorisation, refusals):
    admit(authorisation, b"slow-key")
    request = Request()
    with pytest.raises(RateLimitedError):
        authorisation.authorise_request(request, b"slow-key", INFER, "POST", "/v1/layer_norm")
    assert request.record.key_name == "slow"
    assert not refusals()


def test_strangers_do_not_crowd_out_known_keys(authorisation, refusals, monkeypatch):
    """In the audit trail, within one second."""
    monkeypatch.setattr("asyncio.get_running_loop", lambda: Loop())
    for token in [b"a-guess"] * 100 + [b"old-key"]:
        with pytest.raises(NormserveError):
            admit(authorisation, token)
    assert refusals()[-1]["reason"] == "expired"
    assert len(refusals()) < 100


class Loop:
    """Whose timers never run."""

    def call_later(self, delay: float, call: object) -> "Loop":
        return self

    def cancel(self) -> None:
        pass
