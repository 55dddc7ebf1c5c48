"""How long a mesh waits for its hosts' input: the slowest host's largest picture holds everyone.

Each host makes its rows of a batch in *parts*, in order, by some threads, a bounded number of parts ahead, as
`multipod.data.batches.Prefetcher` does. An update begins when the one before it has ended and every host has its rows.
What is not modelled: the transfer to the devices, and hosts whose threads disturb each other.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from multipod.errors import DataError


@dataclass(frozen=True)
class HeavyTail:
    """Seconds that one host thread needs for one image: log-normal, and now and then a much larger picture.

    An image costs `median_s` * exp(sigma * normal); a share `tail` of them that, times a Pareto variable of exponent
    `exponent`, at most `most`. The defaults are assumptions, shaped after ImageNet: most pictures are of 500 x 375
    pixels, some have 60 million, 320 times as many.

    Attributes:
      median_s: of an ordinary image.
      sigma: of the logarithm.
      tail: share of large pictures.
      exponent: of their distribution; the smaller, the heavier.
      most: largest factor.
    """

    median_s: float = 1.3e-3
    sigma: float = 0.4
    tail: float = 0.005
    exponent: float = 1.0
    most: float = 320.0

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Random costs in seconds, float64."""
        ordinary = self.median_s * np.exp(self.sigma * rng.standard_normal(shape))
        large = np.minimum((1 - rng.random(shape)) ** (-1 / self.exponent), self.most)
        return ordinary * np.where(rng.random(shape) < self.tail, large, 1.0)


@dataclass(frozen=True)
class InputRun:
    """Times of a simulated run, in seconds from its start.

    Attributes:
      device_s: what an update takes when its data are there.
      began_s: when each update began, [updates].
      ready_s: when each host had its rows of each batch, [hosts, updates].
    """

    device_s: float
    began_s: np.ndarray
    ready_s: np.ndarray

    @property
    def step_s(self) -> float:
        """Mean time of an update, after a tenth of them, in which the buffers fill or drain."""
        skip = len(self.began_s) // 10
        return float((self.began_s[-1] - self.began_s[skip]) / (len(self.began_s) - 1 - skip))

    @property
    def lost_share(self) -> float:
        """The share of time in which the devices wait."""
        return max(0.0, 1 - self.device_s / self.step_s)

    def slowest(self) -> int:
        """The host that most updates waited for."""
        return int(np.bincount(self.ready_s.argmax(0)).argmax())


def simulate_input(part_s: np.ndarray, threads: int, ahead: int, device_s: float) -> InputRun:
    """A run whose hosts need `part_s` seconds for each part of each batch, [hosts, updates, parts].

    With ask(k, j) the time at which part j of batch k is asked for, and g = k * parts + j its number among all,

        ask(k, 0) = began(k - 1)             the host fetches while the devices work on the batch before
        ask(k, j) = max(ask(k, j - 1), made(k, j - 1))
        part g starts on the first free thread, not before part g - max(ahead * parts, threads) was asked for
        began(k) = max(began(k - 1) + device_s, made(k, parts - 1) of every host)

    Time: parts of all hosts x log(threads), in Python, about 1 us each.

    Args:
      part_s: what to make each part costs one thread.
      threads: of each host.
      ahead: batches made ahead by each host.
      device_s: of an update.

    Raises:
      DataError: fewer than three updates, or no thread, or nothing ahead.
    """
    hosts, updates, parts = part_s.shape
    if updates < 3 or min(hosts, parts, threads, ahead) < 1:
        raise DataError(
            f"simulate_input: {hosts} hosts, {updates} updates of {parts} parts, {threads} threads, {ahead} ahead. "
            "There are at least three updates, and one of all else."
        )
    depth = max(ahead * parts, threads)
    free = [[0.0] * threads for _ in range(hosts)]
    asked: list[list[float]] = [[] for _ in range(hosts)]
    made: list[list[float]] = [[] for _ in range(hosts)]
    began, ready = np.zeros(updates), np.zeros((hosts, updates))
    costs = part_s.reshape(hosts, -1).tolist()

    def make_until(host: int, limit: int) -> None:
        """Starts all parts below `limit`: those whose place ahead is known to be free."""
        own, done, gates = free[host], made[host], asked[host]
        for number in range(len(done), min(limit, updates * parts)):
            gate = gates[number - depth] if number >= depth else 0.0
            begin = max(own[0], gate)
            end = begin + costs[host][number]
            heapq.heapreplace(own, end)
            done.append(end)

    for update in range(updates):
        before = began[update - 1] if update else 0.0
        for host in range(hosts):
            at = before
            for part in range(parts):
                asked[host].append(at)
                make_until(host, update * parts + part + 1)
                at = max(at, made[host][update * parts + part])
            ready[host, update] = at
        began[update] = max(before + (device_s if update else 0.0), ready[:, update].max())
    return InputRun(device_s, began, ready)


def expected_loss(
    cost: HeavyTail,
    hosts: int,
    images: int,
    *,
    device_s: float,
    threads: int,
    ahead: int = 2,
    part: int = 64,
    updates: int = 60,
    seed: int = 0,
) -> InputRun:
    """A run of `hosts` hosts that read `images` images each for an update, at random costs."""
    parts = -(-images // part)
    drawn = cost.draw(np.random.default_rng(seed), (hosts, updates, images))
    cuts = np.linspace(0, images, parts + 1).astype(int)[:-1]
    return simulate_input(np.add.reduceat(drawn, cuts, axis=2), threads, ahead, device_s)
