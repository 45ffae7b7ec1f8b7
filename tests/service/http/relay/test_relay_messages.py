"""Messages between a front end and the process that owns a device."""

from normserve.http.measured import LaunchMeasurements
from normserve.http.relay import messages

MEASURED = LaunchMeasurements(0.0, 0.5, 0.0, 0.25, 0.0, 64, 256.0, 2)


def sent(message):
    """A message as the other process has it."""
    (heard,) = messages.from_owner.decode(messages.encode([message]))
    return heard


def test_a_result_gets_its_header_where_it_is_sent():
    shared = ((b"vary", b"origin"),)
    body = [b"header", messages.SharedSlabRange(1, 64, 100)]
    result = sent(messages.OperationResponse(7, "application/x-npy", MEASURED, shared, body))
    assert result.make_response("asked") == messages.CompleteResponse(
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
