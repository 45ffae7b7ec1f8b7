"""Calls of the blocking client that come again."""

from normserve.client import Client, RetryPolicy
from normserve.codec import local_messages as frames

from tests.service.client.local.test_connection import send_segment, serving


def test_a_call_that_was_known_connects_anew_where_its_connection_ends(tmp_path):
    computed = []

    def answer(connected, tag, message):
        if isinstance(message, frames.GrowArenaMessage):
            send_segment(connected, tag)
        elif isinstance(message, frames.ComputeMessage):
            computed.append(message)
            if len(computed) == 3:
                return True
            place = message.results["y"]
            results = {"y": frames.TensorReference(place.segment, place.offset, "float32", (4, 4))}
            connected.sendall(frames.encode_frame(tag, frames.LocalResponse(200, "id", results, {"recv": 0.5})))
        return False

    path = str(tmp_path / "socket")
    retries = RetryPolicy(tries=2, first_pause_s=0.001)
    with serving(path, answer, connections=2), Client(f"unix://{path}", retries=retries) as client:
        x = client.empty((4, 4))
        for _ in range(4):
            result = client.layer_norm(x)
            assert result.y.shape == (4, 4)
            assert result.timing.stages_ms == {"recv": 0.5}
        assert len(computed) == 5
        del x, result
