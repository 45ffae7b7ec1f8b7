"""The functions of the CUDA driver that the extension calls, by their addresses."""

import ctypes

_FUNCTIONS = {
    "graph_launch": "cuGraphLaunch",
    "event_create": "cuEventCreate",
    "event_record": "cuEventRecord",
    "event_query": "cuEventQuery",
    "event_elapsed": "cuEventElapsedTime",
}


def find_function_addresses() -> dict[str, int]:
    """Find the addresses of the CUDA driver's functions that the extension calls, by its names for them.

    Raises:
        OSError, AttributeError: there is no such driver.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    found = {}
    for argument, name in _FUNCTIONS.items():
        address = ctypes.cast(getattr(driver, name), ctypes.c_void_p).value
        assert address is not None
        found[argument] = address
    return found
