"""The registered layers: parameters by name."""

import contextlib
import re
from collections.abc import Iterator

from normserve.errors import NotReadyError, TooLargeError, UnknownLayerError
from normserve.jobs.chain_layers import make_chain_layer
from normserve.jobs.job import Op, RegisteredLayer

# In a URL, `.` and `..` name other resources.
_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}", re.ASCII)
LAYER_NAMES = "1 to 128 of the characters A-Z a-z 0-9 . _ - and neither . nor .."

_MOST_CHAINS = 256


def is_layer_name(text: str) -> bool:
    """Return whether a layer may have this name; `LAYER_NAMES` describes valid names."""
    return _NAME.fullmatch(text) is not None


class LayerRegistry:
    """The registered layers by name, within limits of their number and bytes.

    A layer that was replaced or removed exists until the last job that uses it has ended.
    """

    def __init__(self, *, max_layers: int, max_bytes: int) -> None:
        """Args: max_bytes: limit for all layers' parameters, in host or device memory."""
        #: Whether layers that existed before this process are still being loaded.
        self.is_loading = False
        self._max_layers = max_layers
        self._max_bytes = max_bytes
        self._layers: dict[str, RegisteredLayer] = {}
        self._nbytes = 0
        self._reservations: dict[object, tuple[str, int]] = {}
        self._chain_cache: dict[str, RegisteredLayer] = {}
        #: Increases with each change.
        self.version = 0

    def __len__(self) -> int:
        return len(self._layers)

    def __contains__(self, name: str) -> bool:
        return name in self._layers

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' parameters."""
        return self._nbytes

    @contextlib.contextmanager
    def reserve(self, name: str, nbytes: int) -> Iterator[None]:
        """Count a layer of `nbytes` against the limits during the block, in which its parameters are loaded.

        Raises:
            TooLargeError: the limit of layers, or of bytes, is reached.
        """
        self.require_capacity(name, nbytes)
        coming = object()
        self._reservations[coming] = name, nbytes
        try:
            yield
        finally:
            del self._reservations[coming]

    def put_or_replace(self, layer: RegisteredLayer) -> bool:
        """Register a layer; return whether it replaced one, whose bytes are then free.

        Raises:
            TooLargeError: the limit of layers, or of bytes, is reached.
        """
        name = layer.name
        self.require_capacity(name, layer.nbytes)
        replaced = name in self._layers
        self._nbytes += layer.nbytes - self._get_layer_bytes(name)
        self._layers[name] = layer
        self._record_change()
        return replaced

    def require_capacity(self, name: str, nbytes: int) -> None:
        """Raise an error if a layer of `nbytes` could not be registered now.

        Raises:
            TooLargeError: the limit of layers, or of bytes, is reached.
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
        """Return the layer of that name.

        Raises:
            UnknownLayerError: there is none.
            NotReadyError: layers are still being loaded, and there is none of that name yet.
        """
        try:
            return self._layers[name]
        except KeyError:
            self._require_loaded()
            raise UnknownLayerError("no layer of that name is registered") from None

    def resolve(self, op: Op, text: str) -> RegisteredLayer:
        """Return the registered layer that a request names.  For a chain, the request names several layers,
        separated by commas, which are combined into one.

        Equal texts give the same chain until layers change.

        Raises:
            UnknownLayerError: there is no layer of such a name.
            InvalidParameterError: the layers cannot form a chain.
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
        """Remove a layer by its name; jobs that already use it keep it until they have ended.

        Raises:
            UnknownLayerError: there is none.
        """
        self._nbytes -= self.get(name).nbytes
        del self._layers[name]
        self._record_change()

    def list_layers(self) -> list[RegisteredLayer]:
        """List all layers, sorted by name.

        Raises:
            NotReadyError: layers are still being loaded.
        """
        self._require_loaded()
        return [self._layers[name] for name in sorted(self._layers)]

    def _require_loaded(self) -> None:
        """Raises: NotReadyError: layers are still being loaded."""
        if self.is_loading:
            raise NotReadyError("the server is still loading its layers") from None

    def _record_change(self) -> None:
        self._chain_cache.clear()
        self.version += 1

    def _get_layer_bytes(self, name: str) -> int:
        """Return the bytes of the registered layer of that name; 0 without one."""
        return self._layers[name].nbytes if name in self._layers else 0
