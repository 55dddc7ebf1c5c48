"""Large runs from small ones: families of MLPerf v0.7 and v1.0, each foretold from its smallest one or two systems."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from multipod.experiments.outcome import Claim, Section
from multipod.plan.families.conditional import fitted
from multipod.plan.families.held_out import HeldOut, coverage, held_out, median_of_families, medians, width
from multipod.plan.families.rows import FamilyRow, by_family, public_rows, reference_rows

SOURCE = "logs of MLPerf Training v0.7 and v1.0"
GOAL = "this repository's own goal"
MOST = {"throughput_per_s": 0.08, "run_s_of_samples": 0.10, "run_s": 0.15}
"""Medians over families of the median |ln(predicted / measured)| that pass."""

WINS, INSIDE = 0.70, (0.85, 0.95)
"""Share of families that are to be nearer than by a power law, and of rows within their 90 % intervals."""

WORDS = {
    "throughput_per_s": "throughput",
    "run_s_of_samples": "run time with samples given",
    "run_s": "run time",
    "samples": "samples to the target",
    "around_s": "seconds outside of training",
    "init_s": "seconds before the first update",
}

WHY = {
    "v1.0/NVIDIA/dgxa100/unet3d": "7 images a GPU become less than one: from 104 GPUs on several share an image",
    "v1.0/NVIDIA/dgxa100/dlrm": "8 times the GPUs are 2.1 times as fast: rows of tables cross the boxes' network",
    "v1.0/Google/tpu-v4-jax/unet3d": "8 times the chips share the same 32 images, and are still 5.1 times as fast",
    "v0.7/Google/tpu-v4-tf/maskrcnn": "64 chips are 9.4 times as fast as 8, and 256 only 1.4 times as fast as 64",
    "v0.7/Google/tpu-v4-tf/gnmt": "256 chips are 1.2 times as fast as 64, at the same batch",
    "v1.0/Google/tpu-v4-tf/ssd": "one image a chip, on 32 times the chips, still 9 times as fast",
    "v0.7/Google/tpu-v4-tf/ssd": "64 chips are 6.5 times as fast as 8, and 256 only 1.9 times as fast as 64",
    "v1.0/NVIDIA/dgxa100/rnnt": "the only RNN-T: no other family tells what its local batches cost",
}
"""What the logs say of the families that are foretold worst."""


@dataclass(frozen=True)
class Families:
    """Predictions of all families, none of which was seen, by the number of known rows.

    Attributes:
      found: predictions of everything.
      power: median |ln(predicted / measured)| of throughput by family, by a power law.
    """

    found: Mapping[int, Sequence[HeldOut]]
    power: Mapping[int, Mapping[str, float]]

    def of(self, known: int, name: str) -> list[HeldOut]:
        """The predictions of one thing from so many rows."""
        return [one for one in self.found[known] if one.name == name]


def study(report: Callable[[str], None]) -> Families:
    """Predicts each family from its smallest one and two rows by a fit to all others."""
    rows = public_rows()
    parameters = fitted([*rows, *reference_rows()])
    found, power = {}, {}
    for known in (1, 2):
        report(f"families of MLPerf from their {known} smallest: 40 fits")
        found[known] = list(held_out(rows, known, parameters, refit=True))
        power[known] = power_law(rows, known)
    return Families(found, power)


def power_law(rows: Sequence[FamilyRow], known: int) -> dict[str, float]:
    """Median |ln(predicted / measured)| of throughput by family, by throughput = c N^e.

    c and e are those of the two smallest systems; from one alone, e is the median of what the other families' two
    smallest have.
    """
    families = by_family(rows)
    exponents = {name: _exponent(family) for name, family in families.items()}
    errors = {}
    for name, family in families.items():
        if len(family) > known:
            others = [exponent for other, exponent in exponents.items() if other != name and not math.isnan(exponent)]
            exponent = float(np.median(others)) if known == 1 else exponents[name]
            last = family[known - 1]
            ratios = [_times(last, row, exponent) for row in family[known:]]
            errors[name] = float(np.median(np.abs(np.log(ratios))))
    return errors


def _exponent(family: Sequence[FamilyRow]) -> float:
    first, second = family[:2]
    more = math.log(second.accelerators / first.accelerators)
    return math.log(_throughput(second) / _throughput(first)) / more if more else math.nan


def _times(last: FamilyRow, row: FamilyRow, exponent: float) -> float:
    """Predicted over measured throughput."""
    return _throughput(last) * (row.accelerators / last.accelerators) ** exponent / _throughput(row)


def _throughput(row: FamilyRow) -> float:
    assert row.throughput_per_s is not None, "public rows are measured"
    return row.throughput_per_s


def claims_of(families: Families) -> list[Claim]:
    """What the held-out predictions say."""
    claims = []
    for known, words in ((1, "its smallest system"), (2, "its two smallest")):
        for name, most in MOST.items():
            median = median_of_families(families.of(known, name))
            claims.append(
                Claim(f"Families: {WORDS[name]} from {words}, median |ln(predicted / measured)|", GOAL,
                      median, f"at most {most:g}", median <= most,
                      fails_if="other families do not tell how this one goes on")
            )  # fmt: skip
        wins = _wins(families, known)
        claims.append(
            Claim(f"Families: share whose throughput from {words} is nearer than by a power law, %", GOAL, 100 * wins,
                  f"at least {100 * WINS:g}", wins >= WINS,
                  fails_if="local batches and boxes explain no more than the number of accelerators does")
        )  # fmt: skip
        inside = {name: coverage(families.of(known, name)) for name in MOST}
        worst = max(inside.values(), key=lambda share: abs(share - np.mean(INSIDE)))
        claims.append(
            Claim(f"Families: rows within their 90 % interval from {words}, % (the worst of three quantities)", GOAL,
                  100 * worst, f"{100 * INSIDE[0]:g} to {100 * INSIDE[1]:g}", INSIDE[0] <= worst <= INSIDE[1],
                  fails_if="errors of the other families do not tell how far this one's go")
        )  # fmt: skip
    return claims


def _wins(families: Families, known: int) -> float:
    ours = medians(families.of(known, "throughput_per_s"))
    return float(np.mean([ours[name] < families.power[known][name] for name in ours]))


def sections(families: Families) -> list[Section]:
    """What was done, all medians, every family, and the rows that are foretold worst."""
    return [_summary(families), _by_family(families), _worst(families)]


def _summary(families: Families) -> Section:
    rows = []
    for known in (1, 2):
        for name, words in WORDS.items():
            found = families.of(known, name)
            told = f"{median_of_families(found):.3f}", f"{coverage(found):.0%}", f"{width(found):.2f}"
            rows.append((str(known), words, str(len(found)), *told))
        median = float(np.median(list(families.power[known].values())))
        rows.append((str(known), "throughput by a power law", "", f"{median:.3f}", "", ""))
    head = ("rows known", "predicted", "rows", "median error", "inside their intervals", "half width in deviations")
    return Section("Large runs from small ones", _METHOD, head, rows, figure="families")


def _by_family(families: Families) -> Section:
    rows = []
    for name, family in by_family(public_rows()).items():
        cells = [name, ", ".join(f"{row.accelerators:,}" for row in family)]
        for known in (1, 2):
            of = {what: medians(families.of(known, what)).get(name) for what in ("throughput_per_s", "run_s")}
            power = families.power[known].get(name)
            cells += [_told(of["throughput_per_s"]), _told(power), _told(of["run_s"])]
        rows.append(tuple(cells))
    head = ("family", "accelerators", "throughput from 1", "power law", "run from 1", "throughput from 2", "power law",
            "run from 2")  # fmt: skip
    return Section("Every family", "Medians of |ln(predicted / measured)| over a family's larger systems.", head, rows)


def _told(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _worst(families: Families, most: int = 12) -> Section:
    found = [one for known in (1, 2) for one in families.of(known, "throughput_per_s")]
    rows = [
        (one.row.family, f"{one.row.accelerators:,}", str(one.known), f"{one.row.batch / one.row.accelerators:,.3g}",
         f"{math.exp(one.error):.2f}", f"{abs(one.error) / one.sd:.1f}", WHY.get(one.row.family, ""))
        for one in sorted(found, key=lambda one: -abs(one.error))[:most]
    ]  # fmt: skip
    head = ("family", "accelerators", "rows known", "batch of one", "predicted / measured", "deviations", "what it is")
    return Section("The rows foretold worst", "", head, rows)


def figure(families: Families) -> Any:
    """Run times predicted against measured, and how far throughput is off by how much larger the system is."""
    picture = Figure(figsize=(9, 4.4), layout="constrained")
    left, right = picture.subplots(1, 2)
    smallest = {name: family[0].accelerators for name, family in by_family(public_rows()).items()}
    runs, rates = families.of(1, "run_s"), families.of(1, "throughput_per_s")
    for place, benchmark in enumerate(sorted({one.row.benchmark for one in runs})):
        of = lambda found, name=benchmark: [one for one in found if one.row.benchmark == name]  # noqa: E731
        style = {"fmt": "o", "markersize": 3, "linewidth": 0.6, "color": f"C{place}", "label": benchmark}
        some = of(runs)
        predicted = np.array([one.predicted for one in some])
        left.errorbar([one.measured for one in some], predicted, _ends(some, predicted, width(runs)), **style)
        some = of(rates)
        ratio = np.exp([one.error for one in some])
        larger = [one.row.accelerators / smallest[one.row.family] for one in some]
        right.errorbar(larger, ratio, _ends(some, ratio, width(rates)), **style)
    limits = left.get_xlim()
    left.plot(limits, limits, color="black", linewidth=0.6, linestyle=":")
    right.axhline(1, color="black", linewidth=0.6, linestyle=":")
    left.set(xscale="log", yscale="log", xlabel="measured run, s", ylabel="predicted run, s, with its 90 % interval")
    words = "throughput, predicted / measured"
    right.set(xscale="log", yscale="log", xlabel="times as many accelerators as measured", ylabel=words)
    right.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["1/4", "1/2", "1", "2", "4", "8"])
    right.minorticks_off()
    left.legend(fontsize="small")
    return picture


def _ends(found: Sequence[HeldOut], middle: np.ndarray, wide: float) -> list[np.ndarray]:
    """Lengths of the intervals' lower and upper halves."""
    factor = np.exp([wide * one.sd for one in found])
    return [middle - middle / factor, middle * factor - middle]


def data_of(families: Families) -> list[dict[str, Any]]:
    """Every row's throughput and run time, as [predicted, low, high, measured], for the page's JSON."""
    entries: dict[tuple[int, int], dict[str, Any]] = {}
    for known in families.found:
        for name in ("throughput_per_s", "run_s"):
            found = families.of(known, name)
            wide = width(found)
            for one in found:
                row, factor = one.row, math.exp(wide * one.sd)
                told = {"family": row.family, "accelerators": row.accelerators, "known": known}
                values = (one.predicted, one.predicted / factor, one.predicted * factor, one.measured)
                entries.setdefault((id(row), known), told)[name] = [float(f"{value:.6g}") for value in values]
    return list(entries.values())


_METHOD = """110 rows of 40 families: one submitter, system, model and round at several sizes
(`src/multipod/plan/families/mlperf.toml`). Each family in turn is taken out, the models are fitted to the other 39
and to MLPerf's reference convergence points, and its larger systems are foretold from its smallest one or two, with
their batches given (`multipod plan calibrate --from`). An error is |ln(predicted / measured)|, its median first over
a family's rows, then over families. The half width of an interval is the number of standard deviations that holds 90
% of the errors; how many rows lie inside is counted with a width from the other families alone. What speaks against
reading this as more than it is: the form of the models (which effects there are) was chosen among about ten, looking
at these medians, which differ by 0.01 to 0.03 between the better of them; siblings of a family, the same benchmark of
another round or submitter, stay in the fit, as they do for a user; later rounds have not been looked at."""
