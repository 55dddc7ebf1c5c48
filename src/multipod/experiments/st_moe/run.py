"""ST-MoE's claims at the size of two cores: `multipod reproduce st-moe`. Claims M1 to M14, and what goes past them."""

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from multipod.experiments.outcome import Outcome, Section
from multipod.experiments.st_moe import exact
from multipod.experiments.st_moe import trained as train
from multipod.experiments.st_moe.digit_patches import small_data

ABOUT = (
    "A model of bytes: two blocks of 64 features, the last with 8 experts of 128 hidden features, 64 bytes of context, "
    "16 sequences in one group; 300 steps of Adam at 2e-3 on the sources of Python's standard library, three seeds. "
    "Not tried, since it cannot show at this size: the published shares of stable runs, the multiplicative bias (the "
    "difference is below the deviation over seeds), SuperGLUE."
)


def run(report: Callable[[str], None]) -> Outcome:
    """All of it, in about twenty minutes on two cores."""
    parts = []
    for name in ("round_off", "future", "confident", "sizes", "work", "equality"):
        report(f"exact: {name.replace('_', ' ')}")
        parts.append(getattr(exact, name)())
    for part in (train.z_loss, train.balance_loss):
        parts.append(part(report))
    claims, section, drawn = train.capacities(report)
    parts.append((claims, section))
    for part in (train.fine_tuning, small_data, train.specialisation, train.divergence):
        parts.append(part(report))
    return Outcome(
        "ST-MoE: sparse experts that train stably and transfer",
        tuple(claim for claims, _ in parts for claim in claims),
        (Section("What was done", ABOUT), *(section for _, section in parts)),
        {"capacity": _figure(drawn)},
        {"capacity": drawn},
    )


def _figure(drawn: dict[str, list[float]]) -> Any:
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(drawn["capacity"], drawn["own"], "o-", label="evaluated at the same capacity")
    axes.plot(drawn["capacity"], drawn["two"], "s-", label="evaluated at 2.0")
    axes.set(xlabel="capacity factor in training", ylabel="held-out nats a byte")
    axes.legend(frameon=False)
    return figure
