"""What records say of answers; of whole exchanges in `test_request_sender`."""

import pytest
from normload.adapters.native import NativeAdapter
from normload.clients.prepared_requests import prepare_request
from normload.clients.request_recorder import RequestRecorder, SentRequest
from normload.clients.response_checker import ResponseChecker
from normload.load.schedules import ScheduledRequest
from normserve.client.http.server_address import ServerAddress
from normserve.client.responses.api_response import ApiResponse

from tests.loadtest.conftest import WORKLOAD


@pytest.fixture
def recorder():
    address = ServerAddress.parse_url("http://127.0.0.1:1")
    pool = [prepare_request(case, NativeAdapter(), address, None) for case, _ in WORKLOAD.draw_cases(0)]
    return RequestRecorder(pool, ResponseChecker(NativeAdapter(), pool))


def code_of(recorder, body):
    """That a record has of an error with that document."""
    exchange = SentRequest(
        None, ScheduledRequest(0, 0.0, 0), 0.0, 0.0, False, None, response=ApiResponse(503, {}, memoryview(body))
    )
    recorder.defer_record(exchange, 0.0)
    recorder.record_oldest_ended()
    ((_, record),) = recorder.take_records()
    return record.code


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"code": ["overloaded"]}',
        b'{"code": "\\u001b[2J"}',
        b'{"code": "' + b"x" * 100 + b'"}',
        b"\xff",
        b"7",
    ],
)
def test_an_error_whose_document_means_nothing_counts_by_its_status(recorder, body):
    assert code_of(recorder, body) == "503"


def test_a_server_cannot_make_up_codes_without_end(recorder):
    codes = [code_of(recorder, b'{"code": "made_up_%d"}' % number) for number in range(1000)]
    assert codes[0] == "made_up_0"
    assert len(set(codes)) <= 65
    assert code_of(recorder, b'{"code": "made_up_0"}') == "made_up_0"
