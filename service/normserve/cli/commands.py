"""The commands `normserve serve`, `normserve grpc`, `normserve api-key` and `normserve version`."""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from importlib import util
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from normserve import __version__
from normserve.admission.keys import KeysFileError, KeysFileReader
from normserve.admission.keys.keys_file import format_key_table, generate_key
from normserve.grpc.gateway_settings import SHARED_SETTINGS, GatewaySettings
from normserve.logs.formatting import configure_logging
from normserve.process.gateway_process import limit_gateway_connections
from normserve.process.supervisor import serve_fleet
from normserve.process.tls import TlsFileError, TlsFiles
from normserve.settings import REMOVED, Settings, find_unknown_variables
from normserve.traces import otel_extra

log = logging.getLogger(__name__)

_EXAMPLES = """examples:
  normserve serve                                      on http://127.0.0.1:8000
  normserve serve --port 9000 --backend torch          on the CPU, another port
  normserve serve --checkpoint model.safetensors       with a model's norm layers registered
  normserve serve --devices 0,1                        a process on each of two GPUs, behind one port
  normserve serve --frontends 4                        four processes that speak HTTP for the one with the GPU
"""

_ENVIRONMENT = (
    "Each option{} can also be set in the environment, for example --keep-alive-s as NORMSERVE_KEEP_ALIVE_S.\n\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `normserve` with these arguments, by default the process's, and return the exit code.

    `normserve serve` returns when the server has ended.

    Raises:
        ModuleNotFoundError: torch or fusednorm, which the server needs, is not installed.
    """
    parser = _make_parser()
    given = vars(parser.parse_args(arguments))
    if given.pop("command") == "version":
        print(f"normserve {__version__}")
        return 0
    if "listen" in given:
        return _run_gateway(given)
    if "key_name" in given:
        return _make_and_print_api_key(given["key_name"])
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        for fault in error.errors():
            name = "_".join(str(part) for part in fault["loc"])
            _print_setting_error(name, fault["msg"].removeprefix("Value error, "))
        return 2
    try:
        if files := TlsFiles.from_settings(settings):
            files.load_context()
    except TlsFileError as error:
        _print_setting_error(error.setting, error.detail)
        return 2
    if settings.grpc_port is not None and util.find_spec("grpc") is None:
        _print_setting_error("grpc_port", "gRPC needs its packages: pip install 'normserve[grpc]'")
        return 2
    if settings.trace_endpoint is not None and not otel_extra.is_otel_installed():
        _print_setting_error("trace_endpoint", "traces need OpenTelemetry's SDK: pip install 'normserve[otel]'")
        return 2
    configure_logging(settings.log_level, settings.log_format)
    for name, closest in find_unknown_variables().items():
        log.warning("%r is not a setting%s", name[:100], f"; {closest} is one" if closest else "")
    if settings.api_keys_file is not None:
        try:
            KeysFileReader(settings.api_keys_file).read()
        except KeysFileError as error:
            _print_setting_error("api_keys_file", str(error))
            return 2
    # Before a fleet starts: each of its processes would fail for the same reason.
    for needed in ("torch", "fusednorm"):
        if util.find_spec(needed) is None:
            raise ModuleNotFoundError(f"the server needs {needed}", name=needed)
    # Until the server handles SIGTERM: the first process of a container has no default action for it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    if settings.devices or settings.frontend_count:
        return serve_fleet(settings)
    # A late import: it takes a second, and `version` and `--help` do not need it.
    from normserve.process.owner_server import run_server

    return run_server(settings)


def _run_gateway(given: dict[str, Any]) -> int:
    """Run the gateway of gRPC with the command line's arguments; return the exit code."""
    # A late import: only this command needs gRPC.
    from normserve.grpc.gateway import GatewayError, run_gateway

    listen, server = given.pop("listen"), given.pop("server")
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        for fault in error.errors():
            name = "_".join(map(str, fault["loc"]))
            _print_setting_error(name, fault["msg"].removeprefix("Value error, "), "grpc")
        return 2
    configure_logging(settings.log_level, settings.log_format)
    try:
        run_gateway(limit_gateway_connections(GatewaySettings.from_settings(settings, listen, server)))
    except GatewayError as error:
        print(f"normserve grpc: {error}", file=sys.stderr)
        return 2
    return 0


def _print_setting_error(name: str, what: str, command: str = "serve") -> None:
    """Print to stderr why a setting is not valid, with its option and its environment variable.

    Args:
        name: of the setting; "" for an error of several settings together.
        what: the error.
        command: the command that has the setting.
    """
    # An error of several settings together has no name.
    where = f"{_format_option(name)} (NORMSERVE_{name.upper()}): " if name else ""
    print(f"normserve {command}: {where}{what}", file=sys.stderr)


def _make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line; `normserve serve` has an option for every setting.

    Removed settings have hidden options, so that their use is refused with a hint.
    """
    parser = argparse.ArgumentParser(
        prog="normserve",
        description="Fused LayerNorm, RMSNorm and GroupNorm as a service.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"normserve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="start the server",
        description="Start the server. It prints where to POST, with a curl line to try.",
        epilog=_ENVIRONMENT.format("") + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, field in Settings.model_fields.items():
        serve.add_argument(_format_option(name), dest=name, **_make_argument_options(name, field))
    for name in REMOVED:
        # Refused by `Settings`, with a hint about the replacement.
        options = (_format_option(name), _format_option(f"no_{name}"))
        serve.add_argument(*options, dest=name, nargs="?", const="", help=argparse.SUPPRESS)
    gateway = commands.add_parser(
        "grpc",
        help="start a gateway that speaks KServe's gRPC for a server",
        description="Start a gateway that speaks KServe's gRPC for a server. `normserve serve --grpc-port 8001`"
        " starts one with the server, and again whenever it ends.",
        epilog=_ENVIRONMENT.format(" except --listen and --server"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    gateway.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:8001",
        help="address to listen on [default: %(default)s]",
    )
    gateway.add_argument(
        "--server",
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="the server, as http+unix:///run/normserve.sock or http://127.0.0.1:8000 [default: %(default)s]; "
        "over a Unix socket, the server's limits and logs have the callers' addresses",
    )
    for name in SHARED_SETTINGS:
        gateway.add_argument(
            _format_option(name), dest=name, **_make_argument_options(name, Settings.model_fields[name])
        )
    make_key = commands.add_parser(
        "api-key",
        help="make a key for --api-keys-file",
        description="Make a random API key. The key itself goes to stderr, once and nowhere else; its entry for the"
        " file of --api-keys-file goes to stdout, so that it can be appended: normserve api-key NAME >> keys.toml",
    )
    make_key.add_argument("key_name", metavar="NAME", help="name of the key in logs and metrics")
    commands.add_parser("version", help="print the version")
    return parser


def _make_and_print_api_key(key_name: str) -> int:
    """Make an API key: print the key to stderr, and its entry for the keys file to stdout.  Return the
    exit code.
    """
    key = generate_key()
    try:
        table = format_key_table(key_name, key)
    except ValueError as error:
        print(f"normserve api-key: {error}", file=sys.stderr)
        return 2
    print(f"the key, which is shown only here: {key}", file=sys.stderr)
    print(table)
    return 0


def _format_option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _make_argument_options(name: str, field: FieldInfo) -> dict[str, Any]:
    """Make the keyword arguments of `add_argument` for a setting.  Its value stays text, which
    `Settings` checks.
    """
    if field.annotation is bool:
        return {"action": argparse.BooleanOptionalAction, "help": field.description, "default": None}
    default = "" if field.default is None else f" [default: {field.default}]"
    return {"metavar": _make_metavar(name, field), "help": (field.description or "") + default, "default": None}


def _make_metavar(name: str, field: FieldInfo) -> str:
    """Make the placeholder for an option's value in the help: the allowed values, or the name's last word."""
    choices = getattr(field.annotation, "__args__", ())
    if all(isinstance(choice, str) for choice in choices) and choices:
        return "{" + ",".join(choices) + "}"
    return name.rsplit("_", 1)[-1].upper()
