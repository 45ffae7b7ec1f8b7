"""The dashboard is what its source makes, what Grafana takes, and asks for what the server exposes.

That every query has an answer is for tests/integration/observability/test_prometheus.py.
"""

import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from normserve.jobs.job import Op
from normserve.metrics.exposition import make_process_up_family
from normserve.metrics.metrics import Metrics
from normserve.metrics.request_metrics import STAGES

DOCKER = Path(__file__).parents[2] / "docker"
TYPES = Path(__file__).parent / "grafana"
CONFIGURED = "@grafana/schema/dist/types/raw/composable"

TEXT = (DOCKER / "grafana/dashboards/normserve.json").read_text(encoding="utf-8")
PAGE = json.loads(TEXT)
PANELS = [panel for panel in PAGE["panels"] if panel["type"] != "row"]
QUERIES = {f"{panel['title']}, {target['refId']}": target for panel in PANELS for target in panel["targets"]}


FAMILIES = (*Metrics().families, make_process_up_family())


def series():
    """Names of the time series that the server exposes, each with its labels and those that a scrape adds."""
    for metric in FAMILIES:
        labels = {*metric.label_names, "instance", "job"}
        if metric.kind == "histogram":
            yield f"{metric.name}_bucket", labels | {"le"}
            yield f"{metric.name}_sum", labels
            yield f"{metric.name}_count", labels
        else:
            yield metric.name, labels


SERIES = dict(series())


def test_json_is_what_the_source_makes(monkeypatch):
    monkeypatch.syspath_prepend(DOCKER / "grafana")
    assert importlib.import_module("dashboard").build() == TEXT, "run `python docker/grafana/dashboard.py`"


def test_nothing_is_lost_where_it_is_parsed():
    register_default_plugins()
    parsed = json.loads(JSONEncoder().encode(Dashboard.from_json(json.loads(TEXT))))
    for each in parsed["templating"]["list"]:
        # Parsing adds what variables of another kind have.
        del each["auto"], each["auto_count"], each["auto_min"]
    assert parsed == PAGE


def test_grafanas_own_types_take_it(tmp_path, tool):
    """Excess properties are errors in literals; `Json` has enumerations as the strings that they are in JSON."""
    tool("node", package="npm")
    if not (TYPES / "node_modules").exists():
        tool.missing(f"npm install --prefix {TYPES} --no-package-lock")
    lines = [
        'import type { Dashboard } from "@grafana/schema";',
        *(
            f'import type * as {kind} from "{CONFIGURED}/{kind}/panelcfg/x/{file}PanelCfg_types.gen.d.ts";'
            for kind, file in (("stat", "Stat"), ("timeseries", "TimeSeries"))
        ),
        "type Json<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;",
        f"export const page: Json<Dashboard> = {TEXT};",
    ]
    for panel in PANELS:
        name = f"panel{panel['id']}"
        lines.append(f"export const {name}: Json<{panel['type']}.Options> = {json.dumps(panel['options'])};")
        if panel["type"] == "timeseries":
            custom = json.dumps(panel["fieldConfig"]["defaults"]["custom"])
            lines.append(f"export const {name}Lines: Json<timeseries.FieldConfig> = {custom};")
    (tmp_path / "page.ts").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "node_modules").symlink_to(TYPES / "node_modules")
    compiler = TYPES / "node_modules/typescript/bin/tsc"
    options = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--moduleResolution", "bundler"]
    command = ["node", str(compiler), *options, "--module", "esnext", "page.ts"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_types_are_of_the_grafana_that_runs():
    wanted = json.loads((TYPES / "package.json").read_text(encoding="utf-8"))["devDependencies"]["@grafana/schema"]
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    assert compose["services"]["grafana"]["image"].endswith(f":{wanted}")


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES.keys())
def test_query_asks_for_what_the_server_exposes(query):
    names = set(re.findall(r"\b(?:normserve|process)_\w+", query["expr"]))
    assert names
    assert names <= SERIES.keys()
    offered = set.union(*(SERIES[name] for name in names))
    grouped = {label for labels in re.findall(r"\bby \(([^)]*)\)", query["expr"]) for label in labels.split(", ")}
    chosen = set(re.findall(r"[{,](\w+)=", query["expr"]))
    assert grouped | chosen <= offered
    assert {*re.findall(r"{{(\w+)}}", query["legendFormat"])} <= grouped


def test_every_metric_is_in_a_panel():
    asked = set(re.findall(r"\b(?:normserve|process)_\w+", " ".join(query["expr"] for query in QUERIES.values())))
    asked |= {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    assert {metric.name for metric in FAMILIES} <= asked


def test_stages_are_stacked_in_the_order_in_which_operations_pass_them():
    (panel,) = [panel for panel in PANELS if panel["title"] == "Where the time goes"]
    shown = [re.search(r'stage="(\w+)"', target["expr"])[1] for target in panel["targets"]]
    assert tuple(shown) == STAGES


def test_latency_leads_to_traces():
    (panel,) = [panel for panel in PANELS if panel["title"] == "Latency"]
    assert all(target["exemplar"] for target in panel["targets"])
    provisioned = (DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text(encoding="utf-8")
    (source,) = yaml.safe_load(provisioned)["datasources"]
    (destination,) = source["jsonData"]["exemplarTraceIdDestinations"]
    # The label that the exposition gives to exemplars.
    assert destination["name"] == "trace_id"
    assert destination["url"].endswith("${__value.raw}")
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    assert "--enable-feature=exemplar-storage" in compose["services"]["prometheus"]["command"]


def test_panels_stand_side_by_side():
    taken = set()
    for panel in PAGE["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in PAGE["panels"]}) == len(PAGE["panels"])


def test_every_panel_says_what_it_shows():
    assert all(panel["description"].endswith(".") for panel in PANELS)


def test_dashboard_offers_every_operation():
    (variable,) = [each for each in PAGE["templating"]["list"] if each["name"] == "op"]
    assert variable["query"].split(",") == [op.value for op in Op]
    assert all(re.fullmatch(variable["allValue"], op.value) for op in Op)
    assert not any(re.fullmatch(variable["allValue"], name) for name in ("metrics", "layers", "__unmatched__"))
