"""Fingerprints of what kernels are compiled to and of how they are launched, on a machine without a GPU.

Cases come from the launch tables.  Two commits are compared by `make fingerprints` and `git diff`:

- `launches.txt`: for each case the hash of its launches (grids, arguments, options) and the names of its kernels;
- `ttir.txt`: the hash of Triton's IR before any pass, for specialisations that cover each kernel's variants;
- `sm_90.txt`: that hash and the one of the machine code of every specialisation, registers and memory.

Hashes depend on no name and on no place in the source, only the names of kernels in `launches.txt` do.
"""
