"""A normserve of a few lines for `httpx.MockTransport`: it records requests and answers as it is told."""

import json

import httpx
import safetensors.numpy

HEADERS = {
    "content-type": "application/x-safetensors",
    "server-timing": "recv;dur=1.5, queue;dur=0.25, copy_in;dur=0, kernel;dur=0.0123456, copy_out;dur=2e-3",
    "x-kernel-bytes": "4096",
    "x-kernel-bandwidth": "3.2e12",
    "x-batch-size": "3",
    "x-request-id": "abc",
}


def tensors_answer(**tensors):
    """A successful operation's answer that holds these arrays."""
    return httpx.Response(200, headers=HEADERS, content=safetensors.numpy.save(tensors))


def problem_answer(status, code, **headers):
    """An error's answer."""
    document = {"status": status, "code": code, "detail": "it was not to be", "request_id": "abc"}
    return httpx.Response(status, headers=headers, content=json.dumps(document))


class FakeServer:
    """Answers in turn; the last answer is given for ever.  An exception in place of an answer is raised.

    Without answers, it gives back x as y.
    """

    def __init__(self, *answers):
        self.answers = list(answers) or [None]
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return tensors_answer(y=self.tensors["x"]) if answer is None else answer

    @property
    def request(self):
        """The latest request."""
        return self.requests[-1]

    @property
    def tensors(self):
        """What the latest request carried, as arrays."""
        return safetensors.numpy.load(self.request.content)

    @property
    def params(self):
        """The latest request's query."""
        return dict(self.request.url.params)
