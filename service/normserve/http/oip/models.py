"""Models: the operations, and the registered layers by their names."""

from dataclasses import dataclass

from normserve.errors import NotFoundError, UnknownLayerError
from normserve.jobs.job import Layer, Op, Pass
from normserve.layers.registry import LayerRegistry

VERSION = "1"
"""The version of every model."""


@dataclass(frozen=True, slots=True)
class Model:
    """An operation or a registered layer, under one name.

    Attributes:
        is_layer: whether its parameters are those of the registered layer of this name.
    """

    name: str
    op: Op
    direction: Pass
    is_layer: bool = False


OPERATIONS = {
    name: Model(name, op, direction)
    for op in Op
    for direction in op.passes
    for name in [op.value if direction is Pass.FORWARD else f"{op.value}_backward"]
}


class Models:
    """Finds models.  A layer with the name of an operation is hidden by the operation."""

    def __init__(self, layers: LayerRegistry) -> None:
        self._layers = layers

    def get(self, name: str, version: str | None = None) -> Model:
        """The model of that name.

        Raises:
            NotFoundError: there is no such model, or not in this version.
            NotReadyError: layers are still being loaded.
        """
        model = OPERATIONS.get(name)
        if model is None:
            try:
                model = _of_layer(self._layers.get(name))
            except UnknownLayerError:
                raise NotFoundError("no model has this name; POST /v2/repository/index lists all models") from None
        if version not in (None, VERSION):
            raise NotFoundError(f"every model has the version {VERSION} and no other")
        return model

    def all(self) -> list[Model]:
        """Every model: the operations first, then the layers by name."""
        layers = [each for each in self._layers.all() if each.name not in OPERATIONS]
        return [*OPERATIONS.values(), *map(_of_layer, layers)]


def _of_layer(layer: Layer) -> Model:
    return Model(layer.name, layer.op, Pass.FORWARD, is_layer=True)
