#!/bin/sh
# Take out of a virtual environment what is there to build against packages, to test them or to profile with them,
# and what a server therefore never opens: trim.sh FOLDER
set -eu
packages=$(echo "$1"/lib/python3*/site-packages)

find "$packages" -type d \( -name tests -o -path "$packages/torch/test" \) -prune -exec rm -rf {} +
find "$packages" -name '*.a' -delete
rm -rf "$packages/torch/include" "$packages/torch/share" "$packages"/torch/bin/*[Tt]est* "$packages"/torch/bin/protoc*
rm -rf "$packages/triton/backends/nvidia/lib/cupti" "$packages/triton/_C/libproton.so" "$packages/triton/profiler"
