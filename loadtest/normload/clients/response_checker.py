"""The check of responses."""

import threading
from collections.abc import Sequence

import numpy as np
from normserve.client import ClientError
from normserve.client.responses.api_response import ApiResponse
from numpy.typing import NDArray

from normload.adapters import ProtocolAdapter
from normload.clients.prepared_requests import PreparedRequest


class ResponseChecker:
    """The check of responses against the exact results, for all requests of the pool.

    The first correct response to a request is kept.  A later one with the same bits is correct as
    well, which only needs a comparison; for one that differs the expected response is computed again,
    in torch and float64.
    """

    def __init__(self, adapter: ProtocolAdapter, pool: Sequence[PreparedRequest]) -> None:
        """Args:
        adapter: reads responses.
        pool: the requests.
        """
        self._adapter = adapter
        self._pool = pool
        self._correct_contents: dict[int, list[NDArray[np.uint8]]] = {}
        self._compute_lock = threading.Lock()

    def find_fault(self, number: int, answer: ApiResponse) -> str | None:
        """Describe the fault of a response; return None if the response is correct.

        Args: number: the request's index in the pool.
        """
        right = self._correct_contents.get(number)
        try:
            if right is not None and _has_equal_bytes(right, answer.list_payload_buffers()):
                return None
        except ClientError as error:
            return str(error)
        with self._compute_lock:
            return self._compare_with_expected(number, answer)

    def _compare_with_expected(self, number: int, answer: ApiResponse) -> str | None:
        """Compare a response with results that torch computes in float64; return its fault, or None if it is
        correct.

        The first correct response to each request is kept, so that equal ones need no computation.
        """
        # torch takes seconds to import, and is not needed to measure times.
        import torch

        from normload.clients import oracle

        # The other cores are for the server and other processes.
        torch.set_num_threads(1)
        request = self._pool[number]
        try:
            tensors = self._adapter.parse_tensors(request.case, answer)
        except ClientError as error:
            return str(error)
        fault = oracle.find_fault(request.case, request.tensors, tensors)
        if fault is None:
            contents = [np.frombuffer(each, np.uint8).copy() for each in answer.list_payload_buffers()]
            self._correct_contents.setdefault(number, contents)
        return fault


def _has_equal_bytes(correct_buffers: Sequence[NDArray[np.uint8]], content: Sequence[memoryview]) -> bool:
    """Return whether a response has the same bytes, buffer by buffer, as one that is correct."""
    # numpy compares many bytes at once, a memoryview one by one.
    return len(correct_buffers) == len(content) and all(
        np.array_equal(each, np.frombuffer(received, np.uint8))
        for each, received in zip(correct_buffers, content, strict=True)
    )
