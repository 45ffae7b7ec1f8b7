#!/usr/bin/env bash
# Build localhost/normserve:$TARGET, TARGET being cpu (the default) or gpu.
#
#   ENGINE        docker, podman or buildah; the first that works if not given
#   STAGE         of the Dockerfile, if another one of that target's is wanted; it gets no name
#   BUILD_FLAGS   further flags for its build, as --build-arg TORCH_INDEX=…
set -euo pipefail
cd "$(dirname "$0")/.."
source docker/engine.sh

TARGET=${TARGET:-cpu}
ENGINE=${ENGINE:-$(working_engine docker podman buildah)}

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' service/normserve/__init__.py)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
# Of the commit and not of the build: the same sources give the same image.
created=$(git log -1 --format=%cI 2>/dev/null || echo unknown)
flags=(--file docker/Dockerfile --target "${STAGE:-$TARGET}")
[[ -n ${STAGE:-} ]] || flags+=(--tag "localhost/normserve:$TARGET")
# Not by arguments of the build: buildah 1.28 would take labels that they are part of from its cache.
label=org.opencontainers.image
flags+=(--label "$label.version=$version" --label "$label.revision=$revision" --label "$label.created=$created")
# The OCI format, their default, has no place for a HEALTHCHECK.
[[ ${ENGINE##*/} == docker ]] || flags+=(--format docker)
# Buildah alone makes one layer of a stage unless told otherwise.
[[ ${ENGINE##*/} != buildah ]] || flags+=(--layers)

# shellcheck disable=SC2086  # several flags in one variable
"$ENGINE" build "${flags[@]}" ${BUILD_FLAGS:-} .
