"""The command line: `normserve serve` and `normserve version`."""

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from normserve import __version__
from normserve.fleet import serve_fleet
from normserve.logs import configure_logging
from normserve.settings import Settings

_EXAMPLES = """examples:
  normserve serve                                      on http://127.0.0.1:8000
  normserve serve --port 9000 --backend torch          on the CPU, another port
  normserve serve --checkpoint model.safetensors       with a model's norm layers registered
  normserve serve --devices 0,1                        a process on each of two GPUs, behind one port
"""

_ENVIRONMENT = (
    "Each option can be set in the environment as well: --max-body-bytes as NORMSERVE_MAX_BODY_BYTES.\n\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit code."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    if given.pop("command") == "version":
        print(f"normserve {__version__}")
        return 0
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        for fault in error.errors():
            name = "_".join(str(part) for part in fault["loc"])
            print(
                f"normserve serve: {_option(name)} (NORMSERVE_{name.upper()}): {fault['msg']}",
                file=sys.stderr,
            )
        return 2
    configure_logging(settings.log_level)
    # Until the server handles it: as a container's first process this one has no default for SIGTERM.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    if settings.devices:
        return serve_fleet(settings)
    # Late, because it takes a second to load what `version` and `--help` do without.
    from normserve.server import serve

    return serve(settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="normserve",
        description="Fused LayerNorm, RMSNorm and GroupNorm as a service.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="start the server",
        description="Start the server. It prints where to POST, with a curl line to try.",
        epilog=_ENVIRONMENT + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, field in Settings.model_fields.items():
        serve.add_argument(_option(name), dest=name, **_argument(name, field))
    commands.add_parser("version", help="print the version")
    return parser


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _argument(name: str, field: FieldInfo) -> dict[str, Any]:
    """How a setting looks on the command line; Settings itself checks the value."""
    default = "" if field.default is None else f" [default: {field.default}]"
    return {"metavar": _metavar(name, field), "help": (field.description or "") + default, "default": None}


def _metavar(name: str, field: FieldInfo) -> str:
    choices = getattr(field.annotation, "__args__", ())
    if all(isinstance(choice, str) for choice in choices) and choices:
        return "{" + ",".join(choices) + "}"
    return name.rsplit("_", 1)[-1].upper()
