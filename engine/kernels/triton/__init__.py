"""Kernels for GPUs, in Triton. Each module says which torch reference its functions equal.

A function takes tensors and launches its kernels; it synchronizes with nothing and reads no tensor on the host, so
that it can be captured in a graph. Kernels are checked in Triton's interpreter on a machine without a GPU, and
compiled for the targets we mean to run on (tests/kernels, `make kernels`). Importing this package needs the package
triton; nobody imports it who does not compute on a GPU.
"""
