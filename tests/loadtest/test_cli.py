"""Whole runs against a server of a few lines that answers right, wrong or not at all."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
from normload import cli, oracle
from normload.elements import narrow
from normload.workload import DEFAULT_MIX, Workload
from normserve.client import AsyncClient
from normserve.codec import safetensors


class FakeServer:
    """Answers every request of a run as it should be, times `factor`, after asking `refuse` for an error."""

    def __init__(self, factor=1.0, refuse=lambda _: None):
        self.factor = factor
        self.refuse = refuse
        self.requests = 0
        self.under_way = self.most_under_way = 0
        pool = Workload(DEFAULT_MIX, max_bytes=2**14, pool=20, seed=5).requests
        self.cases = {bytes(request.tensors["x"].data): request for request in pool}

    async def __call__(self, request):
        if request.url.path == "/v1/info":
            return httpx.Response(200, json={"version": "0", "backend": "fake", "device": {"name": "none"}})
        self.requests += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        refused = self.refuse(self.requests)
        if isinstance(refused, Exception):
            raise refused
        return refused or self.answer(request)

    def answer(self, request):
        sent = safetensors.decode(memoryview(request.content))
        case = self.cases[bytes(sent["x"].data)].case
        assert request.url.path == f"/v1/{case.operation}"
        assert dict(request.url.params) == {name: str(value) for name, value in case.parameters().items()}
        tensors = {}
        for name, reference in oracle.expected(case, sent).items():
            dtype = sent[name.removeprefix("d")].dtype if case.is_backward else case.dtype
            tensors[name] = narrow(reference.values * self.factor, dtype)
        headers = {"content-type": "application/x-safetensors", "server-timing": "kernel;dur=1.5"}
        return httpx.Response(200, headers=headers, content=b"".join(safetensors.encode(tensors)))


@pytest.fixture
def normload(monkeypatch, capsys):
    """Runs the command line against a fake server; gives the exit code and what was printed."""

    def run(server, *options):
        def client(*arguments, transport, **others):
            return AsyncClient(*arguments, transport=httpx.MockTransport(server), **others)

        monkeypatch.setattr(cli, "AsyncClient", client)
        small = ("--max-mib", str(2**14 / 2**20), "--pool", "20", "--seed", "5")
        code = cli.main(["run", *small, *options])
        return code, capsys.readouterr().out

    return run


def row(output, operation):
    return next(line.split() for line in output.splitlines() if line.split()[:1] == [operation])


def test_right_answers_end_well(normload):
    server = FakeServer()
    code, output = normload(server, "--requests", "60", "--connections", "3", "--verify")
    assert code == 0
    assert server.requests == 60
    assert server.most_under_way == 3
    assert "normserve 0 at http://127.0.0.1:8000: backend fake" in output
    assert row(output, "all")[1] == "60"
    assert row(output, "all")[-2:] == ["60", "0"]


def test_a_wrong_answer_is_an_exit_code(normload):
    code, output = normload(FakeServer(factor=1.1), "--requests", "20", "--verify")
    assert code == cli.WRONG_ANSWERS
    assert row(output, "all")[-2:] == ["20", "20"]
    assert "wrong answer: " in output
    assert "times the tolerance" in output


def test_only_a_sample_is_checked_unless_all_are_asked_for(normload):
    _, output = normload(FakeServer(), "--requests", "300")
    assert 0 < int(row(output, "all")[-2]) < 60


def test_errors_are_counted_by_code_and_never_retried(normload):
    failures = {
        1: httpx.Response(429, headers={"retry-after": "0"}, content=json.dumps({"code": "overloaded"})),
        2: httpx.ConnectError("refused"),
        3: httpx.ReadTimeout("too slow"),
        4: httpx.Response(502),
        5: httpx.Response(200, content=b"hello"),
        6: httpx.Response(429, content=json.dumps({"code": "overloaded"})),
    }
    server = FakeServer(refuse=failures.get)
    code, output = normload(server, "--requests", "30", "--connections", "1")
    assert code == 0
    assert server.requests == 30
    assert row(output, "all")[1:3] == ["30", "6"]
    codes = next(line for line in output.splitlines() if line.startswith("errors by code: overloaded 2, "))
    for count in ("connection_failed 1", "timeout 1", "502 1", "unexpected_answer 1"):
        assert count in codes


def test_a_run_without_any_answer_fails(normload):
    code, _ = normload(FakeServer(refuse=lambda _: httpx.Response(503)), "--requests", "5")
    assert code == cli.NO_ANSWERS


def test_a_server_that_is_not_there_is_said_so(normload):
    def nobody(_request):
        raise httpx.ConnectError("nobody listens")

    code, output = normload(nobody)
    assert code == cli.NO_ANSWERS
    assert "http://127.0.0.1:8000: nobody listens" in output


def test_a_duration_ends_the_run(normload):
    code, output = normload(FakeServer(), "--duration", "0.2")
    assert code == 0
    assert int(row(output, "all")[1]) > 0


def test_an_interrupt_ends_the_run_and_shows_what_there_is(normload):
    def interrupt(count):
        if count == 10:
            os.kill(os.getpid(), signal.SIGINT)

    server = FakeServer(refuse=interrupt)
    code, output = normload(server, "--duration", "60", "--connections", "2")
    assert code == 0
    assert int(row(output, "all")[1]) == server.requests < 20


@pytest.mark.parametrize(
    "options",
    [
        ("--connections", "0"),
        ("--connections", "1.5"),
        ("--duration", "-1"),
        ("--duration", "nan"),
        ("--requests", "many"),
        ("--mix", "batch_norm"),
        ("--requests", "5", "--duration", "5"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", *options])
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_of_the_service_only_the_client_and_the_codec_are_imported():
    program = (
        "import sys, normload.cli\n"
        "ours = {m for m in sys.modules if m.startswith('normserve.') and m.count('.') == 1}\n"
        "assert ours <= {'normserve.' + m for m in ('client', 'codec', 'errors', 'tensors')}, ours\n"
        "assert not {'torch', 'fastapi', 'fusednorm'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
