"""The registered layers: parameters by name."""

import contextlib
import re
from collections.abc import Iterator

from normserve.errors import NotReadyError, TooLargeError, UnknownLayerError
from normserve.jobs.chain import make_chain_layer
from normserve.jobs.job import Op, RegisteredLayer

# In a URL, `.` and `..` name other resources.
_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}", re.ASCII)
LAYER_NAMES = "1 to 128 of the characters A-Z a-z 0-9 . _ - and neither . nor .."

_MOST_CHAINS = 256


def is_layer_name(text: str) -> bool:
    """Whether a layer may be called so; `LAYER_NAMES` says which names may be."""
    return _NAME.fullmatch(text) is not None


class LayerRegistry:
    """Layers by name.  A replaced or removed layer lives on in the jobs that already hold it."""

    def __init__(self, *, max_layers: int, max_bytes: int) -> None:
        """Args: max_bytes: of all layers' parameters, wherever the backend keeps them."""
        #: Whether layers are still to come that were there before this process.
        self.is_loading = False
        self._max_layers = max_layers
        self._max_bytes = max_bytes
        self._layers: dict[str, RegisteredLayer] = {}
        self._nbytes = 0
        self._reservations: dict[object, tuple[str, int]] = {}
        self._chain_cache: dict[str, RegisteredLayer] = {}
        #: Another number after each change.
        self.version = 0

    def __len__(self) -> int:
        return len(self._layers)

    def __contains__(self, name: str) -> bool:
        return name in self._layers

    @property
    def nbytes(self) -> int:
        """Of all layers' parameters."""
        return self._nbytes

    @contextlib.contextmanager
    def reserve(self, name: str, nbytes: int) -> Iterator[None]:
        """Reserve memory for a layer of so many bytes while its parameters are brought to the device.

        Raises:
            TooLargeError: there are as many layers, or bytes, as may be.
        """
        self.require_capacity(name, nbytes)
        coming = object()
        self._reservations[coming] = name, nbytes
        try:
            yield
        finally:
            del self._reservations[coming]

    def put(self, layer: RegisteredLayer) -> bool:
        """Register a layer; whether it replaced one, whose bytes it takes over.

        Raises:
            TooLargeError: there are as many layers, or bytes, as may be.
        """
        name = layer.name
        self.require_capacity(name, layer.nbytes)
        replaced = name in self._layers
        self._nbytes += layer.nbytes - self._get_layer_bytes(name)
        self._layers[name] = layer
        self._record_change()
        return replaced

    def require_capacity(self, name: str, nbytes: int) -> None:
        """Refuse a layer of so many bytes that could not be registered now.

        Raises:
            TooLargeError: there are as many layers, or bytes, as may be.
        """
        coming = dict(self._reservations.values())
        names = self._layers.keys() | coming.keys()
        if name not in names and len(names) >= self._max_layers:
            raise TooLargeError(f"{self._max_layers} layers are registered, no more than that are kept")
        there = self._nbytes - self._get_layer_bytes(name)
        there += sum([of - self._get_layer_bytes(other) for other, of in coming.items() if other != name])
        if there + nbytes > self._max_bytes:
            raise TooLargeError(
                f"the layer's parameters take {nbytes} bytes beside {there} of the layers that are there, "
                f"no more than {self._max_bytes} are kept"
            )

    def get(self, name: str) -> RegisteredLayer:
        """The layer of that name.

        Raises:
            UnknownLayerError: there is none.
            NotReadyError: there is none yet.
        """
        try:
            return self._layers[name]
        except KeyError:
            if self.is_loading:
                raise NotReadyError("the server is still loading its layers") from None
            raise UnknownLayerError("no layer of that name is registered") from None

    def resolve(self, op: Op, text: str) -> RegisteredLayer:
        """What a request of an operation names: a layer, or of a chain layers, joined by commas, as one.

        The same layers are the same chain each time.

        Raises:
            UnknownLayerError: there is none of such a name.
            InvalidParameterError: they make no chain.
        """
        if op is not Op.LAYER_NORM_CHAIN:
            return self.get(text)
        chain = self._chain_cache.get(text)
        if chain is None:
            chain = make_chain_layer([self.get(name) for name in text.split(",")])
            if len(self._chain_cache) >= _MOST_CHAINS:
                self._chain_cache.clear()
            self._chain_cache[text] = chain
        return chain

    def remove(self, name: str) -> None:
        """Forget a layer.

        Raises:
            UnknownLayerError: there is none.
        """
        self._nbytes -= self.get(name).nbytes
        del self._layers[name]
        self._record_change()

    def list_layers(self) -> list[RegisteredLayer]:
        """Every layer, by name."""
        return [self._layers[name] for name in sorted(self._layers)]

    def _record_change(self) -> None:
        self._chain_cache.clear()
        self.version += 1

    def _get_layer_bytes(self, name: str) -> int:
        """What a layer of that name would replace."""
        return self._layers[name].nbytes if name in self._layers else 0
