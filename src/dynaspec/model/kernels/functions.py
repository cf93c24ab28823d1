"""Elementary functions on 16-lane vectors. Relative error about 1e-7; the same bits in every lane."""

from __future__ import annotations

from typing import Any

from dynaspec.compiled import njit

from .simd import const, fma, nearest, power_of_two, where_less

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # exact in 12 bits, so n · high is exact
_LN2_LOW = -2.12194440e-4
_EXP_LOWEST = -87.0  # below: 0; e^-87 is the last that is safely a normal number
_EXP_HIGHEST = 88.0


@njit(cache=True, nogil=True, allocates=False)
def exp(x: Any) -> Any:
    """e^x; exactly 0 below −87, e^88 above 88.

    Cody and Waite's range reduction, x = n ln 2 + r, then the Taylor polynomial of degree 7 for |r| ≤ ln 2 / 2.
    """
    high = const(_EXP_HIGHEST)
    low = const(_EXP_LOWEST)
    bounded = where_less(high, x, high, where_less(x, low, low, x))
    n = nearest(bounded * const(_LOG2_E))
    r = fma(n, const(-_LN2_LOW), fma(n, const(-_LN2_HIGH), bounded))
    p = fma(const(1 / 5040), r, const(1 / 720))
    p = fma(p, r, const(1 / 120))
    p = fma(p, r, const(1 / 24))
    p = fma(p, r, const(1 / 6))
    p = fma(p, r, const(0.5))
    p = fma(p, r, const(1.0))
    p = fma(p, r, const(1.0))
    return where_less(x, low, const(0.0), p * power_of_two(n))


@njit(cache=True, nogil=True, allocates=False)
def sigmoid(x: Any) -> Any:
    return const(1.0) / (const(1.0) + exp(const(0.0) - x))


@njit(cache=True, nogil=True, allocates=False)
def tanh(x: Any) -> Any:
    """Absolute error about 1e-7."""
    return const(2.0) * sigmoid(x + x) - const(1.0)


@njit(cache=True, nogil=True, allocates=False)
def erf(x: Any) -> Any:
    """Abramowitz and Stegun 7.1.26: absolute error 1.5e-7."""
    zero = const(0.0)
    magnitude = where_less(x, zero, zero - x, x)
    t = const(1.0) / fma(const(0.3275911), magnitude, const(1.0))
    p = fma(const(1.061405429), t, const(-1.453152027))
    p = fma(p, t, const(1.421413741))
    p = fma(p, t, const(-0.284496736))
    p = fma(p, t, const(0.254829592)) * t
    value = const(1.0) - p * exp(zero - magnitude * magnitude)
    return where_less(x, zero, zero - value, value)


@njit(cache=True, nogil=True, allocates=False)
def silu(x: Any) -> Any:
    """x σ(x)."""
    return x * sigmoid(x)


@njit(cache=True, nogil=True, allocates=False)
def gelu(x: Any) -> Any:
    """x Φ(x)."""
    half = x * const(0.5)
    return fma(half, erf(x * const(0.7071067811865476)), half)


@njit(cache=True, nogil=True, allocates=False)
def gelu_tanh(x: Any) -> Any:
    """GELU by its tanh approximation: x σ(2 √(2/π) (x + 0.044715 x³))."""
    cubic = fma(const(0.044715) * x, x * x, x)
    return x * sigmoid(const(1.5957691216057308) * cubic)


@njit(cache=True, nogil=True, allocates=False)
def relu(x: Any) -> Any:
    return where_less(const(0.0), x, x, const(0.0))
