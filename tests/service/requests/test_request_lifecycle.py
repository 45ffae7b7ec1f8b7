"""The line of the access log for a request of any transport."""

import logging

import pytest
from normserve.admission.client_identity import ClientIdentity
from normserve.metrics.request_metrics import RequestRecord
from normserve.requests.request_lifecycle import log_request


@pytest.mark.parametrize(("key", "shown"), [(None, "-"), ("batch", "batch")])
def test_a_line_says_what_came_from_whom_and_what_became_of_it(key, shown, caplog):
    caplog.set_level(logging.INFO, "normserve.access")
    record = RequestRecord(status=200, received_bytes=32, sent_bytes=64, duration_s=0.0123456)
    log_request("POST", "/v1/layer_norm", record, ClientIdentity("10.0.0.1", key), {"request_id": "an-id"})
    (line,) = caplog.records
    assert line.fields == {
        "method": "POST",
        "path": "/v1/layer_norm",
        "status": 200,
        "key": shown,
        "address": "10.0.0.1",
        "received_bytes": 32,
        "sent_bytes": 64,
        "ms": 12.346,
        "request_id": "an-id",
    }
