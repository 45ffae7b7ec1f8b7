"""Logging to stderr: one event per line, as text or as JSON.

A record may have fields, `extra={"fields": {...}}`: in text they follow the message as name=value, in JSON they
are members of the object.  With `extra=make_block_fields({...})`, text has each field on an indented line below the
message.
Control characters are escaped in both formats, so that text from clients can neither begin a new line nor control
a terminal.
"""

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from pythonjsonlogger.json import JsonFormatter

_FORMAT = "%(asctime)s %(levelname)-8s %(name)s: %(message)s"
# Characters that some readers take for the end of a line, that control a terminal, or that reorder letters.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MEMBERS = frozenset(["time", "level", "logger", "message", "exception", "stack", "process"])
_PLAIN = re.compile(r"[A-Za-z0-9._:/{}@%+-]+")

# Loggers that do not depend on the level: the first always writes, the second if it is enabled.
_ALWAYS_SHOWN = ("normserve.audit", "normserve.access")


class TextFormatter(logging.Formatter):
    """A formatter of text lines, with a record's fields as name=value after the message."""

    def __init__(self, process: str | None = None) -> None:
        """Args: process: this process's name in a fleet."""
        super().__init__(_FORMAT)
        self._static_fields = {} if process is None else {"process": process}

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Format a record's line and its fields, without the traceback; long fields are on indented lines below.

        The traceback follows, indented, so that none of its lines looks like another event's.
        """
        record.message = _CONTROL.sub(_escape_character, record.message)
        line, fields = super().formatMessage(record), {**self._static_fields, **_get_fields(record)}
        if getattr(record, "is_block", False):
            return "\n".join(
                [line, *(each for name, value in fields.items() for each in _format_block_field(name, value))]
            )
        return line + "".join(f" {name}={_format_value(value)}" for name, value in fields.items())

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Format the traceback."""
        return "\n".join(_indent_lines(super().formatException(ei), "    "))


class JsonLinesFormatter(JsonFormatter):
    """A formatter of JSON objects with `time`, `level`, `logger`, `message` and the record's fields."""

    def __init__(self, process: str | None = None) -> None:
        """Args: process: this process's name in a fleet."""
        super().__init__(
            ["levelname", "name", "message"],
            rename_fields={
                "levelname": "level",
                "name": "logger",
                "exc_info": "exception",
                "stack_info": "stack",
            },
            static_fields={} if process is None else {"process": process},
            timestamp="time",
        )

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        """Fill the JSON object with the standard members and the record's `fields`.

        Other attributes of the record are left out, which libraries add for terminals.
        """
        super().add_fields(log_data, record, message_dict)
        for name in log_data.keys() - _MEMBERS:
            del log_data[name]
        for name, value in _get_fields(record).items():
            log_data.setdefault(name, value)


def configure_logging(level: str, form: str = "text", process: str | None = None) -> None:
    """Set up logging to stderr: the server's own loggers from `level` on, and all others only for warnings
    or errors.

    The HTTP library warns of each malformed request, and others log each call: strangers must not fill
    the log. With JSON, warnings of Python and uncaught exceptions are logged too.

    Args:
        form: `text` or `json`.
        process: this process's name in a fleet.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLinesFormatter(process) if form == "json" else TextFormatter(process))
    own = logging.getLevelName(level.upper())
    logging.basicConfig(handlers=[handler])
    logging.getLogger().setLevel(max(own, logging.WARNING))
    for name in ("normserve", "fusednorm"):
        logging.getLogger(name).setLevel(own)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    # It warns of each batch of spans that a collector does not accept; `normserve.traces` logs that once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    for name in _ALWAYS_SHOWN:
        logging.getLogger(name).setLevel(logging.INFO)
    if form == "json":
        # Messages that Python itself would write to stderr as text.
        logging.captureWarnings(True)
        sys.excepthook = _log_exception
        threading.excepthook = _log_thread_exception


def make_block_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """Make the `extra` of a record whose fields are too long for one line."""
    return {"fields": fields, "is_block": True}


def _log_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Log an uncaught exception that ends the process, as `sys.excepthook`; an interrupt is left to
    Python's own hook.
    """
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    logging.getLogger("normserve").critical("an exception ended the process", exc_info=(kind, error, traceback))


def _log_thread_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        found = (args.exc_type, args.exc_value, args.exc_traceback)
        logging.getLogger("normserve").critical("an exception ended a thread", exc_info=found)


def _get_fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields


def _format_block_field(name: str, value: object) -> list[str]:
    """Format a field as indented lines below a log message: a text as it is, any other value as JSON.

    Control characters are escaped in both.
    """
    if isinstance(value, str) and "\n" not in value:
        return [f"    {name}: {_CONTROL.sub(_escape_character, value)}"]
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return [f"    {name}:", *_indent_lines(text.rstrip("\n"), "        ")]


def _indent_lines(text: str, margin: str) -> list[str]:
    return [margin + _CONTROL.sub(_escape_character, line) for line in text.split("\n")]


def _format_value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if _PLAIN.fullmatch(text) else json.dumps(value, default=str)


def _escape_character(found: re.Match[str]) -> str:
    return found[0].encode("ascii", "backslashreplace").decode() if found[0] > "\x7f" else f"\\x{ord(found[0]):02x}"


class ThrottledLogger:
    """A logger with at most one line per second, for events that any client can cause any number of times."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_line_at = 0.0
        self._omitted_count = 0

    def warning(self, message: str, *arguments: object) -> None:
        """Log a warning if the last one was logged at least a second ago.  Otherwise only count the warning.

        The next line that is logged has the count.
        """
        now = time.monotonic()
        if now < self._next_line_at:
            self._omitted_count += 1
            return
        if self._omitted_count:
            message, arguments = (
                message + " (and %d times since the last such line)",
                (*arguments, self._omitted_count),
            )
        self._next_line_at, self._omitted_count = now + 1.0, 0
        self._log.warning(message, *arguments)
