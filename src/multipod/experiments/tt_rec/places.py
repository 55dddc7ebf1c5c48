"""The part of the TT-Rec experiment on places: one DLRM, its tables dense in every place and as tensor trains."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from multipod.data.batches import TrainBatches
from multipod.data.clicks.synthetic import Synthetic
from multipod.experiments.outcome import Claim, Section
from multipod.layout.compiled import CompiledFacts, facts_of
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import ModelSplit
from multipod.metrics.binary import BinaryClassification
from multipod.models.dlrm import Dlrm
from multipod.models.dlrm_hot import Hot
from multipod.models.dlrm_tables import Placement, TablePlacement
from multipod.optim.adagrad import Adagrad
from multipod.optim.rates import Constant
from multipod.recipe.recipe import Recipe
from multipod.step.program import program_of
from multipod.step.state import device_bytes

DEVICES, UPDATES, BATCH = 8, 8, 512
SAME = 1e-4
"""The largest relative difference of a loss that passes as rounding, over `UPDATES` updates."""

TRAINS = "tensor trains of rank 8, replicated"
MULTIPOD = "arXiv:2011.03641"


def places(report: Callable[[str], None]) -> tuple[list[Claim], Section]:
    """What a device holds and sends, and what is learnt, by where the tables lie."""
    data = Synthetic(examples=UPDATES * BATCH, tests=10)
    dense = Dlrm(rows=data.rows, bottom=(64,), top=(64,))
    cases = _cases(dense)
    rows, losses, sent = [], {}, {}
    for name, (model, layout) in cases.items():
        losses[name], held, optimizer, facts = _trained(model, layout, data)
        sent[name] = _sent(facts)
        comparable = model.embeddings.parameters == dense.embeddings.parameters
        differs = _apart(losses[name], losses["replicated"]) if comparable else -1
        report(f"  {name}: {held:,} bytes held, {sent[name]:,} sent, differs by {differs:.1e}")
        shown = f"{differs:.1e}" if differs >= 0 else "another model"
        rows.append((name, f"{held:,}", f"{optimizer:,}", f"{sent[name]:,}", shown))
    return claims_of(losses, sent), _section(rows)


def _cases(dense: Dlrm) -> dict[str, tuple[Dlrm, Layout]]:
    """Models and layouts to compare, by what the page calls them; the dense tables' first is replicated."""
    trains = replace(dense, tt_rows=20_000, tt_rank=8)
    spread, shared = Layout((2, 4)), Layout((1, 1), split=ModelSplit(expert=DEVICES))
    ways: dict[str, Placement] = {"by table": "table", "by row": "row", "by column": "column"}
    ways["auto: large by row, small replicated"] = "auto"
    split = {
        name: replace(dense, tables=TablePlacement(way, parts=DEVICES, small_bytes=1 << 20))
        for name, way in ways.items()
    }
    return {
        "replicated": (dense, spread),
        **{name: (model, shared) for name, model in split.items()},
        TRAINS: (trains, spread),
        "the same, 1 % of the rows cached": (replace(trains, hot=Hot(0.01, warmup=2, policy="discard")), spread),
    }


def claims_of(losses: dict[str, list[float]], sent: dict[str, int]) -> list[Claim]:
    """What losses and bytes sent, by place of the tables, say."""
    split = [name for name in losses if name.startswith(("by ", "auto"))]
    worst = max(_apart(losses[name], losses["replicated"]) for name in split)
    saved = sent["replicated"] / sent[TRAINS]
    same = "Tables in every place: the losses of replicated ones (largest difference)"
    fewer = "Replicated tensor trains send fewer bytes than replicated tables (times)"
    return [
        Claim(
            same,
            MULTIPOD,
            worst,
            SAME,
            worst <= SAME,
            fails_if="a row, a column or a whole table is looked up or updated in the wrong place",
        ),
        Claim(
            fewer,
            "arXiv:2101.11714",
            saved,
            10.0,
            saved > 10,
            fails_if="the layers' gradients, or what hot rows send, are as large as the tables that trains replace",
        ),
    ]


def _section(rows: Sequence[tuple[str, ...]]) -> Section:
    text = (
        f"`dlrm-small`'s sizes on {DEVICES} devices, batch {BATCH}, {UPDATES} updates under Adagrad. Bytes sent are "
        "those of the compiled update's collectives, as a device sends them: 2 (d - 1) / d of an all-reduced vector, "
        "(d - 1) / d of others; they hold the layers' gradients and the counted ids too. By table the part of the "
        "fullest device counts for all."
    )
    head = ("tables", "parameters, bytes", "optimizer, bytes", "sent in an update, bytes", "loss differs by")
    return Section("Places of tables", text, head, rows)


def _trained(model: Dlrm, layout: Layout, data: Synthetic) -> tuple[list[float], int, int, CompiledFacts]:
    recipe = Recipe(
        "places", model, data, BinaryClassification(), Adagrad(Constant(0.04)), BATCH,
        UPDATES, layout,
    )  # fmt: skip
    program = program_of(recipe, make_mesh(layout))
    update, state, losses = program.compile_update(), program.init(), []
    numbers = np.arange(program.rows)
    batches = TrainBatches(data.train(), BATCH, recipe.seed, numbers, program.padded).start(0)
    for batch in itertools.islice(batches, UPDATES):
        state, sums = update(state, program.place_batch(batch, numbers, program.rows), program.controls())
        losses.append(float(sums["loss"]) / BATCH)
    shapes = program.shapes
    return losses, device_bytes(shapes.params), device_bytes(shapes.optimizer), facts_of(update)


def _sent(facts: CompiledFacts) -> int:
    """Bytes that a device sends in an update."""
    share = (DEVICES - 1) / DEVICES
    return round(sum(c.nbytes * c.times * share * (2 if c.kind == "all-reduce" else 1) for c in facts.collectives))


def _apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
