"""Normal numbers whose bits follow from the drawn words alone.

The inverse of the normal distribution function, in float64, from additions, multiplications, divisions and square roots
in a fixed order. IEEE 754 fixes the result of each, so the bits depend on no mathematical library, vector unit, length,
stride or number of threads, nor on the device. The logarithm is our own, by the same rule. Each operation is one torch
operation: nothing is there for a compiler to contract into a fused multiply-add.

Source: M. J. Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution", Applied Statistics 37
(1988) 477-484, routine PPND16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Context, Decimal, localcontext

import torch

# Numerators and denominators, highest power first.
_CENTRE = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
_TAIL = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258e0,
        3.64784832476320460504e0,
        5.76949722146069140550e0,
        4.63033784615654529590e0,
        1.42343711074968357734e0,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940e0,
        2.05319162663775882187e0,
        1.0,
    ),
)
_FAR_TAIL = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        1.24266094738807843860e-3,
        2.65321895265761230930e-2,
        2.96560571828504891230e-1,
        1.78482653991729133580e0,
        5.46378491116411436990e0,
        6.65790464350110377720e0,
    ),
    (
        2.04426310338993978564e-15,
        1.42151175831644588870e-7,
        1.84631831751005468180e-5,
        7.86869131145613259100e-4,
        1.48753612908506148525e-2,
        1.36929880922735805310e-1,
        5.99832206555887937690e-1,
        1.0,
    ),
)
_LN2 = 0.6931471805599453
_SQRT2 = 1.4142135623730951
_ATANH = tuple(1 / (2 * k + 1) for k in range(11, -1, -1))  # atanh(s) / s in powers of s^2; exact to 2^-60 here
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")
FARTHEST = 12.0  # beyond it a tail is below 2^-108


def normals(words: torch.Tensor) -> torch.Tensor:
    """float64 [n], from 64 random bits each (int64 [n]): the top bit is the sign (1: negative), the next 52 bits k
    stand for the tail probability (2 k + 1) / 2^54. Exactly symmetric; at most 8.3 from zero."""
    k = (words >> 11) & ((1 << 52) - 1)
    z = upper_quantile(_odd(k).mul_(2.0**-54))
    return torch.where(words < 0, -z, z)


def truncated(words: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """float64 [n], from 64 random bits each: normal given that it lies in [low, high] up to rounding, low < high.

    The top 52 bits k give the fraction (2 k + 1) / 2^53 of the interval's probability that lies below the number. The
    interval is reflected where most of it is above zero, so that a tail keeps its precision.
    """
    if low + high > 0:
        return -truncated(words, -high, -low)
    below, within = distribution(low), distribution(high) - distribution(low)
    k = (words >> 12) & ((1 << 52) - 1)
    u = _odd(k).mul_(2.0**-53).mul_(within).add_(below)
    z = upper_quantile(torch.minimum(u, 1 - u))
    return torch.where(u < 0.5, -z, z)


def upper_quantile(p: torch.Tensor) -> torch.Tensor:
    """The z of at least 0 that a standard normal number exceeds with probability p: float64 [n], 1e-300 < p <= 0.5."""
    q = 0.5 - p
    z = q * _ratio(_CENTRE, 0.180625 - q * q)
    tail = (q > 0.425).nonzero().view(-1)
    r = _minus_log(p[tail]).sqrt_()
    ends = _ratio(_TAIL, r - 1.6)
    far = (r > 5.0).nonzero().view(-1)
    if far.numel():
        ends[far] = _ratio(_FAR_TAIL, r[far] - 5.0)
    z[tail] = ends
    return z


def distribution(x: float) -> float:
    """P(Z <= x) of a standard normal Z, correctly rounded; 0 or 1 beyond FARTHEST.

    By the series of G. Marsaglia, "Evaluating the Normal Distribution", J. Statistical Software 11(4), 2004, with 120
    decimal digits: `decimal` defines every result, where a C library's `erf` does not.
    """
    if abs(x) > FARTHEST:
        return float(x > 0)
    with localcontext(Context(prec=120)):
        at = Decimal(x)
        square = at * at
        total, term, n = at, at, 1
        while abs(term) > Decimal("1e-110"):
            n += 2
            term = term * square / n
            total += term
        return float(Decimal("0.5") + total * (-square / 2).exp() / (2 * _PI).sqrt())


def _odd(k: torch.Tensor) -> torch.Tensor:
    """2 k + 1 in float64, exact for k below 2^52."""
    return (k * 2 + 1).to(torch.float64)


def _ratio(polynomials: tuple[Sequence[float], Sequence[float]], x: torch.Tensor) -> torch.Tensor:
    return _horner(polynomials[0], x).div_(_horner(polynomials[1], x))


def _horner(coefficients: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    total = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total.mul_(x).add_(c)
    return total


def _minus_log(p: torch.Tensor) -> torch.Tensor:
    """-log(p) of positive normal float64 numbers, to about 1e-16 relative below 0.1.

    p = m 2^e with m from sqrt(1/2) to sqrt(2), and log m = 2 atanh(s) with s = (m - 1) / (m + 1), |s| < 0.172.
    """
    bits = p.view(torch.int64)
    exponent = (bits >> 52) - 1023
    m = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    large = m > _SQRT2
    m = torch.where(large, m * 0.5, m)
    exponent += large
    s = (m - 1.0) / (m + 1.0)
    log_m = s * _horner(_ATANH, s * s) * 2.0
    return -(exponent.to(torch.float64) * _LN2 + log_m)


def standard_bounds(mean: float, std: float, low: float, high: float) -> tuple[float, float]:
    """An interval in standard deviations from the mean. Raises ValueError where it is empty or out of reach."""
    if not (std > 0 and math.isfinite(std) and math.isfinite(mean)):
        raise ValueError(f"mean {mean} and std {std} must be finite, and std above 0")
    a, b = (low - mean) / std, (high - mean) / std
    if not a < b:
        raise ValueError(f"the interval from {low} to {high} is empty")
    if a > 8 or b < -8:
        raise ValueError(f"the interval from {low} to {high} lies more than 8 standard deviations from the mean")
    return a, b
