"""Every status of the server's errors has one of gRPC."""

from normserve.errors.problems import STATUSES as HTTP_STATUSES
from normserve.grpc.schema import get_message_class
from normserve.grpc.statuses import STATUSES, CallError, Code, make_status_error, make_trailer


def test_the_table_has_every_status_of_an_error():
    assert set(HTTP_STATUSES.values()) == set(STATUSES)


def test_an_unknown_status_is_an_internal_error():
    assert make_status_error(418, "tea").code is Code.INTERNAL


def test_a_retry_delay_is_in_the_trailer():
    trailer = dict(make_trailer(make_status_error(429, "busy", "2")))
    assert trailer["grpc-retry-pushback-ms"] == "2000"
    status = get_message_class("google.rpc.Status").FromString(trailer["grpc-status-details-bin"])
    assert (status.code, status.message) == (Code.RESOURCE_EXHAUSTED.value[0], "busy")
    info = get_message_class("google.rpc.RetryInfo")()
    assert status.details[0].Unpack(info)
    assert info.retry_delay.seconds == 2


def test_an_error_without_a_delay_has_no_trailer():
    assert make_trailer(CallError(Code.NOT_FOUND, "gone")) == ()
    assert make_trailer(make_status_error(503, "no", "Wed, 21 Oct 2026 07:28:00 GMT")) == ()
