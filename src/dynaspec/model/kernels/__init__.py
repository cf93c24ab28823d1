"""Compiled kernels: numba for CPU, Triton for CUDA."""
