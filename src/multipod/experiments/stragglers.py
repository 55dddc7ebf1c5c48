"""Host input at scale: the straggler model against real readers, and what it predicts for 16 to 512 hosts."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from multipod.data.batches import TrainBatches
from multipod.data.reading import InputOptions
from multipod.data.source import HostBatch
from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.simulate.input import HeavyTail, InputRun, expected_loss, simulate_input

DECODING = HeavyTail()
DECODED = HeavyTail(median_s=0.15e-3, sigma=0.1, tail=0.005, most=8.0)
"""Crops from decoded images; large pictures are kept at 1/2 to 1/8 of their size, so 8 times the pixels is the most."""

HOSTS = (16, 32, 64, 128, 256, 512)
IMAGES, DEVICE_S, THREADS = 128, 16.6e-3, 48
"""Of a host of the multipod that trains ResNet-50: 65,536 images over 512 hosts; 28.8 s for 1,738 updates."""
CLOSE = 0.1
"""Largest relative difference of measured and predicted step time that counts as agreement."""


def run(report: Callable[[str], None]) -> Outcome:
    """Measures four small clusters of sleeping readers, then predicts."""
    checks = [_check(name, part_s, ahead, report) for name, part_s, ahead in _scenarios()]
    report("predicting 16 to 512 hosts")
    predicted = {
        (name, ahead): [_predict(cost, hosts, ahead) for hosts in HOSTS]
        for name, cost in (("decoding", DECODING), ("decoded cache", DECODED))
        for ahead in (2, 8)
    }
    return Outcome(
        "Stragglers of host input",
        claims_of(checks),
        (_measured(checks), _predicted(predicted)),
        {"hosts": _figure(predicted)},
    )


@dataclass(frozen=True)
class ReaderCheck:
    """A cluster of sleeping readers: seconds of a step, measured, predicted, and with no waiting at all."""

    name: str
    ahead: int
    measured_s: float
    predicted_s: float
    without_s: float


def claims_of(checks: Sequence[ReaderCheck]) -> tuple[Claim, ...]:
    """What the measured steps say of the model: that it predicts them, and that it had something to predict."""
    worst = max(abs(check.measured_s / check.predicted_s - 1) for check in checks)
    waits = max(check.measured_s / check.without_s for check in checks)
    return (
        Claim("largest error of the predicted step time", "our measurement", worst, f"<= {CLOSE}", worst <= CLOSE,
              fails_if="hosts wait for each other otherwise than the model says"),
        Claim("the longest measured step over the device's own time", "our measurement", waits, ">= 1.5", waits >= 1.5,
              fails_if="no reader holds anybody up, so that any model of waiting would predict the steps"),
    )  # fmt: skip


def _scenarios() -> list[tuple[str, np.ndarray, int]]:
    """Seconds of each batch on four hosts, and how far they read ahead."""
    rng = np.random.default_rng(0)
    even = HeavyTail(0.02, 0.05, 0.0).draw(rng, (4, 60, 1))
    tail = HeavyTail(0.02, 0.2, 0.05, 1.0, 12.0).draw(rng, (4, 60, 1))
    slow = even.copy()
    slow[3] *= 2.5
    return [
        ("even", even, 2),
        ("one batch in 20 up to 12 times as long", tail, 1),
        ("the same", tail, 2),
        ("the same", tail, 8),
        ("one host 2.5 times slower", slow, 2),
    ]


DEVICE_SLEEP_S = 0.03


def _check(name: str, part_s: np.ndarray, ahead: int, report: Callable[[str], None]) -> ReaderCheck:
    report(f"measuring: {name}, {ahead} ahead")
    began, taken_s = measured(part_s, ahead, DEVICE_SLEEP_S)
    predicted = simulate_input(taken_s, 1, ahead, DEVICE_SLEEP_S)
    steps = len(began) - 1
    return ReaderCheck(
        name, ahead, float(began[-1] - began[0]) / steps, float(np.ptp(predicted.began_s)) / steps, DEVICE_SLEEP_S
    )


class _Sleeper:
    """A source whose example n takes `seconds[n]` to read."""

    def __init__(self, seconds: np.ndarray) -> None:
        self.seconds, self.taken_s = seconds, seconds.copy()

    def __len__(self) -> int:
        return len(self.seconds)

    def read(self, numbers: np.ndarray) -> HostBatch:
        start = time.perf_counter()
        time.sleep(float(self.seconds[numbers].sum()))
        self.taken_s[numbers] = time.perf_counter() - start  # one number at a time; a busy machine sleeps longer
        return {"number": numbers}

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        return batch


def measured(part_s: np.ndarray, ahead: int, device_s: float) -> tuple[np.ndarray, np.ndarray]:
    """When each update began, and what reading each part really took.

    One thread for each host, with a reader of its own, that meet at every update.
    """
    hosts, updates, _ = part_s.shape
    room, began, taken_s = threading.Barrier(hosts, timeout=120), np.zeros(updates), part_s.copy()

    def host(number: int) -> None:
        source = _Sleeper(np.zeros(updates + 32))
        batches = TrainBatches(source, 1, 0, np.arange(1))
        places = [int(batches.numbers(k)[0]) for k in range(updates)]
        source.seconds[places] = part_s[number, :, 0]
        feed = batches.start(0, InputOptions(threads=1, ahead=ahead))
        next(feed)
        for update in range(updates):
            room.wait()
            start = time.perf_counter()
            if number == 0:
                began[update] = start
            if update + 1 < updates:
                next(feed)
            time.sleep(max(0.0, start + device_s - time.perf_counter()))
        feed.close()
        taken_s[number, :, 0] = source.taken_s[places]

    threads = [threading.Thread(target=host, args=(number,)) for number in range(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return began, taken_s


def _predict(cost: HeavyTail, hosts: int, ahead: int) -> InputRun:
    return expected_loss(
        cost, hosts, IMAGES, device_s=DEVICE_S, threads=THREADS, ahead=ahead, part=8, updates=80, seed=hosts
    )


def _measured(checks: list[ReaderCheck]) -> Section:
    rows = [
        (
            check.name,
            str(check.ahead),
            f"{check.measured_s * 1e3:.1f}",
            f"{check.predicted_s * 1e3:.1f}",
            f"{check.measured_s / check.predicted_s - 1:+.1%}",
        )
        for check in checks
    ]
    return Section(
        "The model against real readers",
        "Four hosts, each a thread with its own `Prefetcher`, that meet at every one of 60 updates; "
        f"{DEVICE_SLEEP_S * 1e3:.0f} ms of device time. Reading is sleeping, so that two cores can be four hosts. The "
        "model is given what each read really took.",
        ("hosts", "ahead", "measured ms/step", "predicted ms/step", "difference"),
        rows,
    )


def _predicted(predicted: dict[tuple[str, int], list[InputRun]]) -> Section:
    rows = [(name, str(ahead), *(f"{run.lost_share:.1%}" for run in runs)) for (name, ahead), runs in predicted.items()]
    return Section(
        "What is lost on 16 to 512 hosts",
        f"{IMAGES} images a host and update, {THREADS} threads a host, {DEVICE_S * 1e3:.1f} ms of device time. An "
        f"ordinary image costs {DECODING.median_s * 1e3:.2f} ms to decode and crop, {DECODED.median_s * 1e3:.2f} ms "
        f"from the cache (our figures on one core); one in {1 / DECODING.tail:.0f} is a large picture, of up to "
        f"{DECODING.most:.0f} times as many pixels, {DECODED.most:.0f} times in the cache. That tail is an assumption, "
        "not a measurement of ImageNet, and the shares follow from it: they are no claims. Shares of the step that the "
        "devices wait:",
        ("", "batches ahead", *(f"{hosts} hosts" for hosts in HOSTS)),
        rows,
        "hosts",
    )


def _figure(predicted: dict[tuple[str, int], list[InputRun]]) -> object:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for (name, ahead), runs in predicted.items():
        style = ("o" if name == "decoding" else "s") + ("-" if ahead == 2 else "--")
        axes.plot(HOSTS, [100 * run.lost_share for run in runs], style, label=f"{name}, {ahead} ahead")
    axes.set(xscale="log", xticks=HOSTS, xticklabels=HOSTS, xlabel="hosts", ylabel="step time lost, %")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
