"""The ends of errors about unknown names, which suggest a known one."""

import difflib
import re
from collections.abc import Collection

# Longest part of an unknown name that is compared.
_MAX_COMPARED = 64
# As difflib has it for close matches; 1 is for equal names.
_LEAST_SIMILARITY = 0.6

# Names of tensors in other libraries and protocols, in lower case and without numbers.
_TENSOR_ALIASES = {
    **dict.fromkeys(("input", "inputs", "data", "hidden_states"), "x"),
    **dict.fromkeys(("gamma", "scale"), "weight"),
    **dict.fromkeys(("beta", "shift"), "bias"),
    **dict.fromkeys(("grad", "grad_output", "dout"), "dy"),
}
_NUMBER = re.compile(r"[._]*\d+$")


def suggest_name(name: str, known_names: Collection[str]) -> str:
    """Format the end of an error about an unknown name: its closest known name, or all if none is close."""
    closest = find_closest_name(name, known_names)
    return f"the closest is {closest!r}" if closest else f"expected {', '.join(known_names)}"


def find_closest_name(name: str, known_names: Collection[str]) -> str:
    """Return the known name that is most similar to a name, the first of equally similar ones; "" if none is."""
    matcher = difflib.SequenceMatcher(b=name[:_MAX_COMPARED])

    def compute_similarity(known: str) -> float:
        matcher.set_seq1(known)
        return matcher.ratio() if matcher.quick_ratio() >= _LEAST_SIMILARITY else 0.0

    # difflib's own choice of equally similar names is the last of the alphabet: weight.7 of a chain for weight.
    closest = max(known_names, key=compute_similarity, default="")
    return closest if compute_similarity(closest) >= _LEAST_SIMILARITY else ""


def find_closest_tensor_name(name: str, known_names: Collection[str]) -> str:
    """Return the tensor that an unknown name probably means; "" if there is none.

    It is found by similarity and by names that other libraries use, also in a longer name such as
    `encoder.norm.gamma`, and in `INPUT__0`.
    """
    last = _NUMBER.sub("", name[:_MAX_COMPARED]).rpartition(".")[2].lower()
    for candidate in (last, _TENSOR_ALIASES.get(last, "")):
        if candidate in known_names:
            return candidate
    return find_closest_name(last, known_names)
