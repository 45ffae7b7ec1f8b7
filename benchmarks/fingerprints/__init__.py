"""Fingerprints of kernels' compiled code and of their launches, on a machine without a GPU.

Cases come from the launch tables.  Two commits are compared by `make fingerprints` and `git diff`:

- `launches.txt`: for each kernel the hash of its launches in all cases (grids, arguments, options);
- `sm_90.txt`: for specialisations that cover each kernel's variants, the hash of Triton's IR before any pass and of
  the compiler's options, the hash of the machine code, registers and memory; `sm_90_all.txt`, on request: for all
  specialisations.

Hashes do not depend on names of kernels and parameters or on places in the source.
"""
