"""The blocking client."""

import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx
import numpy as np

from normserve.client.calls import administration, array_conversion, operations
from normserve.client.calls.api_call import ApiCall
from normserve.client.calls.concatenation import SEVERAL, TensorListCall, get_first_argument
from normserve.client.deadlines import Deadline
from normserve.client.errors import ClientError
from normserve.client.local.connection import LocalTransport
from normserve.client.method_signatures import DEFAULT_URL, copy_signature
from normserve.client.retries import RetryPolicy, RetrySchedule
from normserve.client.transport_choice import ClientOptions, choose_transport
from normserve.memory.tensors import DType

P = ParamSpec("P")
R = TypeVar("R")


def _make_method(build: Callable[P, ApiCall[R]]) -> "Callable[Concatenate[Client, P], R]":
    """Make the client's method of an API operation from the function that builds the operation's `ApiCall`.

    The method has the name, docstring and parameters of `build`.  Over shared memory it concatenates a list
    of tensors to one tensor, and repeats earlier calls from a cache.
    """

    def run_method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> R:
        transport = self._transport
        if isinstance(transport, LocalTransport):
            first = get_first_argument(args, kwargs)
            if type(first) in SEVERAL:
                return self._run_concatenated(transport, build, TensorListCall(build, args, kwargs))
            return self._run_cacheable(transport, first, build, args, kwargs)
        return self._run_call(build(*args, **kwargs))

    copy_signature(run_method, build)
    return run_method


class Client:
    """A blocking client of one server.

    Its methods take arrays of numpy, torch or any other library with DLPack, or `HostTensor`s, and return tensors
    of the same kind.  A failed call that may succeed later is repeated as its `RetryPolicy` specifies.  Threads may
    share a client; close it, or use it in a `with`.

    Examples:
        >>> import numpy as np
        >>> from normserve.client import Client
        >>> with Client("http://127.0.0.1:8000", timeout_s=10.0, retries=2) as client:
        ...     y = client.layer_norm(np.random.rand(8, 1024).astype(np.float32)).y
        >>> y.shape
        (8, 1024)
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float | None = 60.0,
        retries: RetryPolicy | int | None = None,
        max_connections: int = 100,
        verify: ssl.SSLContext | str | bool = True,
        certificate: str | tuple[str, str] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Make a client; the first call connects to the server.

        Args:
            url: http://HOST:PORT, https://HOST:PORT, http+unix://PATH of a Unix socket, or unix://PATH of the Unix
                socket for clients that share memory with the server; http://127.0.0.1:8000 by default.
            api_key: sent as a bearer token; None (default) sends none.
            timeout_s: seconds for a call in total: connecting, sending, receiving, all attempts and the pauses
                between them; 60.0 by default; None is without limit.  Only the lookup of the host's name is not
                limited.
            retries: a `RetryPolicy`, or the number of repetitions of a request that may succeed later; None
                (default) allows five attempts.
            max_connections: the most requests in progress at once, 100 by default; more wait for one of them.
            verify: for https: True (default) trusts well-known authorities, a path those in a PEM file, an
                `ssl.SSLContext` its own, False any certificate.
            certificate: for https: a PEM file with the client's certificate and key, or one for each; None
                (default) for none.
            transport: an `httpx.BaseTransport` to send requests through; None (default) for sockets of the
                client's own.  A transport of another class than httpx's receives, for each of its waits, the time
                that is left at the beginning of the attempt.

        Raises:
            TypeError, ValueError: an argument has a wrong type or an unusable value.
        """
        self._options = ClientOptions.from_arguments(url, api_key, timeout_s, max_connections, verify, certificate)
        self._retry_policy = RetryPolicy.of(retries)
        self._transport = choose_transport(self._options, transport)

    layer_norm = _make_method(operations.layer_norm)
    rms_norm = _make_method(operations.rms_norm)
    group_norm = _make_method(operations.group_norm)
    layer_norm_chain = _make_method(operations.layer_norm_chain)
    layer_norm_backward = _make_method(operations.layer_norm_backward)
    rms_norm_backward = _make_method(operations.rms_norm_backward)
    group_norm_backward = _make_method(operations.group_norm_backward)
    put_layer = _make_method(administration.put_layer)
    layers = _make_method(administration.layers)
    layer = _make_method(administration.layer)
    delete_layer = _make_method(administration.delete_layer)
    info = _make_method(administration.info)

    def empty(self, shape: Sequence[int], dtype: object = "float32", *, device: object = None) -> Any:
        """Make an uninitialised array, in memory shared with the server if the client's URL is unix://PATH.

        A call then sends the array without a copy.  Over HTTP it is ordinary memory.

        Args:
            shape: the array's sizes.
            dtype: float32 (default), float16 or bfloat16, by name, of numpy or of torch; a torch dtype makes a
                tensor.  bfloat16 by name needs ml_dtypes.
            device: a torch CUDA device such as "cuda", for a tensor in its memory, shared with the server if
                that computes there; None (default) is host memory.

        Returns:
            a numpy array; a torch tensor for a torch dtype or with a device.

        Raises:
            TypeError: dtype is not a dtype of the API, or numpy does not have it; shape is no sequence of integers.
            ValueError: a size is negative.
            OverloadedError: the user's quota is exceeded, after all retries.
            ClientError: the server has no memory for this client, or is not reachable.

        Examples:
            >>> from normserve.client import Client
            >>> with Client("http://127.0.0.1:8000") as client:
            ...     x = client.empty((8, 1024), "float32")
            ...     x[:] = 1.0
            ...     y = client.layer_norm(x).y
        """
        of, as_torch = array_conversion.parse_dtype(dtype)
        sizes = array_conversion.parse_shape(shape)
        if device is not None:
            return self._make_empty_on_device(device, of, sizes)
        nbytes = prod(sizes) * of.itemsize
        transport = self._transport
        if nbytes and isinstance(transport, LocalTransport):
            data = self._run_with_retries(lambda deadline: transport.allocate_memory(nbytes, deadline))
        else:
            data = np.empty(nbytes, np.uint8).data
        return array_conversion.make_array(data, of, sizes, as_torch=as_torch)

    def _make_empty_on_device(self, device: object, dtype: DType, shape: tuple[int, ...]) -> Any:
        """Make an uninitialised device tensor, in memory shared with the server if the server offers it.

        Otherwise torch allocates the tensor: over HTTP, on another device than the server's, or without
        elements.
        """
        transport, index = self._transport, array_conversion.get_cuda_index(device)
        made = None
        if index is not None and 0 not in shape and isinstance(transport, LocalTransport):
            made = self._run_with_retries(partial(transport.try_allocate_device_tensor, index, dtype, shape))
        return array_conversion.make_device_tensor(device, dtype, shape) if made is None else made

    def close(self) -> None:
        """Close all connections; the end of a `with` does it, too."""
        self._transport.close()

    def __repr__(self) -> str:
        return self._options.format_redacted_repr(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_concatenated(
        self, transport: LocalTransport, build: Callable[..., ApiCall[R]], list_call: TensorListCall
    ) -> R:
        """Run an operation on lists of tensors as one call on concatenated tensors, and split the results.

        The tensors are concatenated directly in shared memory, where the server reads them without another copy.

        Args:
            build: builds the operation's `ApiCall`.
            list_call: the operation's arguments.
        """
        arguments = {
            name: place.concatenate_into(self.empty(place.shape, place.dtype, device=place.device))
            for name, place in list_call.iterate_plans()
        }
        named = list_call.make_arguments(arguments)
        return list_call.split_result(
            self._run_cacheable(transport, get_first_argument((), named), build, (), named)
        )

    def _run_cacheable(
        self,
        transport: LocalTransport,
        first_argument: object,
        build: Callable[..., ApiCall[R]],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> R:
        """Run an operation and return its result.  If an equal earlier call is cached, its encoded message is sent
        again.

        Otherwise build the call, send it, and cache it for later calls whose arguments have the same shapes and
        locations in shared memory.

        Args:
            first_argument: the operation's first tensor, whose kind of array selects the cache.
            build: builds the operation's `ApiCall`.
            args, kwargs: the operation's arguments.
        """
        link = transport.get_usable_connection()
        recurring = None if link is None else link.call_caches.get_cache(first_argument)
        signature = None if recurring is None else recurring.compute_signature(build, args, kwargs)
        if link is None or recurring is None or signature is None:
            return self._run_call(build(*args, **kwargs))

        def exchange(deadline: Deadline) -> R:
            cached_result: R | None = transport.try_exchange_cached(link, recurring, signature, deadline)
            if cached_result is not None:
                return cached_result
            call = build(*args, **kwargs)
            result = call.read_response(transport.exchange(call, deadline), self._options.api_key)
            recurring.try_add_call(signature, call, result)
            return result

        return self._run_with_retries(exchange)

    def _run_call(self, call: ApiCall[R]) -> R:
        """Send a call and return its result.  After a failure that the client's retry policy covers, the call is
        sent again.
        """
        return self._run_with_retries(
            lambda deadline: call.read_response(self._transport.exchange(call, deadline), self._options.api_key)
        )

    def _run_with_retries(self, attempt: Callable[[Deadline], R]) -> R:
        """Call `attempt` until it succeeds; raise its error when the retry policy allows no further attempt.

        All attempts and the pauses between them share one deadline, the client's timeout.
        """
        deadline = Deadline(self._options.timeout_s)
        attempts = None
        while True:
            try:
                return attempt(deadline)
            except ClientError as failure:
                attempts = attempts or RetrySchedule(self._retry_policy, deadline)
                pause_s = attempts.take_next_pause_s(failure)
                if pause_s is None:
                    raise
            time.sleep(pause_s)
