"""How much of its time a run that fails now and then spends well, and how often it should save. No devices needed."""

import math
import random
from dataclasses import dataclass

from multipod.errors import PlanError


@dataclass(frozen=True)
class Failing:
    """A machine that fails, and a run that saves. All in seconds.

    Attributes:
      between_s: mean time between failures, of the whole machine; they come independently (exponentially).
      save_s: by which a save holds the run up: the copy from the devices where saving is asynchronous.
      restart_s: from a failure to the first update that is done again.
      commit_s: from the start of a save until it can be restored from, while the run goes on.
    """

    between_s: float
    save_s: float
    restart_s: float
    commit_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.between_s > 0 and self.save_s >= 0 and self.restart_s >= 0 and self.commit_s >= 0):
            raise PlanError(f"{self} cannot be: times are 0 or more, and failures some time apart.")


def young_s(failing: Failing) -> float:
    """The time of work between two saves that loses least: sqrt(2 save between).

    Source: Young, 1974, doi:10.1145/361147.361115. Good while saves are short against failures.
    """
    return math.sqrt(2 * failing.save_s * failing.between_s)


def daly_s(failing: Failing) -> float:
    """The best time between saves, to a higher order.

    Within 0.2 % of the best for saves shorter than half the time between failures.

    Source: Daly, 2006, doi:10.1016/j.future.2004.11.016, equation 37.
    """
    share = failing.save_s / (2 * failing.between_s)
    if share >= 1:
        return failing.between_s
    return young_s(failing) * (1 + math.sqrt(share) / 3 + share / 9) - failing.save_s


def goodput(interval_s: float, failing: Failing) -> float:
    """The share of time in work that is not lost, for `interval_s` of work between two saves.

    With M between failures, R to restart, and d to save, T of work takes M e^(R/M) (e^((interval + d) / M) - 1) T /
    interval. Here a save must also be committed (`commit_s`) before it counts: a failure meanwhile goes back one
    interval further, so on average that much work more is lost with each failure; it is added to R.

    Source: Daly, 2006, doi:10.1016/j.future.2004.11.016, equation 20; the commit is ours.
    """
    mean, restart_s = failing.between_s, failing.restart_s + min(failing.commit_s, interval_s)
    grown = mean * math.exp(restart_s / mean) * math.expm1((interval_s + failing.save_s) / mean)
    return interval_s / grown


def simulated(interval_s: float, failing: Failing, work_s: float, seed: int = 0) -> float:
    """The share of time in work that is not lost, of one run of `work_s` with drawn failures: the formula's check.

    A failure may strike during work, saves and restarts alike.
    """
    rng = random.Random(seed)
    now_s, done_s, safe_s = 0.0, 0.0, 0.0
    waiting: list[tuple[float, float]] = []  # when a save is committed, and how much work it holds
    fails_s = rng.expovariate(1 / failing.between_s)
    while done_s < work_s:
        ends_s = now_s + interval_s + failing.save_s
        if ends_s <= fails_s:
            now_s, done_s = ends_s, done_s + interval_s
            waiting.append((now_s + failing.commit_s, done_s))
            continue
        safe_s = max([safe_s, *(work for at, work in waiting if at <= fails_s)])
        waiting, done_s, now_s = [], safe_s, fails_s
        while True:
            fails_s = now_s + rng.expovariate(1 / failing.between_s)
            now_s = min(fails_s, now_s + failing.restart_s)
            if now_s < fails_s:
                break
    return done_s / now_s
