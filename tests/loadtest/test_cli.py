"""Whole runs, client processes and all, against a server of a few lines that answers right, wrong or not at all."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from normload import cli
from normload.load import scenarios
from normload.report import terminal_report

from tests.loadtest.conftest import made_result, wait_for

SCENARIO = """
connections = 4
warmup_s = 0.1

[workload]
max_mib = 0.00390625
pool = 12

[capacity]
connections = 2
duration_s = 0.2

[[phases]]
name = "calm"
arrivals = "poisson"
rate = 100
duration_s = 0.5

[[phases]]
name = "busy"
arrivals = "closed"
connections = 3
duration_s = 0.3
"""


@pytest.fixture
def normload(tmp_path, fake_server, capsys):
    """Runs a scenario against the fake server; gives the exit code, what was printed, and the JSON."""

    def run(*options, text=SCENARIO):
        file = tmp_path / "own.toml"
        file.write_text(text)
        result = tmp_path / "out" / "a.json"
        code = cli.main(["run", str(file), "--url", fake_server.url, "--json", str(result), *options])
        captured = capsys.readouterr()
        document = json.loads(result.read_text()) if result.exists() else None
        return code, captured.out + captured.err, document

    return run


def row(output, name):
    return next(line.split() for line in output.splitlines() if line.split()[:1] == [name])


def test_a_whole_run(normload, fake_server, tmp_path):
    page = tmp_path / "out" / "a.html"
    bounds = ("--slo", "p50<10s", "--slo", "errors<0.1%", "--slo", "p99<0.001ms")
    table, summary = page.with_suffix(".csv"), page.with_suffix(".md")
    files = ("--html", str(page), "--csv", str(table), "--markdown", str(summary))
    code, output, document = normload("--processes", "2", "--verify", *files, *bounds)
    assert code == cli.MISSED, output
    sent = sum(document["summary"]["sent_by_status"].values())
    assert sent == fake_server.requests
    assert (document["checked"], document["wrong"]) == (sent, 0)
    calm, busy, _ = document["summary"]["phases"]
    assert (calm["name"], calm["offered_per_second"]) == ("calm", 100)
    assert calm["requests"] == pytest.approx(50, abs=25)
    assert (busy["offered_per_second"], busy["errors"]) == (None, {})
    assert row(output, "calm")[1] == "100.0"
    assert 0 < document["machine"]["client"] <= document["machine"]["cores"]
    assert "own" in page.read_text()
    assert "p99&lt;0.001ms" in page.read_text()
    assert "| p50\\<10s |" in summary.read_text()
    assert "calm,all," in table.read_text()
    for said in ("normserve 0, fake on <none>", "of the loopback echo", "of the device's copy"):
        assert said in " ".join(output.split())
    for said in ("p50<10s: passed", "errors<0.1%: passed", "p99<0.001ms: failed"):
        assert said in output


def test_connections_are_those_that_a_phase_uses(normload):
    closed = SCENARIO[: SCENARIO.index("[[phases]]")] + SCENARIO[SCENARIO.rindex("[[phases]]") :]
    _, output, document = normload("--processes", "1", text=closed.replace("connections = 4", "connections = 50"))
    assert document["connections"] == 3
    assert ", 3 connections, " in output


def test_wrong_answers_are_an_exit_code(normload, fake_server):
    fake_server.factor = 1.1
    code, output, document = normload("--processes", "1", "--duration", "0.2")
    assert code == cli.WRONG_ANSWERS
    assert "times the tolerance" in output
    # Every request is checked once before anything counts, and then a sample.
    assert 12 <= document["checked"] < document["summary"]["sent_by_status"]["200"]


def test_every_request_is_counted_by_its_status(normload, fake_server):
    refusals = {3: (429, "overloaded"), 0: (503, "draining")}
    fake_server.before = lambda number: refusals.get(number % 7)
    relative = SCENARIO.replace("rate = 100", 'rate = "50%"')
    code, output, document = normload("--processes", "2", "--duration", "0.4", text=relative)
    assert code == 0
    counts = document["summary"]["sent_by_status"]
    assert counts == {str(status): count for status, count in fake_server.statuses.items()}
    assert "429 overloaded: " in output
    assert "503 draining: " in output
    assert document["capacity"] > 0
    assert document["summary"]["phases"][0]["offered_per_second"] == pytest.approx(document["capacity"] / 2)


def test_objectives_of_the_scenario_decide_about_their_phase_only(normload):
    own = """
        [[objectives]]
        bound = "rate>1"
        phase = "calm"

        [[objectives]]
        bound = "p50<0.001ms"
        phase = "busy"
        """
    code, output, _ = normload("--processes", "1", "--slo", "errors<1%", text=SCENARIO + own)
    assert code == cli.MISSED
    verdicts = [
        line.partition(": ")[::2] for line in output.splitlines() if ": passed" in line or ": failed" in line
    ]
    assert [(text, verdict.partition(",")[0]) for text, verdict in verdicts] == [
        ("rate>1 in calm", "passed"),
        ("p50<0.001ms in busy", "failed"),
        ("errors<1%", "passed"),
    ]


def test_progress_on_a_pipe_is_lines(normload, monkeypatch):
    monkeypatch.setattr(terminal_report, "LINE_S", 0.05)
    _, output, _ = normload("--processes", "1")
    lines = [line for line in output.splitlines() if line.startswith("normload: ")]
    assert "normload: calm: begins, 0.5 s" in lines
    assert any(re.fullmatch(r"normload: calm: \d+ of 0.5 s, \d+/s, 0 errors", line) for line in lines)


def test_the_progress_of_phases_without_a_pause_has_their_names(normload):
    open_phase = SCENARIO[SCENARIO.index("[[phases]]") : SCENARIO.rindex("[[phases]]")]
    text = "cycles = 2" + SCENARIO[: SCENARIO.rindex("[[phases]]")] + open_phase.replace("calm", "more")
    _, output, _ = normload("--processes", "1", "--duration", "0.4", text=text)
    assert "normload: calm, more: begins, 0.4 s" in output


def test_a_server_that_answers_nothing_fails_the_run(normload, fake_server):
    fake_server.before = lambda _: (503, "not_ready")
    code, _, _ = normload("--processes", "1", "--duration", "0.2")
    assert code == cli.NO_ANSWERS


@pytest.mark.parametrize("kind", ["--json", "--html", "--csv", "--markdown"])
def test_a_report_that_cannot_be_written_is_refused_before_the_run(kind, tmp_path, fake_server, capsys):
    for file in (tmp_path, tmp_path / ("long" * 100)):
        with pytest.raises(SystemExit):
            cli.main(["run", "steady", "--url", fake_server.url, kind, str(file)])
        assert str(file) in capsys.readouterr().err
    assert not fake_server.requests
    assert not list(tmp_path.iterdir())


def test_an_interrupt_ends_the_run_and_shows_what_there_is(normload, fake_server):
    main = threading.main_thread().ident

    def interrupt():
        # Past the warm-up, in the phase that would last a minute.
        wait_for(lambda: fake_server.requests > 60, patience_s=60)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    try:
        code, output, document = normload("--processes", "2", "--duration", "100")
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    assert code == 0
    assert "ended early" in output
    # Of the time in which it ran, not of the minute that the phase would have lasted.
    (phase,) = document["phases"]
    assert phase["phase"]["duration_s"] < 50
    whole = document["summary"]["phases"][-1]
    assert whole["ok_per_second"] == pytest.approx(100, rel=0.9)
    assert sum(document["summary"]["sent_by_status"].values()) == fake_server.requests


def test_a_run_that_is_interrupted_before_its_phases_ends_at_once(normload, fake_server):
    main = threading.main_thread().ident

    def interrupt(number):
        if number == 1:
            signal.pthread_kill(main, signal.SIGINT)

    fake_server.before = interrupt
    before = signal.getsignal(signal.SIGINT)
    try:
        code, output, document = normload("--processes", "1")
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == cli.NO_ANSWERS
    assert "ended early" in output
    assert "measuring the loopback" not in output
    assert row(output, "all")[1:4] == ["-", "-", "-"]
    assert document["phases"] == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["making requests", "measuring the loopback"])
def test_an_interrupt_from_the_terminal_prints_no_traceback_of_a_process_that_starts(stage, fake_server, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(SCENARIO)
    arguments = [sys.executable, "-m", "normload", "run", str(file), "--url", fake_server.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as run:
        while not (line := run.stderr.readline()).startswith(f"normload: {stage}"):
            assert line
        time.sleep(0.2)
        os.killpg(run.pid, signal.SIGINT)
        output, errors = run.communicate(timeout=60)
    assert "Traceback" not in errors
    assert "ended early" in output


def test_a_server_that_is_not_there_is_said_so(capsys):
    assert cli.main(["run", "--url", "http://127.0.0.1:9"]) == cli.NO_ANSWERS
    assert "normload: " in capsys.readouterr().err


def says(body=b"hello", *headers, status=b"200 OK"):
    return b"\r\n".join([b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers, b"", body])


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        says(b"<html>"),
        says(b"[" * 100_000),
        says(b"{}", b"Content-Encoding: gzip"),
        says(b'{"a": "\\ud800"}'),
        says(b"", b"Location: http://127.0.0.1:9/", status=b"302 Found"),
        says(b'{"detail": "\x1b[2J"}', b"Retry-After: soon", status=b"503 Busy"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 3000000000\r\n\r\n",
    ],
)
def test_a_server_that_is_no_normserve_is_said_so_in_a_line(raw_server, capsys, said):
    assert cli.main(["run", "--url", raw_server([said]).url, "--timeout", "5"]) == cli.NO_ANSWERS
    error = capsys.readouterr().err
    assert error.startswith("normload: ")
    assert error.rstrip("\n").isprintable()


ROWS = """
connections = 2
warmup_s = 0.0
[[workload.cases]]
operation = "layer_norm"
shape = [4, 8]
[[phases]]
name = "calm"
arrivals = "constant"
rate = 20
duration_s = 0.2
"""


@pytest.mark.parametrize(
    ("said", "code", "outcome"),
    [
        (None, cli.NO_ANSWERS, "timeout: "),
        (says(b"hello", b"Server-Timing: kernel;dur=nan"), cli.WRONG_ANSWERS, "the answer is not one of KServe's"),
    ],
    ids=["silent", "no-tensor"],
)
def test_what_a_server_does_instead_of_answering_is_counted(raw_server, tmp_path, capsys, said, code, outcome):
    file = tmp_path / "rows.toml"
    file.write_text(ROWS)
    server = raw_server([said or (lambda connected: server.silence(connected))])
    arguments = [
        "run",
        str(file),
        "--url",
        server.url,
        "--adapter",
        "kserve",
        "--processes",
        "1",
        "--timeout",
        "0.2",
    ]
    assert cli.main(arguments) == code
    printed = capsys.readouterr()
    assert outcome in " ".join(printed.out.split())
    assert "Traceback" not in printed.out + printed.err


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x = " + b"[" * 100_000, b"x = " + b"9" * 10_000, b"\0", b"x"])
def test_a_file_that_is_no_scenario_is_refused(tmp_path, capsys, content):
    file = tmp_path / "own.toml"
    file.write_bytes(content)
    with pytest.raises(SystemExit):
        cli.main(["run", str(file)])
    assert "error: own: " in capsys.readouterr().err


def test_two_results_are_compared(tmp_path, capsys):
    files = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for file, latency_s in zip(files, (0.01, 0.01, 0.02), strict=True):
        made_result([latency_s] * 1000).write_json(file)
    assert cli.main(["compare", str(files[0]), str(files[1])]) == 0
    assert "No change beyond noise" in capsys.readouterr().out
    assert cli.main(["compare", str(files[0]), str(files[2])]) == cli.MISSED
    assert "+100" in capsys.readouterr().out
    assert cli.main(["compare", str(files[2]), str(files[0])]) == 0


def test_folders_of_results_are_compared(tmp_path, capsys):
    for side, latencies_s in (("a", (0.0100, 0.0101, 0.0100)), ("b", (0.0120, 0.0121, 0.0120)), ("empty", ())):
        (tmp_path / side).mkdir()
        for number, latency_s in enumerate(latencies_s):
            made_result([latency_s] * 1000).write_json(tmp_path / side / f"{number}.json")
    before, after, empty = (str(tmp_path / side) for side in ("a", "b", "empty"))
    assert cli.main(["compare", before, after]) == cli.MISSED
    assert "+1" in capsys.readouterr().out
    assert cli.main(["compare", before, before]) == 0
    table, summary = tmp_path / "out" / "a.csv", tmp_path / "out" / "a.md"
    files = ("--csv", str(table), "--markdown", str(summary))
    assert cli.main(["compare", before, after, *files]) == cli.MISSED
    assert ",p50," in table.read_text()
    assert "| worse |" in summary.read_text()
    assert cli.main(["compare", f"{before}/0.json", after]) == cli.MISSED
    with pytest.raises(SystemExit):
        cli.main(["compare", before, empty])
    assert "there must be a run's JSON" in capsys.readouterr().err


def test_scenarios_are_listed(capsys):
    assert cli.main(["scenarios"]) == 0
    listed = capsys.readouterr().out
    for name, each in scenarios.load_built_in_scenarios().items():
        assert f"{name} " in listed
        assert each.description in listed


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "nothing"],
        ["run", "--processes", "0"],
        ["run", "--processes", "1.5"],
        ["run", "--duration", "-1"],
        ["run", "--duration", "nan"],
        ["run", "--timeout", "1e300"],
        ["run", "--api-key", "two\nlines"],
        ["run", "--seed", "-3"],
        ["run", "--slo", "p99<20"],
        ["run", "--url", "localhost"],
        ["run", "--url", "http://127.0.0.1:99999"],
        ["run", "--url", "http://name:password@127.0.0.1:1"],
        ["run", "--adapter", "grpc"],
        ["run", "mixed", "--adapter", "npy"],
        ["compare", "/nonexistent", "/nonexistent"],
    ],
)
def test_what_means_nothing_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_of_the_service_only_the_client_and_the_codec_are_imported():
    program = (
        "import sys, normload.cli\n"
        "ours = {m for m in sys.modules if m.startswith('normserve.') and m.count('.') == 1}\n"
        "assert ours <= {f'normserve.{m}' for m in 'client codec errors memory socket_readers'.split()}, ours\n"
        "assert not {'torch', 'fastapi', 'fusednorm'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, env=dict(os.environ))
