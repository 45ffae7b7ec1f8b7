"""The layers that are registered: parameters by name."""

import re

from normserve.errors import TooLargeError, UnknownLayerError
from normserve.jobs import Layer

# In a URL, `.` and `..` name other resources.
_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}", re.ASCII)
LAYER_NAMES = "1 to 128 of the characters A-Z a-z 0-9 . _ - and neither . nor .."


def is_layer_name(text: str) -> bool:
    """Whether a layer may be called so; `LAYER_NAMES` says which names may be."""
    return _NAME.fullmatch(text) is not None


class LayerRegistry:
    """Layers by name.  A replaced or removed layer lives on in the jobs that already hold it."""

    def __init__(self, *, max_layers: int) -> None:
        self._max_layers = max_layers
        self._layers: dict[str, Layer] = {}

    def __len__(self) -> int:
        return len(self._layers)

    def __contains__(self, name: str) -> bool:
        return name in self._layers

    def put(self, layer: Layer) -> bool:
        """Register a layer; whether it replaced one.

        Raises:
            TooLargeError: there are as many as may be.
        """
        self.require_room(layer)
        replaced = layer.name in self._layers
        self._layers[layer.name] = layer
        return replaced

    def require_room(self, layer: Layer) -> None:
        """Refuse a layer that could not be registered now.

        Raises:
            TooLargeError: there are as many as may be.
        """
        if layer.name not in self._layers and len(self._layers) >= self._max_layers:
            raise TooLargeError(f"{self._max_layers} layers are registered, no more than that are kept")

    def get(self, name: str) -> Layer:
        """The layer of that name.

        Raises:
            UnknownLayerError: there is none.
        """
        try:
            return self._layers[name]
        except KeyError:
            raise UnknownLayerError("no layer of that name is registered") from None

    def remove(self, name: str) -> None:
        """Forget a layer.

        Raises:
            UnknownLayerError: there is none.
        """
        self.get(name)
        del self._layers[name]

    def all(self) -> list[Layer]:
        """Every layer, by name."""
        return [self._layers[name] for name in sorted(self._layers)]
