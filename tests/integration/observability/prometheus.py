"""Debian's Prometheus, run on this project's configuration against servers of a test's own."""

import json
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import yaml

DOCKER = Path(__file__).parents[3] / "docker"
SCRAPE_S = 1
_HURRIED_S = 20


class Prometheus:
    """A running one, that scrapes and evaluates every second instead of every few.

    Where it is hurried, windows of the rules are seconds, and no alert waits.
    """

    def __init__(self, program: str, folder: Path, targets: Sequence[str], *, is_hurried: bool = False) -> None:
        configuration = yaml.safe_load((DOCKER / "prometheus.yml").read_text(encoding="utf-8"))
        every = f"{SCRAPE_S}s"
        configuration["global"] |= {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
        rules = DOCKER / "rules"
        if is_hurried:
            (folder / "rules").mkdir()
            for file in rules.iterdir():
                text = re.sub(r"\[\d+m\]", f"[{_HURRIED_S}s]", file.read_text(encoding="utf-8"))
                (folder / "rules" / file.name).write_text(re.sub(r"for: \d+m", "for: 0s", text), encoding="utf-8")
            rules = folder / "rules"
        configuration["rule_files"] = [f"{rules}/*.yml"]
        configuration["scrape_configs"][0]["static_configs"][0]["targets"] = list(targets)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        options = {
            "config.file": folder / "prometheus.yml",
            "storage.tsdb.path": folder,
            "web.listen-address": address,
        }
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [program, *(f"--{name}={value}" for name, value in options.items())], stderr=self._log
        )
        self._http = httpx.Client(base_url=f"http://{address}", verify=False)
        self._targets = len(targets)

    def wait_for_scrapes(self, count: int = 1) -> None:
        """Until every target has answered so many scrapes that began from now on."""
        began, end = time.time(), time.monotonic() + 20
        while not self._has_scraped(count, began):
            assert self._process.poll() is None, Path(self._log.name).read_text(encoding="utf-8")
            assert time.monotonic() < end, "Prometheus does not scrape"
            time.sleep(0.1)

    def _has_scraped(self, count: int, since: float) -> bool:
        window = max(1, round(1000 * (time.time() - since)))
        try:
            answered = self.values(f"sum_over_time(up[{window}ms])", "instance")
        except (httpx.TransportError, httpx.HTTPStatusError):
            # It starts.
            return False
        return len(answered) == self._targets and min(answered.values(), default=count) >= count

    def get(self, path: str, **parameters: str) -> object:
        """What the API answers."""
        answer = self._http.get(f"/api/v1/{path}", params=parameters)
        answer.raise_for_status()
        return answer.json()["data"]

    def query(self, expr: str, at: float | None = None) -> list[tuple[Mapping[str, str], float]]:
        """Labels and value of each series of an instant query's answer, now or at another time."""
        answer = self.get("query", query=expr, time=str(at or time.time()))
        if answer["resultType"] == "scalar":
            return [({}, float(answer["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in answer["result"]]

    def values(self, expr: str, *labels: str, at: float | None = None) -> dict[tuple[str, ...], float]:
        """The same by the values of these labels."""
        return {tuple(metric.get(label, "") for label in labels): value for metric, value in self.query(expr, at)}

    def stop(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


def queries() -> Mapping[str, tuple[str, set[str]]]:
    """Every query of the dashboard, of all servers and operations, and the labels that its legend names."""
    page = json.loads((DOCKER / "grafana/dashboards/normserve.json").read_text(encoding="utf-8"))
    chosen = {f"${each['name']}": each["allValue"] for each in page["templating"]["list"]}
    found = {}
    for panel in page["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"].replace("$__rate_interval", "30s")
            for name, value in chosen.items():
                expr = expr.replace(name, value)
            assert "$" not in expr
            name = f"{panel['title']}, {target['refId']}"
            assert name not in found
            found[name] = (expr, set(re.findall(r"{{(\w+)}}", target["legendFormat"])))
    return found
