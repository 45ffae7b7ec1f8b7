"""The crash report: one event of the logger `normserve.crash` with the information for a bug report.

As text it is a block of indented lines, as JSON one object.
"""

import logging
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from normserve.logs.formatting import make_block_fields

_log = logging.getLogger("normserve.crash")

_DRIVER = Path("/sys/module/nvidia/version")
_PACKAGES = ("torch", "triton", "numpy", "fastapi", "uvicorn")


def log_crash_report(
    what: str,
    *,
    version: str,
    settings: Mapping[str, object],
    device: str | None,
    work: str | None,
    trace: str | None,
) -> None:
    """Log that the process ends because of its own error.

    Args:
        what: the error, in a few words.
        settings: without secrets; defaults may be left out.
        device: its name, if it had started.
        work: the device's last work, if it failed with that.
        trace: the error's traceback.
    """
    facts = {
        "what": what,
        "version": version,
        "versions": {"python": platform.python_version(), **_read_package_versions(), **_read_driver_version()},
        "platform": platform.platform(),
        "device": device,
        "settings": dict(settings),
        "work": work,
        "traceback": trace,
    }
    _log.critical(
        "crash report", extra=make_block_fields({name: value for name, value in facts.items() if value is not None})
    )


def _read_package_versions() -> dict[str, str]:
    """Read the installed versions of packages from their metadata, without imports, which could fail again."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _read_driver_version() -> dict[str, str]:
    """Read the version of NVIDIA's driver; empty if there is none."""
    try:
        return {"nvidia_driver": _DRIVER.read_text(encoding="ascii").strip()}
    except OSError:
        return {}
