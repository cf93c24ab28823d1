"""Compiled kernels: numba for CPU, Triton for CUDA.

numba keeps the CPU kernels compiled on disk and looks at a kernel's own file only: after a change in ``simd`` or
``functions``, delete the ``*.nbi`` files beside them.
"""
