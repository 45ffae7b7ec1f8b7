"""The load-test harness against a real server: every answer is right, and both count the same."""

import json
import subprocess
import sys
from collections import Counter

import pytest
from normload import cli

from tests.integration.observability.test_metrics import scrape, value

SCENARIO = """
connections = 24
warmup_s = 0.2

[workload]
max_mib = 0.25
pool = 50

[capacity]
connections = 2
duration_s = 0.5

[[phases]]
name = "calm"
arrivals = "poisson"
rate = "30%"
duration_s = 0.5

[[phases]]
name = "too much"
arrivals = "constant"
rate = "400%"
duration_s = 0.5
"""
OPERATIONS = ("layer_norm", "rms_norm", "group_norm", "layer_norm_chain")


def run_here(arguments):
    assert cli.main(arguments) == 0


def run_as_users_do(arguments):
    """No process is forked, each starts with imports."""
    done = subprocess.run(
        [sys.executable, "-m", "normload", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("load_test_forks")
@pytest.mark.parametrize("run", [run_here, pytest.param(run_as_users_do, marks=pytest.mark.slow)])
def test_every_answer_is_right_and_every_request_counted(launched, tmp_path, run):
    # A server that refuses early, and that nobody else asks.
    tight = launched("--max-inflight-requests", "4")
    (tmp_path / "own.toml").write_text(SCENARIO)
    command = ["run", str(tmp_path / "own.toml"), "--url", tight.url, "--verify"]
    run([*command, "--processes", "2", "--json", str(tmp_path / "a.json")])
    document = json.loads((tmp_path / "a.json").read_text())
    sent = {status: count for status, count in document["summary"]["sent_by_status"].items() if status != "0"}
    assert (document["checked"], document["wrong"]) == (sent["200"], 0)
    assert sent["429"] > 0
    with tight.client() as http:
        samples = scrape(http)
    counted = Counter()
    for status in {dict(labels)["code"] for name, labels in samples if name == "normserve_requests_total"}:
        for op in OPERATIONS:
            counted[status] += int(value(samples, "normserve_requests_total", op=op, code=status))
    assert +counted == Counter(sent)
    assert value(samples, "normserve_rejected_total", reason="overloaded") == sent["429"]


@pytest.mark.usefixtures("load_test_forks")
def test_shared_memory_is_driven_too(launched, tmp_path, until):
    path = tmp_path / "normserve.sock"
    serving = launched("--local", str(path))
    (tmp_path / "own.toml").write_text(SCENARIO.replace('"400%"', '"60%"'))
    command = ["run", str(tmp_path / "own.toml"), "--url", f"unix://{path}"]
    options = ["--verify", "--duration", "0.3", "--processes", "1", "--json", str(tmp_path / "a.json")]
    assert cli.main([*command, *options]) == 0
    document = json.loads((tmp_path / "a.json").read_text())
    sent = {status: count for status, count in document["summary"]["sent_by_status"].items() if status != "0"}
    assert sent.keys() == {"200"}
    assert (document["checked"], document["wrong"]) == (sent["200"], 0)
    with serving.client() as http:
        samples = scrape(http)
        requests = [labels for name, labels in samples if name == "normserve_requests_total"]
        operations = [labels for labels in requests if dict(labels)["op"] in OPERATIONS]
        assert {dict(labels)["transport"] for labels in operations} == {"local"}
        assert sum(samples["normserve_requests_total", labels] for labels in operations) == sent["200"]
        # The server may notice the end of the client's process after the process has ended.
        until(lambda: value(scrape(http), "normserve_local_bytes") == 0)
