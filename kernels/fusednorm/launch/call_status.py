"""A description of how this process makes repeated calls."""

from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.launch.extension_calls import find_extension_status
from fusednorm.launch.prepared_kernels import can_bypass_triton
from fusednorm.launch.replay_cache import get_extension, is_extension_pending


def describe_repeated_calls() -> str:
    """Describe for people how this process makes repeated calls on a GPU, and why.

    The process plans each call anew, or replays calls in Python or in the host extension.
    """
    if INTERPRETED:
        return "repeated calls on a GPU are planned anew: kernels are interpreted"
    if not can_bypass_triton():
        return "repeated calls on a GPU are planned anew: Triton's hooks or debug settings see each launch"
    is_there, path_or_reason = find_extension_status()
    if get_extension() is not None or (is_there and is_extension_pending()):
        return f"repeated calls on a GPU are made by the host extension: {path_or_reason}"
    if not is_extension_pending():
        path_or_reason = "this process does not use the host extension"
    return f"repeated calls on a GPU are made by Python: {path_or_reason}"
