"""The table of statuses is complete, and problem documents say what they must."""

import json

import pytest
from normserve import errors
from normserve.errors import NormserveError, TooManyConnectionsError
from normserve.errors.problems import STATUSES, get_status
from normserve.http.problem_responses import make_problem_response


def family(error: type) -> set[type]:
    return {error}.union(*(family(child) for child in error.__subclasses__()))


SERVER_ERRORS = {each for each in family(NormserveError) if each.__module__ == errors.__name__}


def test_every_error_has_a_status():
    assert STATUSES.keys() == SERVER_ERRORS


def test_tree_in_the_docstring_is_the_tree():
    drawn = {word for word in errors.__doc__.split() if word.endswith("Error")}
    assert drawn == {error.__name__ for error in SERVER_ERRORS}


@pytest.mark.parametrize("error", sorted(SERVER_ERRORS, key=lambda each: each.__name__))
def test_problem_document(error):
    raised = error("what was expected and what came")
    status, headers, body = make_problem_response(raised, "an-id")
    document = json.loads(body)
    assert status == document["status"] == get_status(raised)
    assert document["code"] == error.code
    assert document["request_id"] == "an-id"
    assert document["detail"] == raised.detail
    # Clients of /v2 look for `error`, and of a connection that is refused nobody knows what it would ask for.
    beside = {"error"} if error is TooManyConnectionsError else set()
    assert document.keys() == {"type", "title", "status", "detail", "code", "request_id"} | beside
    named = dict(headers)
    assert named[b"content-type"] == b"application/problem+json"
    assert int(named[b"content-length"]) == len(body)
    assert named[b"x-error-code"] == error.code.encode()


def test_below_v2_the_code_is_a_header_alone():
    _, headers, body = make_problem_response(errors.InvalidShapeError("no"), "an-id", "/v2/models/layer_norm/infer")
    assert json.loads(body) == {"error": "no"}
    assert dict(headers)[b"x-error-code"] == b"invalid_shape"


@pytest.mark.parametrize(("after_s", "header"), [(0.0, b"1"), (1.0, b"1"), (1.2, b"2"), (30, b"30")])
def test_retry_after_is_whole_seconds_and_never_zero(after_s, header):
    _, headers, _ = make_problem_response(errors.OverloadedError("full", retry_after_s=after_s), "an-id")
    assert dict(headers)[b"retry-after"] == header


def test_methods_are_told():
    _, headers, _ = make_problem_response(errors.MethodNotAllowedError("no", ["GET", "PUT"]), "an-id")
    assert dict(headers)[b"allow"] == b"GET, PUT"
