"""Checks an InferenceService against KServe's own models; run by an interpreter that has the package `kserve`.

Reads the manifest as JSON from standard input and prints each mistake as a line.
"""

import json
import re
import sys
from collections.abc import Iterator

import kserve.models
import kubernetes.client

_PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}


def mistakes(value: object, kind: str, where: str) -> Iterator[str]:
    """What of a value is not as its type has it."""
    listed, mapped = re.fullmatch(r"[Ll]ist\[(.*)\]", kind), re.fullmatch(r"[Dd]ict[(\[]str, (.*)[)\]]", kind)
    if listed or mapped:
        if not isinstance(value, list if listed else dict):
            yield f"{where} must be {kind}"
            return
        pairs = enumerate(value) if listed else value.items()
        for key, each in pairs:
            yield from mistakes(each, (listed or mapped)[1], f"{where}[{key!r}]")
        return
    if kind in _PLAIN:
        if not isinstance(value, _PLAIN[kind]):
            yield f"{where} must be {kind}"
        return
    model = getattr(kserve.models, kind, None) or getattr(kubernetes.client, kind, None)
    if model is None or not isinstance(value, dict):
        if model is None and kind not in ("IntstrIntOrString", "ResourceQuantity"):
            yield f"{where} is of a kind that is not known: {kind}"
        elif model is not None:
            yield f"{where} must be {kind}"
        return
    fields = {shown: attribute for attribute, shown in model.attribute_map.items()}
    for name, each in value.items():
        if name not in fields:
            yield f"{where}.{name} is no field of {kind}"
        else:
            yield from mistakes(each, model.openapi_types[fields[name]], f"{where}.{name}")


if __name__ == "__main__":
    for mistake in mistakes(json.load(sys.stdin), "V1beta1InferenceService", "service"):
        print(mistake)
