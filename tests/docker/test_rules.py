"""Prometheus takes the configuration, and the rules do what rules/*.yml beside this file say."""

import json
import re
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


def test_every_alert_leads_to_its_part_of_the_runbook():
    groups = yaml.safe_load((ROOT / "docker/rules/alerts.yml").read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"]: rule["annotations"]["runbook"] for group in groups for rule in group["rules"]}
    runbook = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## (.*)$", runbook, re.MULTILINE)) == alerts.keys()
    assert alerts == {name: f"docs/runbook.md#{name.lower()}" for name in alerts}


def test_the_runbook_names_what_there_is():
    runbook = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    settings = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    metrics = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    page = json.loads((ROOT / "docker/grafana/dashboards/normserve.json").read_text(encoding="utf-8"))
    panels = {panel["title"] for panel in page["panels"] if panel["type"] != "row"}
    emphasised = {" ".join(text.split()) for text in re.findall(r"(?<!\*)\*([A-Z][^*]*)\*(?!\*)", runbook)}
    assert len(emphasised) > 5
    assert emphasised <= panels
    for option in re.findall(r"`(--[a-z-]+)", runbook):
        assert f"`{option}`" in settings, option
    for metric in re.findall(r"normserve_[a-z_]+", runbook):
        assert f"`{metric}`" in metrics or metric == "normserve_process_up", metric
