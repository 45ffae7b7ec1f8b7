"""Fingerprints of kernels' compiled code and of their launches, on a machine without a GPU.

Cases come from the launch tables.  Two commits are compared by `make fingerprints` and `git diff`:

- `launches.txt`: for each case the hash of its launches (grids, arguments, options) and the names of its kernels;
- `ttir.txt`: the hash of Triton's IR before any pass, for specialisations that cover each kernel's variants;
- `sm_90.txt`: for the same specialisations, the hash of that IR with the compiler's options, the hash of the
  machine code, registers and memory; `sm_90_all.txt`, on request: for all specialisations.

Hashes do not depend on names or on places in the source; `launches.txt` has the names of kernels in addition.
"""
