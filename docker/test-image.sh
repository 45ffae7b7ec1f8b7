#!/usr/bin/env bash
# Run the CPU image as a careful operator would: read-only, without capabilities, as nobody. It must turn healthy,
# normalise the sample, and end with 0 when told to stop.
#
#   ENGINE      docker or podman; the first that works if not given
#   RUN_FLAGS   further flags for its `create`
set -euo pipefail
cd "$(dirname "$0")/.."
source docker/engine.sh

IMAGE=${IMAGE:-localhost/normserve:cpu}
ENGINE=${ENGINE:-$(working_engine docker podman)}

flags=(--read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --memory 4g)
# shellcheck disable=SC2086  # several flags in one variable
container=$("$ENGINE" create "${flags[@]}" --publish 127.0.0.1::8000 ${RUN_FLAGS:-} "$IMAGE")
trap '"$ENGINE" rm --force --volumes "$container" >/dev/null' EXIT
"$ENGINE" start "$container" >/dev/null

await_health 120
python3 docker/check_sample.py "http://$("$ENGINE" port "$container" 8000/tcp | head -n 1)" \
    || fail "the sample was not normalised"
stop_gracefully
