"""Double-float arithmetic, numbers as pairs of float32 with 48 bits together: for devices that have no float64."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FAN = 16
"""Numbers that are added up at once: a tensor with fewer blocks takes the memory of so many."""

NOTHING = -126
"""The exponent of a vector of zeros."""


class DoubleFloat(NamedTuple):
    """high + low, where low is at most half of the last bit of high."""

    high: jax.Array
    low: jax.Array

    def map(self, move: Callable[[jax.Array], jax.Array]) -> "DoubleFloat":
        """Applies to both parts a function that only moves elements: a slice, a pad, another shape."""
        return DoubleFloat(move(self.high), move(self.low))


# Powers of two.


def exponent_of(largest: jax.Array) -> jax.Array:
    """int32: e with |x| < 2^e, as far as 2^e and 2^-e are normal numbers; 0 is below all."""
    bits = lax.bitcast_convert_type(largest, jnp.int32) >> 23 & 255
    return jnp.clip(bits - 126, NOTHING, 126)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent, exactly; 0 below the normal numbers."""
    normal = lax.bitcast_convert_type((jnp.clip(exponent, -126, 127) + 127) << 23, jnp.float32)
    return jnp.where(exponent < -126, 0.0, normal)


# Arithmetic.


def two_sum(a: jax.Array, b: jax.Array) -> DoubleFloat:
    """a + b, exactly (Knuth)."""
    high = a + b
    back = high - a
    return DoubleFloat(high, (a - (high - back)) + (b - back))


def _quick(high: jax.Array, low: jax.Array) -> DoubleFloat:
    """high + low, exactly, where high is the larger (Dekker)."""
    total = high + low
    return DoubleFloat(total, low - (total - high))


def _halves(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """a as a sum of two numbers of 12 bits, whose products are exact: by its bits, so that no compiler undoes it."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(a, jnp.int32) & ~0xFFF, jnp.float32)
    return high, a - high


def two_product(a: jax.Array, b: jax.Array) -> DoubleFloat:
    """a b to 48 bits, unless it is near the ends of the range.

    Only products that are exact are formed: XLA lets compilers join a product and a sum into one operation with
    one rounding, which would spoil Dekker's product, whose error is that of a rounded product.
    """
    (ah, al), (bh, bl) = _halves(a), _halves(b)
    middle = two_sum(ah * bl, al * bh)
    high, low = two_sum(ah * bh, middle.high)
    return _quick(high, low + (middle.low + al * bl))


def add(x: DoubleFloat, y: DoubleFloat) -> DoubleFloat:
    """x + y."""
    high, error = two_sum(x.high, y.high)
    low, rest = two_sum(x.low, y.low)
    high, error = _quick(high, error + low)
    return _quick(high, error + rest)


def multiply(x: DoubleFloat, y: DoubleFloat) -> DoubleFloat:
    """x y."""
    high, error = two_product(x.high, y.high)
    return _quick(high, error + (x.high * y.low + x.low * y.high))


def divide(x: DoubleFloat, y: DoubleFloat) -> DoubleFloat:
    """x / y."""
    first = x.high / y.high
    rest = add(x, negate(multiply(y, DoubleFloat(first, jnp.zeros_like(first)))))
    return _quick(first, rest.high / y.high)


def negate(x: DoubleFloat) -> DoubleFloat:
    """-x."""
    return DoubleFloat(-x.high, -x.low)


def where(yes: jax.Array, x: DoubleFloat, y: DoubleFloat) -> DoubleFloat:
    """x where `yes`, y elsewhere."""
    return DoubleFloat(jnp.where(yes, x.high, y.high), jnp.where(yes, x.low, y.low))


def sum_first_axis(x: DoubleFloat) -> DoubleFloat:
    """Sums over the first axis, one after the other: a loop, because XLA takes long to compile many additions."""
    first = DoubleFloat(x.high[0], x.low[0])
    return lax.fori_loop(1, len(x.high), lambda k, total: add(total, DoubleFloat(x.high[k], x.low[k])), first)


def sum_runs(x: DoubleFloat, counts: Sequence[int]) -> DoubleFloat:
    """[len(counts), ...]: sums of runs along the first axis, of `counts[0]` numbers, then of `counts[1]`, and so on."""
    while max(counts) > 1:
        table, groups, begin = [], [], 0
        for count in counts:
            places = list(range(begin, begin + count))
            rows = [places[k : k + FAN] for k in range(0, max(count, 1), FAN)]
            table += [row + [sum(counts)] * (FAN - len(row)) for row in rows]
            groups.append(len(rows))
            begin += count
        padded = (jnp.pad(part, [(0, 1)] + [(0, 0)] * (part.ndim - 1)) for part in x)
        x = sum_first_axis(DoubleFloat(*(part[jnp.asarray(np.array(table).T)] for part in padded)))
        counts = groups
    return x


def concatenate(numbers: Sequence[DoubleFloat]) -> DoubleFloat:
    """Joins numbers along the first axis."""
    return DoubleFloat(*(jnp.concatenate(parts) for parts in zip(*numbers, strict=True)))
