"""Messages between a front end and the process that owns a device."""

from normserve.http.launch_measurements import LaunchMeasurements
from normserve.http.relay import relay_messages

MEASURED = LaunchMeasurements(0.0, 0.5, 0.0, 0.25, 0.0, 64, 256.0, 2)


def sent(message):
    """A message as the other process has it."""
    (heard,) = relay_messages.from_owner.decode(relay_messages.encode([message]))
    return heard


def test_a_result_gets_its_header_where_it_is_sent():
    shared = ((b"vary", b"origin"),)
    body = [b"header", relay_messages.SharedSlabRange(1, 64, 100)]
    result = sent(relay_messages.OperationResponse(7, "application/x-npy", MEASURED, shared, body))
    assert result.make_response("asked") == relay_messages.CompleteResponse(
        7,
        200,
        [
            (b"content-type", b"application/x-npy"),
            (b"content-length", b"106"),
            *MEASURED.make_headers(),
            *shared,
            (b"x-request-id", b"asked"),
        ],
        body,
        106,
    )
