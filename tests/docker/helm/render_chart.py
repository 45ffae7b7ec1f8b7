"""Renders a Helm chart with Helm's own library, in a process that its runtime has for itself.

Reads the chart's folder, the release's name and the values as JSON from standard input, and prints as JSON the
messages of the lint and the rendered files, or the error.
"""

import json
import sys

import helm_python


def main() -> None:
    folder, release, values = json.load(sys.stdin)
    linted = helm_python.lint(folder)
    try:
        with helm_python.Chart.load(folder) as chart:
            chart.validate_schema(values)
            rendered = chart.render(values, name=release, namespace="somewhere")
    except helm_python.HelmError as error:
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({"messages": linted["messages"], "errors": linted["errors"], "files": rendered}))


if __name__ == "__main__":
    main()
