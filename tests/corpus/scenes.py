"""Scenes of the corpus: a server with its options, and what happens to it, over one transport.

A scene is a generator of observations, each with the name of its step.  It asserts nothing: what a server does is
compared with what was recorded of an earlier one.
"""

import functools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.corpus.calls import LONG, PLAIN, WEIGHT, NormCall, ramp, refusals, successes
from tests.corpus.http_requests import INCOMPLETE_REQUEST, REQUESTS, ROUTES
from tests.corpus.observations import describe_event, stable_response
from tests.corpus.servers import (
    HTTP_TRANSPORTS,
    LOCAL_TRANSPORTS,
    TRANSPORTS,
    CorpusServer,
    Observation,
    start_server,
)
from tests.integration.harness import misbehaving_server
from tests.integration.harness.misbehaving_server import FAILS, HAS_A_BUG, RUNS_DRY, WAITS
from tests.security.keys import EVERYTHING, EXPIRED, INFER, KEYS, LAYERS, METRICS, SLOW, table, write_keys

Steps = Iterator[tuple[str, Observation]]

_WATCHER, _TINY, _BURST = "watcher-key", "tiny-key", "burst-key"
_KEYS = (
    KEYS
    + table("watcher", _WATCHER, '["metrics"]')
    + table("tiny", _TINY, '["infer"]', "max_inflight_bytes = 10\n")
    + table("burst", _BURST, '["infer"]', "requests_per_second = 3\n")
)
_BURST_COUNT, _BURST_S = 3, 0.3
_SECRETS = {
    "infer": INFER,
    "layers": LAYERS,
    "metrics": METRICS,
    "every scope": EVERYTHING,
    "an expired key": EXPIRED,
    "an unknown key": "a-guess",
    "no key": None,
}
_REPETITIONS = 8
"""More than a server sees of a call before it replays it."""
_LATE_MS, _AMPLE_MS, _DEFAULT_MS = 50, 600_000, 400
_HELD_S = 0.7
"""Longer than the ample deadline, were its unit a thousandth."""


def calls(transport: str, folder: Path, *options: str) -> Steps:
    """Make every call once, on one connection."""
    limits = ("--max-body-bytes", "1000000", "--max-inflight-bytes", "1000000")
    with start_server(transport, folder, *limits, *options) as server:
        connection = server.connect()
        for kind, group in {"successes": successes(), "refusals": refusals()}.items():
            for call in group:
                yield call.name, server.exchange(connection, call)
            yield kind, server.changes()
        connection.close()
        server.observer.wait_for("normserve_connections", 1)
        yield "closed", server.changes()


def keys(transport: str, folder: Path, *options: str) -> Steps:
    """Make calls with each key: with the scope, without it, expired, unknown, over its quota and its rate."""
    path = write_keys(folder, _KEYS)
    with start_server(transport, folder, "--api-keys-file", str(path), *options, key=_WATCHER) as server:
        connection = server.connect()
        for call in (PLAIN, LONG):
            for name, secret in _SECRETS.items():
                step = f"{call.name} with {name}"
                yield step, server.exchange(connection, call, step, key=secret)
            # Refusals are audited so many a second.
            yield f"{call.name} with each key", server.changes()
            time.sleep(1.1)
            yield f"{call.name} over a quota", server.exchange(connection, call, "quota", key=_TINY)
        for number in range(3):
            yield f"call {number} of a rate", server.exchange(connection, PLAIN, f"rate-{number}", key=SLOW)
        yield "long call of a rate", server.exchange(connection, LONG, "rate-long", key=SLOW)
        yield "limits of keys", server.changes()
        yield "burst", _burst(server, connection)


def _burst(server: CorpusServer, connection: object) -> Observation:
    """Send more than a second's requests at once, and one after a pause; anew where the machine was too slow."""
    statuses = []
    connection = server.connect()
    server.exchange(connection, PLAIN, key=_BURST)
    for _ in range(20):
        time.sleep(1.1)
        began = time.monotonic()
        statuses = [server.exchange(connection, PLAIN, key=_BURST)["status"] for _ in range(_BURST_COUNT + 1)]
        if time.monotonic() - began < _BURST_S:
            break
    time.sleep(0.5)
    after = server.exchange(connection, PLAIN, key=_BURST)["status"]
    return {"at once": statuses, "after a pause": after}


def layers(transport: str, folder: Path) -> Steps:
    """Register, replace, read, list and remove a layer with each key, and call it after each change."""
    path = write_keys(folder, _KEYS)
    with start_server(transport, folder, "--api-keys-file", str(path), key=_WATCHER) as server:
        connection = server.connect(transport if transport in LOCAL_TRANSPORTS else "http")
        caller = server.connect()
        of_layer = NormCall("call", "rms_norm", PLAIN.tensors, PLAIN.results, parameters={"layer": "a"}, key=INFER)
        for change in ("register", "replace", "read", "list", "describe", "remove"):
            for name, secret in _SECRETS.items():
                request_id = f"{change} with {name}".replace(" ", "-")
                response = connection.change_layer(change, WEIGHT, secret, request_id)
                if change == "describe":
                    response["body"] = _names_of(response["body"])
                    response["headers"].pop("content-length", None)
                yield f"{change} with {name}", stable_response(response, request_id)
            changes = server.changes()
            if change == "describe":  # In as many bytes as the machine's numbers have digits.
                del changes["metrics"]
            yield change, changes
            if change in ("register", "replace", "remove"):
                yield f"call after {change}", server.exchange(caller, of_layer)
            # Refusals are audited so many a second.
            time.sleep(1.1)
        yield "calls", server.changes()


def _names_of(value: Any) -> Any:
    """Return the names in a document whose values depend on the machine."""
    return {name: _names_of(each) for name, each in value.items()} if isinstance(value, dict) else None


def requests(transport: str, folder: Path, *options: str) -> Steps:
    """Send what only HTTP can carry, each on a connection of its own, and leave amid a body."""
    limits = ("--max-body-bytes", "1000000", "--header-timeout-s", "0.5", "--body-timeout-s", "0.5")
    with start_server(transport, folder, *limits, *options) as server:
        for name, content in REQUESTS.items():
            connection = server.connect()
            connection.send_bytes(content)
            yield name, stable_response(connection.receive(), "ID")
            connection.close()
        server.observer.wait_for("normserve_connections", 1)
        yield "each request", server.changes()
        connection = server.connect()
        connection.send_bytes(INCOMPLETE_REQUEST)
        server.observer.wait_for("normserve_inflight_requests", 1)
        connection.close()
        server.observer.wait_for("normserve_connections", 1)
        left = server.changes()
        # How much has come by then is a matter of time.
        left["log"] = [re.sub(r"received_bytes=\d+", "received_bytes=SOME", line) for line in left["log"]]
        yield "a client leaves amid its body", left


def routes(transport: str, folder: Path) -> Steps:
    """Send a request to each route with each key; only statuses are observed."""
    path = write_keys(folder, _KEYS)
    with start_server(transport, folder, "--api-keys-file", str(path), key=_WATCHER) as server:
        connection = server.connect()
        for method, path_of_route in ROUTES:
            statuses = {}
            for name, secret in _SECRETS.items():
                connection.send_request(path_of_route, b"", secret, "ID", {}, method)
                statuses[name] = connection.receive(has_body=method != "HEAD")["status"]
            yield f"{method} {path_of_route}", statuses


def start(transport: str, folder: Path) -> Steps:
    """Call a server whose device has not started, and has; open more connections than are allowed."""
    limits = ("--max-connections-per-address", "3", "--local-connections", "2", "--stall-s", "0.3")
    script = str(misbehaving_server.__file__)
    with start_server(transport, folder, *limits, script=script, waits_at_start=True) as server:
        probe, connection = server.connect("http"), server.connect()
        yield "probe before the start", _probe(probe)
        yield "before the start", server.exchange(connection, PLAIN, "before") | server.changes()
        (folder / "gate").touch()
        server.observer.wait_for("normserve_ready", 1)
        # Its log says how fast this machine is.
        server.changes()
        yield "after the start", server.exchange(connection, PLAIN, "after") | server.changes()
        (folder / "gate").unlink()
        connection.send(_of_cols(WAITS, {}), "occupant")
        while _probe(probe)["status"] == 200:
            time.sleep(0.05)
        yield "probe of a stalled server", _probe(probe)
        (folder / "gate").touch()
        yield "the occupant ends", stable_response(connection.receive(), "occupant")
        yield "probe of a server that goes on", _probe(probe)
        # Probes are as many as it took.
        server.changes()
        others = [server.connect() for _ in range(2)]
        for number, other in enumerate(others):
            yield f"connection {number}", server.exchange(other, PLAIN, f"connection-{number}")


def _probe(connection: Any) -> Observation:
    connection.send_request("/readyz", b"", None, "probe", {}, "GET")
    response = connection.receive()
    body = response["body"]
    return {"status": response["status"], "code": body["code"] if isinstance(body, dict) else body}


def repetitions(transport: str, folder: Path) -> Steps:
    """Repeat calls with other values each time; then their key loses its scope."""
    path = write_keys(folder, _KEYS)
    gradient = {"dy": ramp(3, 8, first=0.0), "weight": WEIGHT}
    results = {"dx": (3, 8), "dweight": (8,)}
    # A request that is logged is not replayed.
    with start_server(transport, folder, "--api-keys-file", str(path), key=_WATCHER) as server:
        connection = server.connect()
        for number in range(_REPETITIONS):
            x = ramp(3, 8, last=2.0 + number)
            forward = NormCall("forward", "layer_norm", {"x": x, "weight": WEIGHT}, {"y": (3, 8)}, key=INFER)
            backward = NormCall("backward", "rms_norm", {"x": x, **gradient}, results, "backward", key=INFER)
            for call in (forward, backward):
                yield f"{call.name} {number}", server.exchange(connection, call, f"{call.name} {number}")
        yield "repeated", server.changes()
        # In one step: a file that is half written is refused, and that is logged.
        (folder / "new").mkdir()
        write_keys(folder / "new", _KEYS.replace('["infer"]', '["layers"]')).rename(path)
        while server.process.log.count("keys_loaded") < 2:
            time.sleep(0.01)
        for call in (forward, backward):
            yield f"{call.name} without the scope", server.exchange(connection, call)
        yield "without the scope", server.changes()


def _deadline(transport: str, timeout_ms: int) -> dict[str, str]:
    """Return the parameter by which a transport states a deadline."""
    return {"timeout": str(1000 * timeout_ms)} if transport.startswith("v2") else {"timeout_ms": str(timeout_ms)}


def _of_cols(cols: int, parameters: dict[str, str], rows: int = 2) -> NormCall:
    return NormCall(str(cols), "layer_norm", {"x": ramp(rows, cols)}, {"y": (rows, cols)}, parameters=parameters)


def load(transport: str, folder: Path, *options: str) -> Steps:
    """Occupy the device: deadlines, clients that leave, no permit left; and let it fail."""
    script = str(misbehaving_server.__file__)
    limits = ("--max-inflight-requests", "3", "--max-batch-requests", "1", "--timeout-ms", str(_DEFAULT_MS))
    late, ample = _deadline(transport, _LATE_MS), _deadline(transport, _AMPLE_MS)
    with start_server(transport, folder, *limits, *options, script=script) as server:
        first, second, third, fourth = (server.connect() for _ in range(4))
        for name, cols in {"out of memory": RUNS_DRY, "a bug": HAS_A_BUG}.items():
            yield name, server.exchange(first, _of_cols(cols, ample), name) | server.changes()
        first.send(_of_cols(WAITS, ample), "occupant")
        server.observer.wait_for("normserve_inflight_requests", 1)
        yield "the device is occupied", server.changes(1)
        yield "deadline in the queue", server.exchange(second, _of_cols(8, late), "late") | server.changes(1)
        yield "default deadline", server.exchange(second, _of_cols(8, {}), "default") | server.changes(1)
        for rows in (2, 4000):
            second.send(_of_cols(16, ample, rows), f"leaves-{rows}")
            server.observer.wait_for("normserve_inflight_requests", 2)
            yield f"{rows} rows wait", server.changes(2)
            second.close()
            server.observer.wait_for("normserve_inflight_requests", 1)
            yield f"the client of {rows} rows leaves", server.changes(1)
            second = server.connect()
        if transport == "local":
            second.send(_of_cols(16, ample), "cancelled")
            server.observer.wait_for("normserve_inflight_requests", 2)
            second.cancel()
            yield "cancelled", stable_response(second.receive(), "cancelled") | server.changes(1)
        second.send(_of_cols(24, ample), "second")
        third.send(_of_cols(32, ample), "third")
        server.observer.wait_for("normserve_inflight_requests", 3)
        yield "two wait", server.changes(3)
        yield "no permit is left", server.exchange(fourth, _of_cols(40, ample), "fourth") | server.changes(3)
        time.sleep(_HELD_S)
        (folder / "gate").touch()
        for name, connection in {"occupant": first, "second": second, "third": third}.items():
            yield f"the {name} ends", stable_response(connection.receive(), name)
        yield "all have ended", server.changes()
        (folder / "gate").unlink()
        first.send(_of_cols(WAITS, ample), "occupant-leaves")
        server.observer.wait_for("normserve_inflight_requests", 1)
        yield "the device is occupied anew", server.changes(1)
        first.close()
        yield "the occupant leaves", server.changes(1)
        (folder / "gate").touch()
        server.observer.wait_for("normserve_inflight_requests", 0)
        yield "the device is free", server.changes()
        yield "the device fails", server.exchange(third, _of_cols(FAILS, ample), "fails")
        if "front ends" not in transport:  # There the device's process is started again.
            yield "the end", {"code": server.process.wait()}


def drain(transport: str, folder: Path) -> Steps:
    """Ask a server to end while a call is on the device, another one waits, and a third comes."""
    script = str(misbehaving_server.__file__)
    with start_server(transport, folder, "--access-log", script=script) as server:
        first, second, third = (server.connect() for _ in range(3))
        # The third is known to the server before it ends.
        yield "before", server.exchange(third, _of_cols(16, {}), "before") | server.changes()
        first.send(_of_cols(WAITS, {}), "occupant")
        server.observer.wait_for("normserve_inflight_requests", 1)
        second.send(_of_cols(8, {}), "second")
        server.observer.wait_for("normserve_inflight_requests", 2)
        yield "two are in progress", server.changes(2)
        server.process.terminate()
        while '"drain"' not in server.process.log:
            time.sleep(0.01)
        yield "another while it drains", server.exchange(third, _of_cols(24, {}), "refused")
        (folder / "gate").touch()
        yield "the occupant ends", stable_response(first.receive(), "occupant")
        yield "the second ends", stable_response(second.receive(), "second")
        yield "the end", {"code": server.process.wait(), "log": _audit_trail(server)}


def _audit_trail(server: CorpusServer) -> list[str]:
    """Return the audit trail of a server that has ended; its first line has all settings."""
    lines = [line for line in server.process.lines if "normserve.audit" in line]
    return [describe_event(line, server.observer.request_names) for line in lines if '"start"' not in line]


def with_access_log(scene: Callable[..., Steps]) -> Callable[[str, Path], Steps]:
    """Return a scene with a line of the log for each request."""
    return functools.wraps(scene)(lambda transport, folder: scene(transport, folder, "--access-log"))


SCENES: dict[str, Callable[[str, Path], Steps]] = {
    "calls": calls,
    "calls logged": with_access_log(calls),
    "keys": keys,
    "keys logged": with_access_log(keys),
    "layers": layers,
    "repetitions": repetitions,
    "requests": requests,
    "requests logged": with_access_log(requests),
    "routes": routes,
    "start": start,
    "load": load,
    "load logged": with_access_log(load),
    "drain": drain,
}

_ONLY_HTTP = ("requests", "requests logged", "routes")
# The device that replays calls has no gate to wait at.
_AT_THE_GATE = ("start", "load", "load logged", "drain")


def _is_recorded(scene: str, transport: str) -> bool:
    if scene in _ONLY_HTTP:
        return transport in HTTP_TRANSPORTS
    return transport != "local device" or scene not in _AT_THE_GATE


RECORDED = [(scene, transport) for scene in SCENES for transport in TRANSPORTS if _is_recorded(scene, transport)]
"""Scenes and transports that have a recording."""
