"""Makes base/prometheus-rule.yaml of the rules in docker/rules: python docker/k8s/prometheus_rule.py."""

import re
from pathlib import Path

_RULES = Path(__file__).parents[1] / "rules"
_MANIFEST = Path(__file__).parent / "base/prometheus-rule.yaml"
_HEAD = """\
# Made of docker/rules by docker/k8s/prometheus_rule.py, for the Prometheus operator.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: normserve
spec:
  groups:
"""


def render_manifest() -> str:
    """Return the text of the manifest: the groups of all files of rules.

    The names of groups end with that of their file, since they must differ within a PrometheusRule.
    """
    groups = ""
    for file in sorted(_RULES.glob("*.yml")):
        _, _, found = file.read_text(encoding="utf-8").partition("\ngroups:\n")
        found = re.sub(r"^(  - name: .*)$", rf"\1-{file.stem}", found, flags=re.MULTILINE)
        groups += re.sub(r"^(?=.)", "  ", found, flags=re.MULTILINE)
    return _HEAD + groups


if __name__ == "__main__":
    _MANIFEST.write_text(render_manifest(), encoding="utf-8")
