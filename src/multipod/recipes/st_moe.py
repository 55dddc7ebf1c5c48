"""ST-MoE: the published sizes, to be looked at and planned, and a small one that trains on two cores."""

from multipod.data.span_corruption import SpanCorruption
from multipod.data.stdlib_text import StdlibText
from multipod.metrics.sparse import SparseTokens
from multipod.models.st_moe import StMoe, small_st_moe, st_moe_large
from multipod.optim.adafactor import Adafactor
from multipod.optim.rates import Rsqrt, WarmUp
from multipod.recipe.recipe import Recipe


def st_moe_small() -> Recipe:
    """Sparse encoder-decoder, 8 experts, span corruption of the standard library. Needs the extra `text`."""
    data = SpanCorruption(length=64, text=StdlibText(vocab=1024), sentinels=16)
    return Recipe(
        name="st-moe-small",
        model=small_st_moe(data.vocab),
        data=data,
        objective=SparseTokens(),
        optimizer=Adafactor(WarmUp(Rsqrt(0.05), updates=100)),
        batch=64,
        updates=900,
        evaluate_every=300,
        evaluation_batch=256,
        checkpoint_every=300,
    )


def st_moe_l() -> Recipe:
    """ST-MoE-L, 4.1 billion parameters, as published: 500,000 updates of a million tokens. For `show` and `plan`."""
    return _published("st-moe-l", st_moe_large(dtype="bfloat16"), updates=500_000)


def st_moe_32b() -> Recipe:
    """ST-MoE-32B, 269 billion parameters, as published: 1.5 trillion tokens. For `show` and `plan`."""
    return _published("st-moe-32b", StMoe(dtype="bfloat16"), updates=1_430_000)


def _published(name: str, model: StMoe, updates: int) -> Recipe:
    """512 + 114 tokens a sequence, a million source tokens an update; the text is not the published one."""
    return Recipe(
        name=name,
        model=model,
        data=SpanCorruption(length=512, text=StdlibText(vocab=4096), sentinels=model.vocab - 4096),
        objective=SparseTokens(z=1e-4),
        optimizer=Adafactor(WarmUp(Rsqrt(0.01), updates=10_000)),
        batch=2048,
        updates=updates,
        checkpoint_every=1000,
    )
