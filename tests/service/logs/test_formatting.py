"""Each event is one line, as text or as JSON, whatever somebody has put in it."""

import io
import json
import logging
import subprocess
import sys
from datetime import datetime

import pytest
from normserve.logs.formatting import JsonLinesFormatter, TextFormatter, make_block_fields

HOSTILE = "a\nb\r\nc\x1b[31md\x00e\u2028f\x85g\x7fh\u202ei\ud800j"


@pytest.fixture
def logged():
    """Logs through a formatter; gives what was written."""
    made = []

    def log(formatter: logging.Formatter, *args, level=logging.INFO, **kwargs) -> str:
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        logger = logging.Logger("normserve.some")
        logger.addHandler(handler)
        logger.log(level, *args, **kwargs)
        made.append(handler)
        return stream.getvalue()

    return log


def test_text_is_readable(logged):
    line = logged(TextFormatter(), "ready on %s", "http://x", extra={"fields": {"key": "team", "ms": 1.5}})
    assert line.endswith(" INFO     normserve.some: ready on http://x key=team ms=1.5\n")
    datetime.strptime(line[:19], "%Y-%m-%d %H:%M:%S")


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonLinesFormatter()])
def test_nothing_in_a_message_or_a_field_begins_a_line(formatter, logged):
    written = logged(formatter, "it was %s", HOSTILE, extra={"fields": {"path": HOSTILE}})
    assert written.count("\n") == 1
    assert written.isascii() or not any(sign in written[:-1] for sign in "\r\x1b\x00\u2028\x85\x7f\u202e")
    assert len(written.splitlines()) == 1
    assert written.encode()


def test_a_field_that_looks_like_others_is_quoted(logged):
    line = logged(TextFormatter(), "x", extra={"fields": {"path": "/a key=root", "quoted": 'a"b', "none": None}})
    assert line.endswith(r': x path="/a key=root" quoted="a\"b" none=null' + "\n")


def test_json_has_the_fields_as_members(logged):
    fields = {"key": "team", "bytes": 5, "logger": "mine", "settings": {"port": 1}}
    found = json.loads(
        logged(JsonLinesFormatter("1"), "said %d", 3, extra={"fields": fields, "color_message": "\x1b[1m"})
    )
    time = datetime.fromisoformat(found.pop("time"))
    assert time.utcoffset() is not None
    assert found == {
        "level": "INFO",
        "logger": "normserve.some",
        "message": "said 3",
        "process": "1",
        "key": "team",
        "bytes": 5,
        "settings": {"port": 1},
    }


def test_text_of_a_fleet_says_which_process_it_is(logged):
    line = logged(TextFormatter("front end 1"), "ready", extra={"fields": {"ms": 1.5}})
    assert line.endswith(': ready process="front end 1" ms=1.5\n')


def test_a_block_has_its_fields_on_lines_of_their_own(logged):
    fields = {"what": "it\x1b failed", "settings": {"port": 1}, "traceback": "Traceback:\n  1 / 0\n" + HOSTILE}
    lines = logged(TextFormatter("1"), "crash report", extra=make_block_fields(fields)).split("\n")
    assert lines[0].endswith(" INFO     normserve.some: crash report")
    assert lines[1:6] == [
        "    process: 1",
        r"    what: it\x1b failed",
        "    settings:",
        '        {"port": 1}',
        "    traceback:",
    ]
    assert lines[6:8] == ["        Traceback:", "          1 / 0"]
    assert lines.pop() == ""
    assert all(line.startswith("        ") and line.isascii() for line in lines[6:])


def test_a_block_of_json_is_one_object(logged):
    written = logged(
        JsonLinesFormatter(), "crash report", extra=make_block_fields({"what": "x", "traceback": "a\nb"})
    )
    found = json.loads(written)
    assert (found["message"], found["what"], found["traceback"]) == ("crash report", "x", "a\nb")
    assert written.count("\n") == 1
    assert "is_block" not in found


def failure() -> tuple:
    try:
        raise ValueError("a\n2026-01-01 00:00:00,000 INFO     normserve.logs.audit: forged")
    except ValueError:
        return sys.exc_info()


def test_an_exception_is_a_field_of_json(logged):
    written = logged(JsonLinesFormatter(), "it failed", exc_info=failure())
    found = json.loads(written)
    assert written.count("\n") == 1
    assert found["exception"].startswith("Traceback")
    assert "ValueError: a" in found["exception"]


def test_a_traceback_as_text_begins_no_event(logged):
    lines = logged(TextFormatter(), "it failed", exc_info=failure()).splitlines()
    assert lines[0].endswith("it failed")
    assert all(line.startswith("    ") for line in lines[1:])
    assert any("forged" in line for line in lines[1:])


SCRIPT = """
import logging, threading, warnings
from normserve.logs.formatting import configure_logging
configure_logging("error", "json", "2")
logging.getLogger("uvicorn.error").error("of a library")
logging.getLogger("uvicorn.error").warning("left out")
logging.getLogger("normserve.http.app").info("left out")
logging.getLogger("normserve.audit").info("audited")
logging.getLogger("normserve.access").info("accessed")
warnings.warn("of Python")
logging.getLogger().setLevel("WARNING")
warnings.warn("of Python, too")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("the end")
"""


def test_everything_that_a_process_writes_is_json():
    """Libraries, warnings, and exceptions that nobody caught; audit trail and access log whatever the level."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    found = [json.loads(line) for line in run.stderr.splitlines()]
    messages = [each["message"] for each in found]
    assert messages[:3] == ["of a library", "audited", "accessed"]
    assert "of Python, too" in messages[3]
    assert messages[4:] == ["an exception ended a thread", "an exception ended the process"]
    assert "ZeroDivisionError" in found[4]["exception"]
    assert "RuntimeError: the end" in found[5]["exception"]
    assert {each["process"] for each in found} == {"2"}
