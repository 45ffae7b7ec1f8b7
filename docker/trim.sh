#!/bin/sh
# Take out of a virtual environment what is there to build against packages, to test them or to profile with them, and
# libraries that no other one in it opens: trim.sh FOLDER
set -eu
packages=$(echo "$1"/lib/python3*/site-packages)

find "$packages" -type d \( -name tests -o -path "$packages/torch/test" -o -path "$packages/nvidia/*/include" \) \
    -prune -exec rm -rf {} +
find "$packages" -name '*.a' -delete
rm -rf "$packages/torch/include" "$packages/torch/share" "$packages"/torch/bin/*[Tt]est* "$packages"/torch/bin/protoc*
rm -rf "$packages/triton/backends/nvidia/lib/cupti" "$packages/triton/_C/libproton.so" "$packages/triton/profiler"

# The parts of CUDA for several GPUs in one process, for BLAS and FFTW by their own names, and for another NVRTC.
rm -f "$packages"/nvidia/*/lib/libcusolverMg.* "$packages"/nvidia/*/lib/libnvshmem_device.* \
    "$packages"/nvidia/*/lib/libnvblas.* "$packages"/nvidia/*/lib/libcufftw.* "$packages"/nvidia/*/lib/libnvrtc*.alt.*
