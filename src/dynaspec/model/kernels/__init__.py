"""Compiled kernels: numba for CPU, kept on disk as ``compiled`` says; Triton for CUDA."""
