# shellcheck shell=bash
# To be sourced: which container engine works here, and what becomes of $container in $ENGINE.

# The first of the named engines that is there and answers; says what is missing if there is none.
working_engine() {
    local name
    for name in "$@"; do
        if command -v "$name" >/dev/null && "$name" info >/dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
    {
        echo "no container engine works here; looked for: $*"
        for name in "$@"; do
            if command -v "$name" >/dev/null; then
                echo "  $name is installed, but \`$name info\` fails: $("$name" info 2>&1 >/dev/null | tail -n 1)"
            else
                echo "  $name is not installed"
            fi
        done
    } >&2
    return 1
}

state() {
    "$ENGINE" inspect --format "{{.State.$1}}" "${container:?}"
}

fail() {
    echo "$(basename "$0"): $1; the log:" >&2
    "$ENGINE" logs "$container" >&2
    exit 1
}

healthy() {
    # Podman leaves the schedule of health checks to systemd, which not every machine has: ask for one.
    if [[ ${ENGINE##*/} == podman ]]; then
        "$ENGINE" healthcheck run "$container" >/dev/null 2>&1
    else
        [[ $("$ENGINE" inspect --format '{{.State.Health.Status}}' "$container") == healthy ]]
    fi
}

# Wait until it is healthy, so many seconds at most.
await_health() {
    local began=$SECONDS
    until healthy; do
        [[ $(state Running) == true ]] || fail "the server ended before it was ready"
        ((SECONDS - began < $1)) || fail "not healthy after $1 s"
        sleep 0.5
    done
    echo "healthy after $((SECONDS - began)) s"
}

# Stop it, with more patience than a drain takes.
stop_gracefully() {
    "$ENGINE" stop --time 40 "$container" >/dev/null
    [[ $(state ExitCode) == 0 ]] || fail "exit code $(state ExitCode) after SIGTERM"
    echo "exit code 0 after SIGTERM"
}
