"""What goes with what: the one table of features that exclude each other, each with its reason and what to do instead.

Every check reads it, `multipod show` names what a layout rules out, and `docs/layouts-matrix.md` is printed from it.
Sizes that do not divide are not here: they depend on numbers, and the checks of a batch and of a model say them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from multipod.errors import LayoutError
from multipod.layout.split import UNSPLIT, ModelSplit, PipelineSplit
from multipod.layout.sync import COMBINATIONS, PLAIN, Sync


@dataclass(frozen=True)
class LayoutUse:
    """A layout, with what else of a recipe and of its run may not go with it.

    Attributes:
      split, pipeline, sync, failed: of the layout.
      accumulate: as of the recipe.
      clip: of the optimizer, a limit for the norm of the gradient of the whole model.
      clip_before_sum: of the optimizer, the same for each device's own gradient.
      sparse: of the optimizer, updates of touched rows alone.
      bad_updates: what is done about updates with bad numbers; "" if nothing is.
      late_warmup: updates for which an asynchronous pipeline is synchronous at first.
      layer_decay: of the optimizer, rates that fall from layer to layer.
      ema: whether the weights are averaged.
      batch_norm: whether the model has statistics of the batch.
      survives: whether the run goes on without lost processes (`launch --survive`).
      converts: whether its state is taken over from another layout, or by one (`--from`).
    """

    split: ModelSplit = UNSPLIT
    pipeline: PipelineSplit | None = None
    sync: Sync = PLAIN
    failed: tuple[tuple[int, int], ...] = ()
    accumulate: int = 1
    clip: float = 0.0
    clip_before_sum: bool = False
    sparse: bool = False
    bad_updates: str = ""
    late_warmup: int = 0
    layer_decay: float | None = None
    ema: bool = False
    batch_norm: bool = False
    survives: bool = False
    converts: bool = False


@dataclass(frozen=True)
class Feature:
    """Something that a layout, a recipe or a run can have.

    Attributes:
      title: in the field's words, for the matrix.
      setting: how it was asked for, as text; "" where it was not.
      plain: what there is where nothing else is asked for.
    """

    title: str
    setting: Callable[[LayoutUse], str]
    plain: bool = False


def _axis(name: str) -> Callable[[LayoutUse], str]:
    return lambda c: f"layout.{name}={size}" if (size := c.split.sizes.get(name, 1)) > 1 else ""


def _images(c: LayoutUse) -> str:
    return f"layout.spatial={'x'.join(map(str, c.split.spatial))}" if c.split.spatial_devices > 1 else ""


def _sum(wanted: Callable[[Sync], bool]) -> Callable[[LayoutUse], str]:
    return lambda c: f"layout.gradient_sum={c.sync.gradient_sum}" if wanted(c.sync) else ""


def _sync(name: str) -> Callable[[LayoutUse], str]:
    return lambda c: f"layout.{name}={_spelled(value)}" if (value := getattr(c.sync, name)) else ""


def _stages(c: LayoutUse) -> str:
    return f"layout.stage={c.pipeline.stages}" if c.pipeline and c.pipeline.stages > 1 else ""


def _schedule(asynchronous: bool) -> Callable[[LayoutUse], str]:
    def setting(c: LayoutUse) -> str:
        fits = c.pipeline and c.pipeline.stages > 1 and c.pipeline.asynchronous == asynchronous
        return f"layout.schedule={c.pipeline.schedule}" if c.pipeline and fits else ""

    return setting


def _of_run(field: str, name: str, none: object) -> Callable[[LayoutUse], str]:
    return lambda c: f"{name}={_spelled(value)}" if (value := getattr(c, field)) != none else ""


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


FEATURES: dict[str, Feature] = {
    "spatial": Feature("spatial (images split over devices)", _images),
    "model": Feature("tensor parallel (`model`)", _axis("model")),
    "expert": Feature("expert parallel (`expert`)", _axis("expert")),
    "pipeline": Feature("pipeline parallel (`stage`)", _stages),
    "synchronous": Feature("a pipeline that drains (1f1b, gpipe, ...)", _schedule(False)),
    "asynchronous": Feature("a pipeline that never drains (pipemare, pipedream)", _schedule(True)),
    "unsharded": Feature("no sharding", lambda c: "" if c.sync.shards_update else "no sharding", plain=True),
    "zero1": Feature("ZeRO-1 (`update`)", lambda c: "layout.shard_update=true" if c.sync.zero1 else ""),
    "fsdp": Feature("FSDP, ZeRO-3 (`weights`)", lambda c: "layout.shard_weights=true" if c.sync.fsdp else ""),
    "sum": Feature("gradients summed", _sum(lambda s: not s.combines), plain=True),
    "not xla": Feature("a sum other than xla", _sum(lambda s: s.gradient_sum != "xla")),
    "adasum": Feature("Adasum, any form", _sum(lambda s: s.combines)),
    "local state": Feature("Adasum of changes (adasum, adasum-rows)", _sum(lambda s: s.local_state)),
    "adasum-rows": Feature("Adasum between rows", _sum(lambda s: s.gradient_sum == "adasum-rows")),
    "report": Feature("report of orthogonality", _sync("report_orthogonality")),
    "gather": Feature("weights gathered in another type (`gather`)", _sync("gather_dtype")),
    "wire": Feature("gradients summed in another type (`wire`)", _sync("sum_dtype")),
    "buckets": Feature("gradient buckets (`buckets`)", _sync("bucket_bytes")),
    "failed": Feature("failed chips (`--fail`)", lambda c: "failed chips" if c.failed else ""),
    "accumulate": Feature("gradient accumulation", _of_run("accumulate", "accumulate", 1)),
    "clip": Feature("gradient clipping", _of_run("clip", "optimizer.clip", 0.0)),
    "clip before": Feature("clipping on each device", _of_run("clip_before_sum", "optimizer.clip_before_sum", False)),
    "sparse": Feature("updates of touched rows (`sparse`)", _of_run("sparse", "optimizer.sparse", False)),
    "bad updates": Feature("a bad-update policy (`bad_updates`)", _of_run("bad_updates", "bad_updates.action", "")),
    "warmup": Feature("PipeMare's synchronous start", _of_run("late_warmup", "pipemare.warmup", 0)),
    "layer decay": Feature(
        "rates that fall by layer (`layer_decay`)", _of_run("layer_decay", "optimizer.layer_decay", None)
    ),
    "ema": Feature("moving average of the weights (`ema`)", _of_run("ema", "ema", False)),
    "batch norm": Feature("batch norm", _of_run("batch_norm", "batch norm", False)),
    "survive": Feature("survival in the process (`--survive`)", lambda c: "--survive" if c.survives else ""),
    "convert": Feature("start from another layout (`--from`)", lambda c: "another layout" if c.converts else ""),
}
"""All features by a short name, in the order of the matrix."""


@dataclass(frozen=True)
class Conflict:
    """Features that exclude each other: each of `these` with each of `those`.

    Attributes:
      these, those: names in `FEATURES`.
      reason: why, after a colon.
      remedy: what to do instead, a sentence.
    """

    these: tuple[str, ...]
    those: tuple[str, ...]
    reason: str
    remedy: str

    def parts(self, one: str, other: str) -> bool:
        """Whether it keeps these two features apart."""
        return (one in self.these and other in self.those) or (other in self.these and one in self.those)

    def text(self, use: LayoutUse) -> str:
        """The error for a layout in use that has both sides."""
        sides = (" and ".join(_settings(names, use)) for names in (self.these, self.those))
        return f"{' with '.join(sides)}: {self.reason}. {self.remedy}"


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        ("report",), ("sum",),
        "it is a sum and knows nothing of angles",
        f"Take {', '.join(COMBINATIONS)}, or leave the report out.",
    ),
    Conflict(
        ("adasum-rows",), ("failed",),
        "the mesh is a single row then, of which this is the mean",
        "Take adasum, which works with any number of chips.",
    ),
    Conflict(
        ("adasum",), ("fsdp", "model", "expert", "pipeline"),
        "Adasum needs the angles of whole tensors on each device, which those split",
        "Take a sum, or split the batch and images only.",
    ),
    Conflict(
        ("adasum",), ("gather", "wire", "buckets"),
        "Adasum has no buckets and types of its own",
        "Leave bucket_bytes, sum_dtype and gather_dtype out.",
    ),
    Conflict(
        ("gather",), ("unsharded",),
        "nothing is gathered",
        "Set shard_update=true (zero1) or shard_weights=true (fsdp), or leave it out.",
    ),
    Conflict(
        ("pipeline",), ("spatial", "expert"),
        "inside a stage only model splits anything. Images are split for models with batch norm, which no pipeline "
        "takes, and experts trade tokens with data devices, for which no pass waits",
        "Give these devices to model, to stage or to the batch.",
    ),
    Conflict(
        ("pipeline",), ("zero1", "fsdp", "gather", "wire", "buckets"),
        "a stage updates its own weights, which is a share already, and each data device all of them",
        "Take more stages, or model, for memory, and leave these out.",
    ),
    Conflict(
        ("asynchronous",), ("not xla",),
        "its stages sum at different moments, and only xla waits for nobody else",
        "Take xla, or 1f1b.",
    ),
    Conflict(
        ("pipeline",), ("accumulate",),
        "micro-batches are that already",
        "Set accumulate=1 and layout.micro_batches.",
    ),
    Conflict(
        ("pipeline",), ("bad updates",),
        "no stage sees the whole gradient that it judges",
        "Take stop, without a spike: it then ends at a loss that is not finite.",
    ),
    Conflict(
        ("warmup",), ("synchronous",),
        "it is synchronous from first to last",
        "Leave it out.",
    ),
    Conflict(
        ("pipeline",), ("clip",),
        "limits the norm over the whole model, and no stage of a pipeline sees it",
        "Set optimizer.clip=0.",
    ),
    Conflict(
        ("pipeline",), ("batch norm",),
        "in a pipeline that would be a micro-batch, so the model would learn something else than unsplit, and "
        "something else with every number of micro-batches",
        "Take a model with group or layer norm, or split images or the batch instead of layers (layout.spatial, "
        "layout.mesh).",
    ),
    Conflict(
        ("fsdp",), ("clip before",),
        "gradients are summed where they are made, so clip_before_sum has none to clip",
        "Set one of them to false.",
    ),
    Conflict(
        ("adasum", "zero1", "fsdp", "accumulate"), ("sparse",),
        "that needs gradients of whole tables",
        "Set one or the other.",
    ),
    Conflict(
        ("pipeline",), ("layer decay",),
        "a stage cannot tell how many layers are above its own",
        "Leave optimizer.layer_decay out, or split the model by layout.model.",
    ),
    Conflict(
        ("pipeline", "local state", "sparse"), ("ema",),
        "the average is taken of whole weights by one optimizer, and there each stage or chip has its own, or touched "
        "rows alone are seen",
        "Set ema=none, or leave the other out.",
    ),
    Conflict(
        ("survive",), ("pipeline",),
        "a pipeline is not cut anew around a lost process",
        "Leave out --survive (--restarts works).",
    ),
    Conflict(
        ("survive",), ("local state",),
        "every device keeps an optimizer state, which cannot be handed on",
        "Leave out --survive (--restarts works), or take another sum.",
    ),
    Conflict(
        ("local state",), ("convert",),
        "each device has an optimizer state of its own, which no other layout can take over",
        "Go on in the layout that it has.",
    ),
)  # fmt: skip
"""Which features exclude each other. What stands in no row goes together, and is tested so or was never tried."""


def conflicts(use: LayoutUse) -> tuple[str, ...]:
    """All that is wrong with a layout in use, a sentence each."""
    present = {name for name, feature in FEATURES.items() if feature.setting(use)}
    return tuple(
        conflict.text(use)
        for conflict in CONFLICTS
        if present.intersection(conflict.these) and present.intersection(conflict.those)
    )


def check_compatible(use: LayoutUse) -> None:
    """Refuses what does not go together.

    Raises:
      LayoutError: all that is wrong, a line each.
    """
    wrong = conflicts(use)
    if wrong:
        raise LayoutError("\n".join(wrong))


def ruled_out(use: LayoutUse) -> Iterator[tuple[str, str]]:
    """(settings, titles of features that do not go with them), for each row of the table that it meets."""
    for conflict in CONFLICTS:
        for these, those in ((conflict.these, conflict.those), (conflict.those, conflict.these)):
            settings = _settings([name for name in these if not FEATURES[name].plain], use)
            if settings:
                yield " and ".join(settings), ", ".join(FEATURES[name].title for name in those)


def conflict_of(one: str, other: str) -> Conflict:
    """The row by which two features exclude each other.

    Raises:
      StopIteration: they go together.
    """
    return next(conflict for conflict in CONFLICTS if conflict.parts(one, other))


def _settings(names: Iterable[str], use: LayoutUse) -> list[str]:
    return list(filter(None, (FEATURES[name].setting(use) for name in names)))
