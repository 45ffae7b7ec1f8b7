"""What a server shows of calls beside its responses: changes of metrics, and lines of its log.

Times, addresses and ids that differ from run to run are left out or replaced by a word.
"""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx

from tests.integration.harness.servers import ServerProcess

_SERIES = re.compile(r"^(normserve_[^ ]+) (\S+)$", re.M)
_TIMED = re.compile(r"_sum\b|_bucket\{|_seconds|_created|_bandwidth_|resident|open_fds|device_memory")
_TIMED_COUNT = re.compile(r"_duration_seconds_count")
# Front ends relay the observer's requests, too, whose heads are prepared calls.  The live page may have any length.
_OF_OBSERVER = re.compile(r'op="metrics"|key="watcher"|^normserve_prepared_calls_total|body_bytes_total{op="page"')
_VOLATILE_FIELDS = frozenset(
    {"time", "level", "logger", "message", "ms", "pid", "process", "kernel_bandwidth", "request_id", "trace_id"}
)
_EQUAL_READINGS, _READING_INTERVAL_S, _PATIENCE_S = 3, 0.02, 10.0
_REQUESTS = "normserve_requests_total"
_TOLERANCE = 2e-5
"""Of elements of results: processors differ in the last bits, and six digits are recorded."""
_LONGEST_SHOWN = 300

Series = dict[str, float]


class ServerObserver:
    """Reads a server's metrics and log between calls.

    Attributes:
        request_names: what the log is to call requests whose ids the server has chosen.
    """

    def __init__(self, server: ServerProcess, key: str | None = None) -> None:
        self._server = server
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._client = httpx.Client(base_url=server.url, headers=headers, timeout=60)
        self.request_names: dict[str, str] = {}
        self._series, self._line_count = self._settle()

    def changes(self, request_count: int = 0) -> dict[str, Any]:
        """Return the changes of metrics and the new lines of the log since the last call.

        request_count: requests that have ended in between; they are counted a moment after their responses.
        """
        before, first_line = self._series, self._line_count
        wanted = _total(before, _REQUESTS) + request_count
        self._wait_until(lambda series: _total(series, _REQUESTS) >= wanted)
        self._series, self._line_count = self._settle()
        names = sorted(before.keys() | self._series.keys())
        changes = {name: self._series.get(name, 0.0) - before.get(name, 0.0) for name in names}
        return {
            "metrics": {name: _number(change) for name, change in changes.items() if change},
            "log": self._events(first_line),
        }

    def wait_for(self, metric: str, value: float) -> None:
        """Wait until a metric has a value; a server in which it never has shows that in what is observed next."""
        self._wait_until(lambda series: _total(series, metric) == value)

    def close(self) -> None:
        self._client.close()

    def _wait_until(self, condition: Any) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not condition(self._read_series()) and time.monotonic() < end:
            time.sleep(_READING_INTERVAL_S)

    def _settle(self) -> tuple[Series, int]:
        """Read metrics and the length of the log until both no longer change."""
        end = time.monotonic() + _PATIENCE_S
        readings: list[tuple[Series, int]] = []
        while len(set(map(str, readings[-_EQUAL_READINGS:]))) != 1 or len(readings) < _EQUAL_READINGS:
            if time.monotonic() > end:
                raise AssertionError("the server's metrics do not settle")
            if readings:
                time.sleep(_READING_INTERVAL_S)
            series = self._read_series()
            readings.append((series, sum("/metrics" not in line for line in self._server.lines)))
        return readings[-1]

    def _read_series(self) -> Series:
        response = self._client.get("/metrics")
        assert response.status_code == 200, response.text
        return {
            name: float(value)
            for name, value in _SERIES.findall(response.text)
            if (_TIMED_COUNT.search(name) or not _TIMED.search(name)) and not _OF_OBSERVER.search(name)
        }

    def _events(self, first_line: int) -> list[str]:
        """Describe the log's lines from the first one on; requests that end together are logged in any order."""
        lines = [line for line in self._server.lines if "/metrics" not in line][first_line : self._line_count]
        # What a script prints and what is logged at the same time may share a line.
        lines = [part for line in lines for part in re.split(r"(?=\{)", line, maxsplit=1) if part.strip()]
        return [
            event if count == 1 else f"{count} times: {event}"
            for event, count in sorted(Counter(describe_event(line, self.request_names) for line in lines).items())
        ]


def describe_event(line: str, request_names: Mapping[str, str]) -> str:
    """Describe a line of the log as one of text, without what differs from run to run."""
    start = line.find("{")
    if start < 0:
        return f"output: {line.strip()}"
    event = json.loads(line[start:])
    fields = {name: event[name] for name in sorted(event) if name not in _VOLATILE_FIELDS}
    if "exception" in fields:
        fields["exception"] = str(fields["exception"]).strip().splitlines()[-1]
    request_id = event.get("request_id")
    if request_id is not None:
        fields["request"] = request_names.get(request_id, "ID")
    described = " ".join(f"{name}={value}" for name, value in fields.items())
    return f"{event['logger']} {event['level']}: {event['message']} {described}".strip()


def stable_response(response: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    """Return a response without what differs from run to run; names of stages stay, their times do not."""
    headers = dict(response["headers"])
    for name in ("date", "x-kernel-bandwidth"):
        if name in headers:
            headers[name] = name.upper()
    if headers.get("x-request-id", request_id) != request_id:
        headers["x-request-id"] = "ID"
    if "retry-after" in headers:
        headers["retry-after"] = _magnitude_of_s(headers["retry-after"])
    if "server-timing" in headers:
        headers["server-timing"] = re.sub(r"dur=[\d.]+", "dur=MS", headers["server-timing"])
    body = _stable_body(response["body"], request_id)
    return {"status": response["status"], "headers": headers, "body": body}


def _magnitude_of_s(retry_after: Any) -> str:
    """Say roughly how long a client is to wait: an estimate, but for a rate so low that no load alters it."""
    seconds = float(retry_after)
    if 900 <= seconds <= 1000:
        return "about 1000 s"
    return "at most 60 s" if seconds <= 60 else "more than 60 s"


def _stable_body(value: Any, request_id: str) -> Any:
    if isinstance(value, dict):
        stable = {name: _stable_body(each, request_id) for name, each in value.items()}
        if "stages_ms" in value:
            stable["stages_ms"] = sorted(value["stages_ms"])
        if "request_id" in value and value["request_id"] != request_id:
            stable["request_id"] = "ID"
        if value.get("retry_after_s") is not None:
            stable["retry_after_s"] = _magnitude_of_s(value["retry_after_s"])
        stable.pop("kernel_bandwidth", None)
        return stable
    if isinstance(value, list):
        return [_stable_body(each, request_id) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _total(series: Series, metric: str) -> float:
    return sum(value for name, value in series.items() if name.partition("{")[0] == metric)


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def differences(recorded: Any, observed: Any, path: str = "") -> list[str]:
    """Return where two observations differ, one line each; elements of results may differ by rounding."""
    if isinstance(recorded, dict) and isinstance(observed, dict):
        found = []
        for name in sorted(recorded.keys() | observed.keys()):
            where = f"{path} / {name}" if path else name
            if name not in observed:
                found.append(f"{where}: was {_shown(recorded[name])}, is absent")
            elif name not in recorded:
                found.append(f"{where}: was absent, is {_shown(observed[name])}")
            else:
                found += differences(recorded[name], observed[name], where)
        return found
    if isinstance(recorded, list) and isinstance(observed, list):
        if all(isinstance(each, str) for each in (*recorded, *observed)):
            return [
                *(f"{path}: no longer {_shown(each)}" for each in recorded if each not in observed),
                *(f"{path}: new {_shown(each)}" for each in observed if each not in recorded),
            ]
        if len(recorded) == len(observed):
            pairs = enumerate(zip(recorded, observed, strict=True))
            return [line for i, (one, other) in pairs for line in differences(one, other, f"{path} / {i}")]
    both_floats = isinstance(recorded, float) and isinstance(observed, float)
    if both_floats and math.isclose(recorded, observed, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
        return []
    return [] if recorded == observed else [f"{path}: was {_shown(recorded)}, is {_shown(observed)}"]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
