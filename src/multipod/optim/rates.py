"""Learning rates as values: `WarmUp(Cosine(0.1), share=0.05)` builds the rate as a function of the updates done.

A `Decay` says how the rate falls from its peak, and a `WarmUp` around it how the rate gets there. Shares are of all
updates of the run, so that a shorter experiment keeps its shape.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
import optax

from multipod.optim.numbers import not_negative, positive, refuse


@dataclass(frozen=True)
class Rate(ABC):
    """A learning rate over a run."""

    @abstractmethod
    def schedule(self, updates: int) -> optax.Schedule:
        """Returns the rate as a function of the update's number, over a run of `updates`."""


@dataclass(frozen=True)
class Decay(Rate):
    """A rate that begins at its peak and never rises.

    Attributes:
      peak: the largest rate.
    """

    peak: float

    def __post_init__(self) -> None:
        refuse(self._wrong())

    def schedule(self, updates: int) -> optax.Schedule:
        """Returns the rate as a function of the update's number, over a run of `updates`."""
        return self.after(0, updates)

    @abstractmethod
    def after(self, warmup: int, updates: int) -> optax.Schedule:
        """Returns the rate by update's number over a run whose first `warmup` updates are a warm-up's.

        What it says of those is not used.
        """

    def _wrong(self) -> list[str]:
        return positive(rate=self.peak)


@dataclass(frozen=True)
class Constant(Decay):
    """One rate for every update."""

    def after(self, warmup: int, updates: int) -> optax.Schedule:
        """Returns the peak for every update."""
        return lambda count: jnp.full_like(count, self.peak, jnp.float32)


@dataclass(frozen=True)
class _Falling(Decay):
    """A rate that falls as the run goes on.

    Attributes:
      end: the rate at the last update, below which the rate never falls.
      from_start: the fall counts from update 0, hidden by the warm-up, and the rate jumps down where the warm-up ends.
        Published BERT and EfficientNet runs do that.
    """

    end: float = 0.0
    from_start: bool = False

    def after(self, warmup: int, updates: int) -> optax.Schedule:
        """Returns the rate, which falls from the end of the warm-up on, or from update 0."""
        begin = 0 if self.from_start else warmup
        fall = self._fall(max(updates - begin, 1), updates)
        return lambda count: fall(jnp.maximum(count - begin, 0))

    @abstractmethod
    def _fall(self, rest: int, updates: int) -> optax.Schedule:
        """Returns the rate as a function of the updates since the fall began, of which there are `rest`."""

    def _wrong(self) -> list[str]:
        return super()._wrong() + not_negative(end_rate=self.end)


@dataclass(frozen=True)
class Cosine(_Falling):
    """Half a cosine from `peak` to `end`. Source: Loshchilov and Hutter, 2016, arXiv:1608.03983."""

    def _fall(self, rest: int, updates: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(self.peak, rest, self.end / self.peak)


@dataclass(frozen=True)
class Linear(_Falling):
    """A straight line from `peak` to `end`."""

    def _fall(self, rest: int, updates: int) -> optax.Schedule:
        return optax.linear_schedule(self.peak, self.end, rest)


@dataclass(frozen=True)
class Polynomial(_Falling):
    """end + (peak - end) * (share of the updates left)^power. Source: You et al., 2017, arXiv:1708.03888."""

    power: float = 2.0

    def _fall(self, rest: int, updates: int) -> optax.Schedule:
        return optax.polynomial_schedule(self.peak, self.end, self.power, rest)

    def _wrong(self) -> list[str]:
        return super()._wrong() + positive(power=self.power)


@dataclass(frozen=True)
class Exponential(_Falling):
    """Stairs: max(peak * factor^floor(update / (every * updates)), end).

    Source: EfficientNet's schedule, Tan and Le, 2019, arXiv:1905.11946: 0.97 every 2.4 epochs.

    Attributes:
      factor: by which the rate is multiplied at each stair.
      every: the share of all updates between two stairs, which may come to a fraction of an update.
    """

    factor: float = 0.1
    every: float = 0.25

    def _fall(self, rest: int, updates: int) -> optax.Schedule:
        every = self.every * updates
        return lambda count: jnp.maximum(self.peak * self.factor ** jnp.floor(count / every), self.end)

    def _wrong(self) -> list[str]:
        return super()._wrong() + positive(decay_rate=self.factor, decay_every=self.every)


@dataclass(frozen=True)
class Drops(Decay):
    """`peak`, times `factor` for each place of `at` that has been reached.

    Source: He et al., 2015, arXiv:1512.03385: a tenth at chosen epochs.

    Attributes:
      at: shares of all updates, counted from update 0.
      factor: by which the rate is multiplied at each.
    """

    at: tuple[float, ...] = ()
    factor: float = 0.1

    def after(self, warmup: int, updates: int) -> optax.Schedule:
        """Returns the rate, whose drops do not move with the warm-up."""
        # One number after the other: an array made here would be an argument that a step compiled ahead does not get.
        places = [share * updates for share in self.at]
        return lambda count: self.peak * self.factor ** sum(jnp.asarray(count >= at, jnp.int32) for at in places)

    def _wrong(self) -> list[str]:
        outside = [n for n in self.at if not 0 <= n <= 1]
        return [
            *super()._wrong(),
            *positive(decay_rate=self.factor),
            *(f"optimizer.drops has {n}, which is no share of all updates, 0 to 1" for n in outside),
        ]


@dataclass(frozen=True)
class HeldPolynomial(Decay):
    """`peak` until a share of the updates is done, then end + (peak - end) * (share left of the rest)^power.

    Source: DLRM's schedule, MLPerf Training v0.7 (arXiv:2011.03641): constant, then a quadratic fall.

    Attributes:
      until: the share of all updates, the warm-up among them, at which the fall begins.
      end: the rate at the last update.
      power: of the fall.
    """

    until: float = 0.5
    end: float = 0.0
    power: float = 2.0

    def after(self, warmup: int, updates: int) -> optax.Schedule:
        """Returns the rate, whose fall does not move with a shorter warm-up."""
        begin = max(warmup, round(self.until * updates))
        fall = optax.polynomial_schedule(self.peak, self.end, self.power, max(updates - begin, 1))
        return lambda count: fall(jnp.maximum(count - begin, 0))

    def _wrong(self) -> list[str]:
        inside = 0 <= self.until <= 1
        outside = [] if inside else [f"optimizer.rate.until={self.until} is no share of all updates, 0 to 1"]
        return super()._wrong() + not_negative(end_rate=self.end) + positive(power=self.power) + outside


@dataclass(frozen=True)
class Rsqrt(Decay):
    """peak * sqrt(warmup / max(update, warmup)): `peak` at the end of the warm-up, then as 1 / sqrt(update).

    The usual form, constant * rsqrt(features) * rsqrt(max(update, warmup)), has the peak
    constant / sqrt(features * warmup).

    Source: Vaswani et al., 2017, arXiv:1706.03762, eq. 3.
    """

    def after(self, warmup: int, updates: int) -> optax.Schedule:
        """Returns the rate, which falls from the end of the warm-up on."""
        first = max(warmup, 1)
        return lambda count: self.peak * jnp.sqrt(first / jnp.maximum(count, first))


@dataclass(frozen=True)
class WarmUp(Rate):
    """A rise to the peak of another rate, which then takes over.

    Source: Goyal et al., 2017, arXiv:1706.02677, section 2.2; `exponential`: MLPerf's GNMT, whose rate at update t of W
    is peak * start^((W - t) / W).

    Attributes:
      then: the rate afterwards.
      share: the length of the rise as a share of all updates.
      updates: the same in updates, for rates that do not depend on the run's length; one of the two is 0.
      start: the rate at update 0, as a part of the peak.
      exponential: each update multiplies the rate by the same number; otherwise each adds the same to it.
    """

    then: Decay
    share: float = 0.0
    updates: int = 0
    start: float = 0.0
    exponential: bool = False

    def __post_init__(self) -> None:
        wrong = not_negative(warmup_updates=self.updates)
        if not 0 <= self.share <= 1:
            wrong.append(f"optimizer.warmup={self.share} is a share of all updates: give 0 to 1")
        if not 0 <= self.start <= 1:
            wrong.append(f"optimizer.warmup_start={self.start} is a part of rate: 0 to 1")
        if self.exponential and not self.start:
            wrong.append("optimizer.warmup_start=0 never rises by a factor: give rate.start, or rate.exponential=false")
        if self.share and self.updates:
            wrong.append(f"optimizer.warmup={self.share} and optimizer.warmup_updates={self.updates}: set one to 0")
        refuse(wrong)

    def length(self, updates: int) -> int:
        """Returns the updates of the rise, in a run of `updates`."""
        return self.updates or round(self.share * updates)

    def schedule(self, updates: int) -> optax.Schedule:
        """Returns the rate as a function of the update's number, over a run of `updates`."""
        warmup, peak = self.length(updates), self.then.peak
        ramp = optax.linear_schedule(self.start * peak, peak, max(warmup, 1))
        if self.exponential:
            ramp = lambda count: peak * self.start ** (1 - jnp.minimum(count, warmup) / max(warmup, 1))  # noqa: E731
        then = self.then.after(warmup, updates)
        return lambda count: jnp.where(count < warmup, ramp(count), then(count))


RATES: dict[str, type[Decay]] = {
    "constant": Constant,
    "cosine": Cosine,
    "drops": Drops,
    "exponential": Exponential,
    "held": HeldPolynomial,
    "linear": Linear,
    "polynomial": Polynomial,
    "rsqrt": Rsqrt,
}
"""Every way for a rate to fall; `--set optimizer.decay=` takes one."""
