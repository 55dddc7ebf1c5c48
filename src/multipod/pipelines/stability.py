"""The largest step size at which delayed gradient descent is stable, on a quadratic of curvature lambda.

w_{t+1} = w_t - alpha * gradient, where the gradient reads delayed weights. Stable means that every root of the
characteristic polynomial in z lies in the closed unit disk. Delays are in updates; tf forward, tb backward.

Source: Yang et al., 2019, arXiv:1910.05124, section 3 and its appendix. The factor form with the correction and the
numbers in `tests/test_pipelines.py` were derived anew.
"""

import math
from collections.abc import Callable

import numpy as np

EPS = 1e-9
"""A root may lie so far outside the unit circle: that of a limit lies on it, up to rounding."""

Gradient = Callable[[float], np.ndarray]
"""From alpha to the characteristic polynomial, highest power first."""


def limit(tau: int, curvature: float = 1.0) -> float:
    """(2 / lambda) sin(pi / (4 tau + 2)): gradients that are `tau` updates old are stable up to here, O(1 / tau)."""
    return 2 / curvature * math.sin(math.pi / (4 * tau + 2))


def discrepancy_bound(tau_forward: int, tau_backward: int, sensitivity: float, curvature: float = 1.0) -> float:
    """A step size above the smallest unstable one, where forward and backward pass see different weights.

    min(2 / (Delta (tf - tb)), limit(tf)), for a gradient (lambda + Delta) u_forward - Delta u_backward.
    """
    apart = tau_forward - tau_backward
    return min(2 / (sensitivity * apart) if sensitivity * apart > 0 else math.inf, limit(tau_forward, curvature))


def delay_polynomial(tau: int, curvature: float = 1.0, momentum: float = 0.0) -> Gradient:
    """z^{tau+1} - z^tau + alpha lambda; with momentum beta (z - 1)(z - beta) z^{tau-1} + alpha lambda."""

    def polynomial(alpha: float) -> np.ndarray:
        if not momentum:
            return np.polyadd(_poly({tau + 1: 1, tau: -1}), [alpha * curvature])
        power = max(tau, 1)  # momentum looks one update back by itself
        step = np.polymul(np.poly([1.0, momentum]), _poly({power - 1: 1}))
        return np.polyadd(step, _poly({power - tau: alpha * curvature}))

    return polynomial


def discrepancy_polynomial(
    tau_forward: int, tau_backward: int, sensitivity: float, gamma: float | None = None, curvature: float = 1.0
) -> Gradient:
    """With a discrepancy between the passes; gamma is the decay of the correction T2, None is without.

    With d = tf - tb and g = gamma:

        (z - 1)(z - g) z^tf + alpha (lambda + Delta)(z - g) - alpha Delta z^d (z - g)
            + alpha Delta d (1 - g) z^d (z - 1)
    """
    d = tau_forward - tau_backward

    def polynomial(alpha: float) -> np.ndarray:
        base = np.polysub(_poly({tau_forward + 1: 1, tau_forward: -1}), _poly({d: alpha * sensitivity}))
        base = np.polyadd(base, [alpha * (curvature + sensitivity)])
        if gamma is None:
            return base
        corrected = np.polymul(base, [1, -gamma])
        push = _poly({d + 1: 1, d: -1}) * alpha * sensitivity * d * (1 - gamma)
        return np.polyadd(corrected, push)

    return polynomial


def theory_gamma(tau_forward: int, tau_backward: int = 0) -> float:
    """1 - 2 / (tf - tb + 1): cancels the error of second order; gamma^(tf - tb) tends to exp(-2) = 0.135."""
    return 1 - 2 / (tau_forward - tau_backward + 1)


def decay_gamma(decay: float, tau_forward: float, tau_backward: float = 0) -> float:
    """D^(1 / (tf - tb)), the gamma that one global D gives a stage."""
    return decay ** (1 / (tau_forward - tau_backward)) if tau_forward > tau_backward else 0.0


def is_stable(polynomial: np.ndarray) -> bool:
    """Whether no root lies outside the unit circle."""
    return bool(np.abs(np.roots(polynomial)).max(initial=0.0) <= 1 + EPS)


def threshold(gradient: Gradient, most: float = 4.0, digits: int = 9) -> float:
    """The smallest unstable alpha, to so many digits, by bisection between stable 0 and `most`.

    The first unstable alpha is bracketed on a grid of ratio 1.05, so that a stable island beyond it is not mistaken.
    """
    low, high = 0.0, most * 1e-6
    while high < most and is_stable(gradient(high)):
        low, high = high, high * 1.05
    while high - low > 10.0**-digits * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_stable(gradient(middle)) else (low, middle)
    return low


def diverges(alpha: float, tau: int, curvature: float = 1.0, momentum: float = 0.0, updates: int = 4000) -> bool:
    """Whether delayed descent from 1 grows: the recurrence itself, as a check on the roots."""
    history = [1.0] * (tau + 1)
    velocity, w, early = 0.0, 1.0, 0.0
    for t in range(updates):
        velocity = momentum * velocity + alpha * curvature * history[t % (tau + 1)]
        w -= velocity
        history[t % (tau + 1)] = w
        if t == updates // 2:
            early = max(map(abs, history))
        if abs(w) > 1e12:
            return True
    return max(map(abs, history)) > early


def _poly(terms: dict[int, float]) -> np.ndarray:
    p = np.zeros(max(terms) + 1)
    for power, factor in terms.items():
        p[-1 - power] += factor
    return p
