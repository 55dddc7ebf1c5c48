"""Recipe texts of older versions in today's form, table by table.

A run folder keeps the text that its run began with, and a run goes on for years: what a field or a type was called once
is read for good. A change of names is one line in `OLD_FORMS`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from multipod.models.dlrm_interactions import DotInteraction
from multipod.optim.optimizers import OPTIMIZERS
from multipod.optim.rates import RATES, WarmUp
from multipod.optim.tensors import TensorRules

Table = dict[str, Any]

RATE_FIELDS = {"peak": "rate", "end": "end_rate", "factor": "decay_rate", "every": "decay_every", "at": "drops"}
"""What the fields of rates were called when they were an optimizer's; the others have kept their names."""

TARGETS = {"target_auc": "auc", "target_box_ap": "box_AP", "target_mask_ap": "mask_AP"}
"""What the fields of objectives asked for that are now a part of the recipe's `target`."""


def upgrade(table: Table) -> Table:
    """Returns the table of a recipe, or of a part of one, in today's form; `kind` says what a part is of."""
    table = OLD_FORMS.get(table.get("kind", ""), dict)(table)
    return {name: _upgraded(value) for name, value in table.items()}


def _upgraded(value: Any) -> Any:
    if isinstance(value, dict):
        return upgrade(value)
    return [_upgraded(item) for item in value] if isinstance(value, list) else value


def _recipe(old: Table) -> Table:
    """Renames the field `trouble`, and takes the targets that were the objective's.

    (A recipe is a table without a kind, as are dicts, which have no such names.)
    """
    new = {{"trouble": "bad_updates"}.get(name, name): value for name, value in old.items()}
    objective = new.get("objective")
    if isinstance(objective, dict):
        asked = [f"{TARGETS[name]} >= {value}" for name, value in objective.items() if name in TARGETS and value > 0]
        new |= {"target": " and ".join([*filter(None, [new.get("target", "")]), *asked])} if asked else {}
        new["objective"] = {name: value for name, value in objective.items() if name not in TARGETS}
    return new


def _optimizer(old: Table) -> Table:
    """Takes what the optimizer read from an old table, one type with the fields of all optimizers and rates."""
    kind = OPTIMIZERS[old["name"]]
    known = old | {"beta1": old["momentum"], "rules": {"kind": _name(TensorRules)}}
    known["rules"] |= {"skip": old["skip"], "stacked": old["stacked"]}
    known["clip_before_sum"] &= old["clip"] > 0
    for field in dataclasses.fields(kind):
        if field.name in ("beta2", "eps") and not old[field.name]:
            known[field.name] = field.default  # zero stood for it
    return {"kind": _name(kind)} | {name: known[name] for name in _fields(kind, known)} | {"rate": _rate(old)}


def _rate(old: Mapping[str, Any]) -> Table:
    kind = RATES[old["decay"]]
    known = {name: old[was] for name, was in RATE_FIELDS.items() if was in old}
    known |= {"power": old.get("power"), "from_start": old.get("decay_from_start")}
    decay = {"kind": _name(kind)} | {name: known[name] for name in _fields(kind, known)}
    updates, share = old["warmup_updates"], old.get("warmup", 0.0)
    length = {"share": 0.0 if updates else share, "updates": updates, "start": old.get("warmup_start", 0.0)}
    return {"kind": _name(WarmUp), "then": decay} | length


def _dlrm(old: Table) -> Table:
    """The dot products were all that a DLRM had between tables and top: the field was their form."""
    form = old.get("interaction")
    return old | {"interaction": {"kind": _name(DotInteraction), "form": form}} if isinstance(form, str) else old


def _adafactor(old: Table) -> Table:
    """Adafactor had its rate, warm-up and decay as fields of its own."""
    if isinstance(old["rate"], dict):
        return old
    rate = _rate({name: value for name, value in old.items() if name != "decay_rate"})
    return {name: value for name, value in old.items() if name not in ("warmup_updates", "decay")} | {"rate": rate}


def _warm_up(table: Table) -> Table:
    """A warm-up without length is what it is put around."""
    return table if table["share"] or table["updates"] else table["then"]


def _renamed(kind: str) -> Callable[[Table], Table]:
    return lambda table: table | {"kind": kind}


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _fields(kind: Any, known: Mapping[str, Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name in known]


OLD_FORMS: dict[str, Callable[[Table], Table]] = {
    "": _recipe,
    "multipod.models.dlrm:Dlrm": _dlrm,
    "multipod.models.dlrm_tables:Tables": _renamed("multipod.models.dlrm_tables:TablePlacement"),
    "multipod.optim.adafactor:Adafactor": _adafactor,
    "multipod.optim.optimizer:Optimizer": _optimizer,
    "multipod.optim.rates:WarmUp": _warm_up,
    "multipod.recipe.trouble:Trouble": _renamed("multipod.recipe.bad_updates:BadUpdateRules"),
}
"""What makes today's form of a table, by its `kind` as it was written then."""
