"""What a client may do: after hello, with the key that it brings or that stands for its user."""

import hashlib
import logging
from types import SimpleNamespace

import pytest
from normserve.admission.keys import ApiKey, Keyring, KeyScope
from normserve.codec.local_messages import ALIGNMENT, MAX_FRAME_BYTES, VERSION, HelloMessage
from normserve.errors import (
    ForbiddenError,
    InvalidParameterError,
    MalformedPayloadError,
    RateLimitedError,
    UnauthorizedError,
)
from normserve.local.local_session import LocalSession
from normserve.metrics.request_metrics import RequestRecord
from normserve.requests.key_authorisation import KeyAuthorisation

INFER = frozenset([KeyScope.INFER])
LAYERS = frozenset([KeyScope.LAYERS])
GREETING = HelloMessage(VERSION)


@pytest.fixture
def refusals(caplog):
    """The fields of each refusal in the audit trail."""
    caplog.set_level(logging.INFO, "normserve.audit")
    return lambda: [record.fields for record in caplog.records if record.getMessage() == "key_refused"]


def key(name, secret, scopes=INFER, **limits):
    return ApiKey(name, hashlib.sha256(secret).digest(), scopes, **limits)


def keyring(*keys):
    return Keyring(keys, clock=lambda: 0.0)


def session(keys=None, key_name=None, *, hello=GREETING):
    made = LocalSession(7, key_name, None if keys is None else KeyAuthorisation(keys, "in hello"))
    if hello is not None:
        made.store_hello_and_make_response(hello, {})
    return made


def authorise(of, needed=INFER):
    sent = SimpleNamespace(
        record=RequestRecord(op="grow"), client_identity=of.client_identity, log_fields={"request_id": "an-id"}
    )
    assert of.authorise(needed, sent) is sent.client_identity
    return sent.client_identity, sent.record


def test_the_greeting_says_what_clients_must_know():
    greeting = session(hello=None).store_hello_and_make_response(HelloMessage(VERSION), {"device": None})
    assert greeting == {
        "version": VERSION,
        "alignment": ALIGNMENT,
        "max_frame_bytes": MAX_FRAME_BYTES,
        "device": None,
    }


def test_nothing_comes_before_hello():
    with pytest.raises(MalformedPayloadError, match="hello"):
        authorise(session(hello=None))


@pytest.mark.parametrize("version", [0, VERSION + 1, 2**63 - 1])
def test_a_hello_of_another_version_is_none(version):
    of = session(hello=None)
    with pytest.raises(InvalidParameterError, match="version"):
        of.store_hello_and_make_response(HelloMessage(version), {})
    with pytest.raises(MalformedPayloadError):
        authorise(of)


def test_a_hello_of_another_version_leaves_what_was_said_before():
    of = session(keyring(key("batch", b"secret")), hello=HelloMessage(VERSION, "secret"))
    with pytest.raises(InvalidParameterError):
        of.store_hello_and_make_response(HelloMessage(VERSION + 1, "other"), {})
    assert authorise(of)[0].key == "batch"


def test_without_keys_a_client_is_its_user():
    caller, record = authorise(session())
    assert (caller.address, caller.tenant_name, caller.key, caller.max_inflight_bytes) == (
        "uid 7",
        "uid 7",
        None,
        None,
    )
    assert record.key_name is None


def test_a_key_that_is_not_asked_for_says_nothing():
    assert authorise(session(hello=HelloMessage(VERSION, "anything")))[0].tenant_name == "uid 7"


def test_a_key_says_who_the_client_is():
    caller, record = authorise(
        session(keyring(key("batch", b"secret", max_inflight_bytes=9)), hello=HelloMessage(VERSION, "secret"))
    )
    assert (caller.tenant_name, caller.max_inflight_bytes) == ("key:batch", 9)
    assert record.key_name == "batch"


def test_a_key_stands_for_a_user_who_brings_none():
    keys = keyring(key("batch", b"secret"), key("other", b"theirs"))
    assert authorise(session(keys, "batch"))[0].key == "batch"
    assert authorise(session(keys, "batch", hello=HelloMessage(VERSION, "theirs")))[0].key == "other"


@pytest.mark.parametrize("brought", ["", "wrong", "\N{LATIN SMALL LETTER E WITH ACUTE}", "batch"])
def test_a_wrong_key_is_refused_though_another_stands_for_the_user(brought, refusals):
    of = session(keyring(key("batch", b"secret")), "batch", hello=HelloMessage(VERSION, brought))
    with pytest.raises(UnauthorizedError, match="not one that the server knows"):
        authorise(of)
    told = {"reason": "unknown", "method": "local", "path": "grow", "address": "uid 7", "request_id": "an-id"}
    assert refusals() == [told]


@pytest.mark.parametrize("named", [None, "gone"])
def test_a_key_must_come_from_somewhere(named):
    with pytest.raises(UnauthorizedError, match="hello"):
        authorise(session(keyring(key("batch", b"secret")), named))


def test_a_key_does_no_more_than_its_scopes(refusals):
    of = session(keyring(key("batch", b"secret")), hello=HelloMessage(VERSION, "secret"))
    with pytest.raises(ForbiddenError, match="layers"):
        authorise(of, LAYERS)
    assert [each["reason"] for each in refusals()] == ["forbidden"]
    assert authorise(of)[0].key == "batch"


def test_a_key_that_has_expired_is_refused():
    of = session(keyring(key("batch", b"secret", expires=1.0)), hello=HelloMessage(VERSION, "secret"))
    with pytest.raises(UnauthorizedError, match="expired"):
        authorise(of)


def test_a_key_is_asked_for_at_each_message():
    keys = keyring(key("batch", b"secret"))
    of = session(keys, hello=HelloMessage(VERSION, "secret"))
    authorise(of)
    keys.replace_keys([key("batch", b"new")])
    with pytest.raises(UnauthorizedError):
        authorise(of)
    of.store_hello_and_make_response(HelloMessage(VERSION, "new"), {})
    assert authorise(of)[0].key == "batch"


def test_requests_of_a_key_are_counted_and_refused_ones_are_not():
    of = session(keyring(key("batch", b"secret", requests_per_second=2)), hello=HelloMessage(VERSION, "secret"))
    for _ in range(5):
        with pytest.raises(ForbiddenError):
            authorise(of, LAYERS)
    for _ in range(2):
        authorise(of)
    with pytest.raises(RateLimitedError):
        authorise(of)


def test_who_greets_anew_is_nobody_until_the_key_is_known():
    of = session(keyring(key("batch", b"secret")), hello=HelloMessage(VERSION, "secret"))
    authorise(of)
    of.store_hello_and_make_response(HelloMessage(VERSION, "wrong"), {})
    with pytest.raises(UnauthorizedError):
        authorise(of)
    # Otherwise the access log would say that this key sent it.
    assert of.client_identity.key is None


@pytest.mark.parametrize(
    ("of", "may"),
    [
        (key("a", b"secret"), True),
        (key("a", b"secret", LAYERS), False),
        (key("a", b"secret", expires=4e9), False),
        (key("a", b"secret", requests_per_second=5.0), False),
        (key("a", b"secret", max_inflight_bytes=5), False),
        (key("b", b"another"), False),
    ],
    ids=["plain", "another scope", "an end", "a rate", "a quota", "not the client's"],
)
def test_what_a_client_may_always_send(of, may):
    assert session(keyring(of), hello=HelloMessage(VERSION, "secret")).has_lasting_permission(INFER) == may
    assert session().has_lasting_permission(INFER)
