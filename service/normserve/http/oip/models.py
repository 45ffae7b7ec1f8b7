"""Models: the operations, and the registered layers by their names."""

from dataclasses import dataclass

from normserve.errors import NotFoundError, UnknownLayerError
from normserve.jobs.job import Op, PassDirection, RegisteredLayer
from normserve.layers.registry import LayerRegistry
from normserve.requests.request_parameters import suggest_operation

VERSION = "1"
"""The version of every model."""


@dataclass(frozen=True, slots=True)
class InferenceModel:
    """A model of the inference protocol: one operation or one registered layer, under the model's name.

    Attributes:
        is_layer: whether its parameters are those of the registered layer of this name.
    """

    name: str
    op: Op
    direction: PassDirection
    is_layer: bool = False


OPERATIONS = {
    name: InferenceModel(name, op, direction)
    for op in Op
    for direction in op.passes
    for name in [op.value if direction is PassDirection.FORWARD else f"{op.value}_backward"]
}


class ModelCatalogue:
    """The models by name: all operations, and the registered layers.

    A layer cannot be found if it has the name of an operation.
    """

    def __init__(self, layers: LayerRegistry) -> None:
        self._layers = layers

    def find_model(self, name: str, version: str | None = None) -> InferenceModel:
        """Return the model with this name.

        Raises:
            NotFoundError: there is no such model, or not in this version.
            NotReadyError: layers are still being loaded.
        """
        model = OPERATIONS.get(name)
        if model is None:
            try:
                model = _make_layer_model(self._layers.get(name))
            except UnknownLayerError:
                raise NotFoundError(
                    f"no model has this name{suggest_operation(name)}; POST /v2/repository/index lists all models"
                ) from None
        if version not in (None, VERSION):
            raise NotFoundError(f"every model has the version {VERSION} and no other")
        return model

    def list_models(self) -> list[InferenceModel]:
        """List every model: the operations first, then the layers by name."""
        layers = [each for each in self._layers.list_layers() if each.name not in OPERATIONS]
        return [*OPERATIONS.values(), *map(_make_layer_model, layers)]


def _make_layer_model(layer: RegisteredLayer) -> InferenceModel:
    return InferenceModel(layer.name, layer.op, PassDirection.FORWARD, is_layer=True)
