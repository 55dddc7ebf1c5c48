"""What PipeMare's paper says of limits, delays, memory and utilisation, checked without training anything."""

import math
from fractions import Fraction

from multipod.experiments.outcome import Claim, Section
from multipod.pipelines import model, stability
from multipod.pipelines.build import gpipe, pipedream, pipemare
from multipod.pipelines.check import check
from multipod.pipelines.timing import Costs, time_schedule

PAPER = "arXiv:1910.05124"
TAUS = (0, 1, 2, 5, 10, 20, 50)
DELTAS = (0, 1, 5, 20, 100)
SHAPES = [(p, n) for p in range(1, 13) for n in range(1, 9)]


def limits() -> tuple[list[Claim], Section]:
    """A1: the limit of the delayed quadratic by its closed form, by roots and by running it."""
    rows, off_roots, off_runs = [], 0.0, 0.0
    for tau in TAUS:
        limit = stability.limit(tau)
        roots = stability.threshold(stability.delay_polynomial(tau))
        low, high = 0.5 * limit, 1.5 * limit
        while high - low > 1e-3 * limit:
            middle = (low + high) / 2
            low, high = (low, middle) if stability.diverges(middle, tau) else (middle, high)
        rows.append((str(tau), f"{limit:.6f}", f"{roots:.6f}", f"{low:.6f}"))
        off_roots, off_runs = max(off_roots, abs(roots - limit)), max(off_runs, abs(low / limit - 1))
    head = ("delay tau", "(2 / lambda) sin(pi / (4 tau + 2))", "roots of the polynomial", "running it")
    return limit_claims(off_roots, off_runs), Section(
        "Limits of delayed gradient descent", "Curvature lambda = 1.", head, rows
    )


def limit_claims(off_roots: float, off_runs: float) -> list[Claim]:
    """A1, from the largest differences to the closed form."""
    wrong = "the closed form of the limit is not where delayed gradient descent begins to diverge"
    return [
        Claim("A1: step-size limit O(1/tau), largest difference of roots and closed form", PAPER, off_roots, 1e-6,
              off_roots < 1e-6, fails_if=wrong),
        Claim("A1: the same by running the recurrence, largest relative difference", PAPER, off_runs, 0.01,
              off_runs < 0.01, fails_if=wrong),
    ]  # fmt: skip


def discrepancy() -> tuple[list[Claim], Section]:
    """A2: how far the discrepancy between the passes lowers the limit, and T2 raises it."""
    rows, below, least, gammas = [], True, math.inf, 0.0
    for tau in (5, 10, 20, 40):
        for delta in DELTAS:
            without = stability.threshold(stability.discrepancy_polynomial(tau, 0, delta))
            theory, chosen = stability.theory_gamma(tau), stability.decay_gamma(0.135, tau)
            with_theory, with_decay = (
                stability.threshold(stability.discrepancy_polynomial(tau, 0, delta, g)) for g in (theory, chosen)
            )
            rows.append((str(tau), str(delta), *(f"{x:.5f}" for x in (without, with_theory, with_decay))))
            # At Delta = 0 the bound is the limit itself, and is met with equality.
            below &= without <= stability.discrepancy_bound(tau, 0, delta) * (1 + 1e-6)
            if delta >= 5 and tau >= 10:
                least = min(least, with_decay / without)
            if tau >= 10:
                gammas = max(gammas, abs(chosen / theory - 1))
    head = ("tau", "Delta", "without T2", "T2, theory's gamma", "T2, D = 0.135")
    return discrepancy_claims(below, least, gammas), Section(
        "Limits with different weights in the two passes", "Backward delay 0, lambda = 1.", head, rows
    )


def discrepancy_claims(below: bool, least: float, gammas: float) -> list[Claim]:
    """A2, from whether all limits lie below the bound, the least gain of T2, and the difference of the gammas."""
    return [
        Claim("A2: without T2 an unstable step size lies at or below min(2 / (Delta tau), limit)", PAPER,
              "in all cases" if below else "not always", "all", below,
              fails_if="some pipeline stays stable beyond the bound that the paper proves"),
        Claim("A2: T2 raises the limit at Delta >= 5, tau >= 10, least factor", PAPER, least, 4.0, least >= 4,
              fails_if="correcting the weights of the backward pass buys less than four times the step size"),
        Claim("A2: gamma from D = 0.135 against theory's at tau >= 10, largest relative difference", PAPER, gammas,
              0.02, gammas < 0.02, fails_if="the constant D that runs use is not what theory asks for"),
    ]  # fmt: skip


def delays() -> list[Claim]:
    """A3: delays by counting on the schedules."""
    wrong = 0
    for p, n in SHAPES:
        proof = check(pipemare(p, n, 3 + 2 * math.ceil(2 * p / n)))
        for i in range(1, p + 1):
            exact = tuple(math.ceil(Fraction(2 * (p - i) + 1 - j, n)) for j in range(n))
            wrong += proof.forward_delays(i - 1) != exact
            wrong += proof.mean_delay(i - 1) != Fraction(2 * (p - i) + 1, n) or any(proof.backward_delays(i - 1))
    return [delay_claim(wrong)]


def delay_claim(wrong: int) -> Claim:
    """A3, from how many counts differ."""
    words = f"{wrong} wrong of {len(SHAPES)} pipelines"
    return Claim("A3: forward delays are (2 (P - i) + 1) / N in the mean, backward delays 0, P <= 12, N <= 8", PAPER,
                 words, "0 wrong", wrong == 0,
                 fails_if="the schedule that runs has other delays than the paper's formula")  # fmt: skip


def costs() -> tuple[list[Claim], Section]:
    """A4 and A10: utilisation, stashed versions, activations and copies, counted on schedules and in closed form."""
    wrong, rows = 0, []
    for p, n in SHAPES:
        many = 3 + 2 * math.ceil(2 * p / n)
        mare, dream = check(pipemare(p, n, many)), check(pipedream(p, n, many))
        wrong += time_schedule(gpipe(p, n), Costs(1, 2)).utilisation != Fraction(n, n + p - 1)
        wrong += time_schedule(mare.schedule, Costs(1, 2)).steady_utilisation != 1
        wrong += sum(mare.peak_live) != p * p
        wrong += dream.stashed != tuple(model.whole_versions(p, n, i) for i in range(1, p + 1))
        wrong += model.cost("pipedream", p, n, "adam").weight_copies - 4 != Fraction(p, n)
    for p, n in ((4, 8), (8, 16), (107, 8), (93, 16)):
        for name in ("gpipe", "pipedream", "pipemare"):
            c = model.cost(name, p, n, "momentum")
            rows.append((f"P = {p}, N = {n}", name, f"{float(c.utilisation):.1%}",
                         f"{float(c.weight_copies):.2f}", f"{c.activations:,}"))  # fmt: skip
    sgd, adam = (model.cost("pipemare", 107, 8, o).weight_copies / model.COPIES[o] for o in ("momentum", "adam"))
    headline = float(1 / model.cost("gpipe", 107, 8).utilisation)
    claims = cost_claims(wrong, sgd, adam, headline)
    memory, section = resnet_memory()
    claims.append(memory)
    head = ("pipeline", "method", "utilisation", "weight-sized arrays (momentum SGD)", "activations, micro-batches")
    text = f"Closed forms, which the schedules meet exactly for P <= 12, N <= 8. {section}"
    return claims, Section("Utilisation and memory", text, head, rows)


def cost_claims(wrong: int, sgd: Fraction, adam: Fraction, headline: float) -> list[Claim]:
    """A4 and A10, from how many counts differ, weight memory with T2 over without, and the utilisation gained."""
    return [
        Claim("A4: utilisation N / (N + P - 1) and 1, stash ceil((2 (P - i) + 1) / N), mean P / N, activations P^2",
              PAPER, f"{wrong} wrong of {len(SHAPES)} pipelines", "0 wrong", wrong == 0,
              fails_if="a schedule idles, stashes or holds otherwise than its closed form"),
        Claim("A10: T2 costs 1/3 more weight memory with momentum SGD and 1/4 with Adam", PAPER,
              f"{sgd} and {adam}", "4/3 and 5/4", (sgd, adam) == (Fraction(4, 3), Fraction(5, 4)),
              fails_if="T2 keeps more than one array of the weights' size"),
        Claim("utilisation over GPipe's at P = 107, N = 8 (ResNet-50, a layer a stage; N is our reading)",
              "MLSys 2021, abstract", headline, 14.3, abs(headline - 14.3) < 0.1,
              fails_if="the published gain is of another pipeline than P = 107, N = 8, or counted otherwise"),
    ]  # fmt: skip


def resnet_memory() -> tuple[Claim, str]:
    """PipeDream's weight memory for ResNet-50 cut into 107 layers, each stage weighed by its own size."""
    sizes = _resnet50_layers()
    dream = float(model.cost("pipedream", len(sizes), 8, "momentum", sizes=sizes).weight_copies / 3)
    even = float(model.cost("pipedream", len(sizes), 8, "momentum").weight_copies / 3)
    text = (
        f"ResNet-50 for ten classes has {len(sizes)} layers with weights (53 convolutions, 53 batch norms, one dense). "
        f"Were all of one size, PipeDream would hold {even:.2f} times the weights and optimizer state of one copy; "
        f"weighed by size, its late layers being the large ones, {dream:.2f} times."
    )
    return memory_claim(dream), text


def memory_claim(times: float) -> Claim:
    """Table 2, from PipeDream's memory over that of one copy."""
    return Claim(
        "PipeDream's weight and optimizer memory for ResNet-50, P = 107, N = 8, momentum SGD (paper: 2.70 times)",
        "MLSys 2021, table 2", times, "2.70 within 10 %", abs(times / 2.70 - 1) < 0.1,
        fails_if="the paper cut, weighed or counted its 107 stages otherwise than we do",
    )  # fmt: skip


def _resnet50_layers(classes: int = 10) -> list[int]:
    """Weights of each convolution, batch norm and dense layer in order (He et al., 2015, arXiv:1512.03385)."""
    sizes = [7 * 7 * 3 * 64, 2 * 64]
    inputs = 64
    for blocks, inner in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            outer = 4 * inner
            for kernel, channels in ((inputs * inner, inner), (9 * inner * inner, inner), (inner * outer, outer)):
                sizes += [kernel, 2 * channels]
            if block == 0:
                sizes += [inputs * outer, 2 * outer]
            inputs = outer
    return [*sizes, inputs * classes + classes]
