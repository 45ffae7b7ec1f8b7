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
START_S=120
STOP_S=40

healthy() {
    # Podman leaves the schedule of health checks to systemd, which not every machine has: ask for one.
    if [[ ${ENGINE##*/} == podman ]]; then
        "$ENGINE" healthcheck run "$container" >/dev/null 2>&1
    else
        [[ $("$ENGINE" inspect --format '{{.State.Health.Status}}' "$container") == healthy ]]
    fi
}

state() {
    "$ENGINE" inspect --format "{{.State.$1}}" "$container"
}

fail() {
    echo "test-image: $1; the log:" >&2
    "$ENGINE" logs "$container" >&2
    exit 1
}

flags=(--read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --memory 4g)
# shellcheck disable=SC2086  # several flags in one variable
container=$("$ENGINE" create "${flags[@]}" --publish 127.0.0.1::8000 ${RUN_FLAGS:-} "$IMAGE")
trap '"$ENGINE" rm --force --volumes "$container" >/dev/null' EXIT
"$ENGINE" start "$container" >/dev/null

began=$SECONDS
until healthy; do
    [[ $(state Running) == true ]] || fail "the server ended before it was ready"
    ((SECONDS - began < START_S)) || fail "not healthy after $START_S s"
    sleep 0.5
done
echo "healthy after $((SECONDS - began)) s"

python3 docker/check_sample.py "http://$("$ENGINE" port "$container" 8000/tcp | head -n 1)" \
    || fail "the sample was not normalised"

"$ENGINE" stop --time "$STOP_S" "$container" >/dev/null
[[ $(state ExitCode) == 0 ]] || fail "exit code $(state ExitCode) after SIGTERM"
echo "exit code 0 after SIGTERM"
