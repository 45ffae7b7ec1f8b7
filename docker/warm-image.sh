#!/usr/bin/env bash
# Bake compiled kernels into an image: run the GPU image until it has warmed up, and keep what it wrote to its cache as
# localhost/normserve:gpu-warmed. On a GPU of the same compute capability that one compiles nothing while it starts.
#
#   ENGINE      docker or podman; the first that works if not given
#   IMAGE       what to run, localhost/normserve:gpu if not given
#   TAG         of the result, if another one is wanted
#   RUN_FLAGS   further flags for its `create`, `--gpus all` if not given. What `--env` sets is kept in the result, as
#               `--gpus all --env NORMSERVE_WARM_SIZES=768,4096` for rows of those lengths
set -euo pipefail
cd "$(dirname "$0")/.."
source docker/engine.sh

IMAGE=${IMAGE:-localhost/normserve:gpu}
TAG=${TAG:-localhost/normserve:gpu-warmed}
ENGINE=${ENGINE:-$(working_engine docker podman)}

# No volume at the cache: what is in one is in no image. Nothing else is to be kept, hence the tmpfs.
# shellcheck disable=SC2086  # several flags in one variable
container=$("$ENGINE" create --tmpfs /tmp ${RUN_FLAGS:---gpus all} "$IMAGE")
trap '"$ENGINE" rm --force --volumes "$container" >/dev/null' EXIT
"$ENGINE" start "$container" >/dev/null

await_health 600
stop_gracefully
# The OCI format, podman's default, has no place for a HEALTHCHECK.
format=()
[[ ${ENGINE##*/} != podman ]] || format=(--format docker)
"$ENGINE" commit "${format[@]}" "$container" "$TAG" >/dev/null
echo "$TAG"
