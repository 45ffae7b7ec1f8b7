#!/bin/sh
# A load test as a step of CI: it fails if an answer is wrong or an objective is missed, and writes a report.
#
#   pip install 'normserve[server,load]'
#   examples/load_test.sh http://127.0.0.1:8000 [FOLDER]
set -eu

url=$1
folder=${2:-load}
mkdir -p "$folder"
exec normload run "$(dirname "$0")/load_test.toml" --url "$url" --slo 'p99<250ms' --slo 'errors<0.1%' \
    --json "$folder/load_test.json" --html "$folder/load_test.html" --markdown "$folder/load_test.md"
