"""Prometheus takes the configuration, and the rules do what rules/*.yml beside this file say."""

import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = Path(__file__).parent / "rules"


def promtool(tool, *arguments: str) -> None:
    command = [tool("promtool", package="prometheus"), *arguments]
    done = subprocess.run(command, cwd=RULES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_configuration_is_well_formed(tool):
    promtool(tool, "check", "config", str(ROOT / "docker/prometheus.yml"))


@pytest.mark.parametrize("name", ["recording.yml", "alerts.yml"])
def test_rules(tool, name):
    promtool(tool, "test", "rules", name)


@pytest.mark.parametrize(("name", "file"), [("record", "recording.yml"), ("alert", "alerts.yml")])
def test_every_rule_is_tested(name, file):
    rules = yaml.safe_load((ROOT / "docker/rules" / file).read_text(encoding="utf-8"))["groups"]
    written = {rule[name] for group in rules for rule in group["rules"]}
    tests = yaml.safe_load((RULES / file).read_text(encoding="utf-8"))["tests"]
    # An alert that is only ever seen not to fire is not tested.
    fired = {
        each["alertname"] for test in tests for each in test.get("alert_rule_test", []) if "exp_alerts" in each
    }
    evaluated = {each["expr"] for test in tests for each in test.get("promql_expr_test", [])}
    assert written == fired | evaluated
