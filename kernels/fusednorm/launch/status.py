"""A description of how this process makes repeated calls."""

from fusednorm.devices.device import INTERPRETED
from fusednorm.launch.native import explain_extension
from fusednorm.launch.prepared import undisturbed
from fusednorm.launch.replay import in_use, is_extension_expected


def describe_calls() -> str:
    """How this process makes repeated calls on a GPU, and why: anew, by Python, or by the host extension."""
    if INTERPRETED:
        return "repeated calls on a GPU are planned anew: kernels are interpreted"
    if not undisturbed():
        return "repeated calls on a GPU are planned anew: Triton's hooks or debug settings see each launch"
    is_there, path_or_reason = explain_extension()
    if in_use() is not None or (is_there and is_extension_expected()):
        return f"repeated calls on a GPU are made by the host extension: {path_or_reason}"
    if not is_extension_expected():
        path_or_reason = "this process does not use the host extension"
    return f"repeated calls on a GPU are made by Python: {path_or_reason}"
