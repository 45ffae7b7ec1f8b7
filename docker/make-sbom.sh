#!/usr/bin/env bash
# Write the bill of materials of localhost/normserve:$TARGET to dist/normserve-$TARGET.cdx.json, building what of the
# image is not built. Settings are those of build-image.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

TARGET=${TARGET:-cpu}
export TARGET STAGE=$TARGET-sbom BUILD_FLAGS="${BUILD_FLAGS:-} --output type=local,dest=dist"
docker/build-image.sh
echo "dist/normserve-$TARGET.cdx.json"
