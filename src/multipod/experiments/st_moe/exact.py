"""What of ST-MoE can be tried without training: round-off, who sees the future, slots, sizes, equality of the paths."""

import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from multipod.experiments.outcome import Claim, Section
from multipod.models.st_moe import StMoe, st_moe_large
from multipod.nn.experts.layer import ExpertSpec, SparseMlp
from multipod.nn.experts.routing import Routing, choose, ranks

PAPER = "arXiv:2202.08906"
SEEDS = (0, 1, 2)
Part = tuple[list[Claim], Section]


def round_off() -> Part:
    """M1."""
    example = np.full(11, 128.0)
    example[0] = 128.5
    fall = float(np.exp(_log_softmax(_rounded(example)) - _log_softmax(example))[0] - 1)
    errors = {2**power: [_errors(2.0**power, seed) for seed in SEEDS] for power in range(8)}
    means = {scale: np.mean(several, 0) for scale, several in errors.items()}
    growth = [means[2 * scale][0] / means[scale][0] for scale in list(means)[:-1]]
    finer = float(np.mean([coarse / fine for coarse, fine, _ in means.values()]))
    claims = round_off_claims(fall, growth, finer)
    rows = [(str(n), f"{one[0]:.2e}", f"{one[1]:.2e}", f"{one[2]:.2%}") for n, one in means.items()]
    head = ("scale of the logits", "bfloat16: largest error of a log-probability, mean", "float32", "second choices "
            "that change in bfloat16")  # fmt: skip
    return claims, Section("M1: round-off in the router", "Normal logits, 32 experts, 4,096 tokens.", head, rows)


def round_off_claims(fall: float, growth: list[float], finer: float) -> list[Claim]:
    """M1, from the change of a probability, growths of the error, and its size over that with float32."""
    return [
        Claim("M1: with bfloat16 logits, ten of 128 and one of 128.5, the largest probability changes by",
              f"{PAPER}, figure 2", round(fall, 4), "-0.358", abs(fall + 0.358) < 1e-3,
              fails_if="rounding 128.5 to bfloat16 does not take the largest probability down by a third"),
        Claim("M1: growth of a log-probability's largest error with each doubling of the logits' scale", PAPER,
              float(np.mean(growth)), "2 within 10 %", bool(abs(np.mean(growth) - 2) < 0.2), SEEDS,
              float(np.ptp(growth)), fails_if="errors do not grow with the logits, so that a z-loss spares none"),
        Claim("M1: error with bfloat16 logits over that with float32 logits", PAPER, finer,
              "about 65,536 (half to twice)", 2**15 < finer < 2**17, SEEDS,
              fails_if="float32 in the router does not spare the 16 bits that bfloat16 lacks"),
    ]  # fmt: skip


def _rounded(x: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32), np.float64)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


def _errors(scale: float, seed: int) -> tuple[float, float, float]:
    """Errors of bfloat16 and float32 logits against float64, and the share of second choices that bfloat16 changes."""
    logits = scale * np.random.default_rng(seed).normal(size=(4096, 32))
    coarse, fine = _rounded(logits), logits.astype(np.float32).astype(np.float64)
    errors = [float(np.abs(_log_softmax(one) - _log_softmax(logits)).max(-1).mean()) for one in (coarse, fine)]
    second = [np.argsort(-one, -1, kind="stable")[:, 1] for one in (logits, coarse)]
    return errors[0], errors[1], float((second[0] != second[1]).mean())


def future() -> Part:
    """M6: who sees the future."""
    shares = {name: [_changed(changes, seed) for seed in SEEDS] for name, changes in ROUTINGS.items()}
    rows = [(name, f"{np.mean(several):.1%}") for name, several in shares.items()]
    text = "256 random tokens in one group, 8 experts. The second half is replaced: how many of the first half change?"
    return future_claims(shares), Section("M6: who sees the future", text, ("routing", "past tokens that change"), rows)


ROUTINGS: dict[str, dict[str, Any]] = {
    "top-1, choices": {"chosen": 1},
    "top-2, choices": {},
    "top-2, choices, capacity 0.5": {"capacity": 0.5},
    "top-2, choices, capacity 2": {"capacity": 2.0},
    "top-1, confident, capacity 0.5": {"chosen": 1, "order": "confident", "capacity": 0.5},
    "top-2, tokens": {"order": "tokens"},
    "top-2, dropless": {"dropless": True},
}
"""What M6 tries: fields of `Routing` that differ from the experiment's own."""


def future_claims(shares: dict[str, list[float]]) -> list[Claim]:
    """M6, from the shares of past tokens that change, by routing and seed."""

    def claim(text: str, name: str, threshold: str, holds: bool, fails_if: str) -> Claim:
        several = shares[name]
        source, mean, spread = "arXiv:2202.08906 and 2106.05974", float(np.mean(several)), float(np.ptp(several))
        return Claim(f"M6: {text}", source, mean, threshold, holds, SEEDS, spread, fails_if=fails_if)

    seeing = [name for name in ("top-1, choices", "top-2, tokens", "top-2, dropless") if max(shares[name])]
    confident, choices = "top-1, confident, capacity 0.5", "top-2, choices"
    return [
        claim(
            "share of past tokens that top-1 changes when the future does",
            "top-1, choices",
            "0",
            not seeing,
            "a causal routing lets a later token push an earlier one out",
        ),
        claim(
            "the same of batch-prioritised routing",
            confident,
            "above 0",
            min(shares[confident]) > 0,
            "priority by confidence does not depend on tokens to come",
        ),
        claim(
            "the same of top-2 by choices at a capacity of 1.25",
            choices,
            "above 0",
            min(shares[choices]) > 0,
            "a later first choice never takes the place of an earlier second one",
        ),
        claim(
            "the same of top-2 in the order of tokens",
            "top-2, tokens",
            "0",
            max(shares["top-2, tokens"]) == 0,
            "serving token by token still depends on tokens to come",
        ),
    ]


def _changed(changes: dict[str, Any], seed: int) -> float:
    routing = replace(Routing(8, group=256, second="all"), **changes)
    logits = np.random.default_rng(seed).normal(size=(2, 1, 256, 8)).astype(np.float32)
    logits[1, :, :128] = logits[0, :, :128]
    slots = 256 * 2 if routing.dropless else routing.slots(train=True)
    kept = [np.asarray(ranks(choose(jnp.asarray(one), routing, train=True), routing.order)) < slots for one in logits]
    return float((kept[0] != kept[1])[0, :128].any(-1).mean())


def confident() -> Part:
    """M7."""
    factors = (0.25, 0.5, 0.75, 1.0, 1.25)
    ratios = {factor: [_kept_ratio(factor, seed) for seed in SEEDS] for factor in factors}
    rows = [(f"{factor}", f"{np.mean(several):.2f}") for factor, several in ratios.items()]
    return [confident_claim(ratios)], Section(
        "M7: the confident first", "1,024 random tokens, 8 experts, top-1.", ("capacity", "ratio"), rows
    )


def confident_claim(ratios: dict[float, list[float]]) -> Claim:
    """M7, from served probability, batch-prioritised over plain, by capacity and seed."""
    low, high = ratios[0.25], ratios[1.25]
    holds = min(min(several) for several in ratios.values()) >= 1 - 1e-6 and min(low) > 1.2 and max(high) < 1.02
    return Claim(
        "M7: sum of the probabilities that are served, batch-prioritised over plain order, at a capacity of 0.25",
        "arXiv:2106.05974",
        float(np.mean(low)),
        "above 1.2; 1.00 at 1.25, and never below 1",
        holds,
        SEEDS,
        float(np.ptp(low)),
        fails_if="serving the confident first serves no more probability where slots are few, or less anywhere",
    )


def _kept_ratio(factor: float, seed: int) -> float:
    logits = jnp.asarray(np.random.default_rng(seed).normal(size=(1, 1024, 8)), jnp.float32)
    sums = []
    for order in ("confident", "choices"):
        routing = Routing(8, 1, group=1024, capacity=factor, order=order)
        choices = choose(logits, routing, train=True)
        kept = np.asarray(ranks(choices, order)) < routing.slots(train=True)
        sums.append(float(np.where(kept, choices.gate, 0).sum()))
    return sums[0] / sums[1]


def sizes() -> Part:
    """M11."""
    claims, rows = [], []
    for name, model, published, within in (
        ("ST-MoE-L", st_moe_large(), 4.1e9, 0.05e9),
        ("ST-MoE-32B", StMoe(), 269e9, 0.5e9),
    ):
        shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
        count = sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in jax.tree.leaves(shapes))
        share = 1 - model.parameters(served=0) / count
        claims.append(size_claim(name, count, published, within))
        flops, active = model.flops(512, 114), model.parameters(served=model.routing.capacity)
        rows.append((name, f"{count:,}", f"{active:,}", f"{share:.1%}", f"{flops:.3g}"))
    head = ("model", "parameters", "active at 1.25 slots a token", "in experts", "FLOPs of a sequence, forward")
    return claims, Section(
        "M11: sizes", "From shapes alone. Published: 645e9 and 20.2e12 FLOPs a sequence.", head, rows
    )


def size_claim(name: str, count: int, published: float, within: float) -> Claim:
    """M11, from the parameters counted."""
    return Claim(
        f"M11: parameters of {name}", f"{PAPER}, table 11", count, f"{published:.4g} within {within:.2g}",
        abs(count - published) < within,
        fails_if="a layer of the model has another size or number than the published one",
    )  # fmt: skip


def work() -> Part:
    """M12."""
    tokens, width, hidden, experts = 2048, 64, 128, 8
    operations, times, served = {}, {}, {}
    for capacity in CAPACITIES:
        for chosen in (1, 2):
            routing = Routing(experts, chosen, group=1024, capacity=capacity, second="all")
            by_slots = _Layer(ExpertSpec(routing, hidden), tokens, width, "expert")
            operations[capacity, chosen] = by_slots.operations()
            times[capacity, chosen] = by_slots.seconds()
            served[capacity, chosen] = _Layer(ExpertSpec(routing, hidden), tokens, width, None).seconds()
    rows = [
        (f"{c}", str(n), f"{operations[c, n] / 1e6:.1f}", f"{1e3 * times[c, n]:.2f}", f"{1e3 * served[c, n]:.2f}")
        for c, n in times
    ]
    text = (
        "One layer, 2,048 tokens in groups of 1,024, 8 experts, 64 features, 128 hidden; forward. Operations are those "
        "that XLA counts in the whole compiled layer by slots, router, dispatch and combining included, which is the "
        "path over devices. On one device a CPU takes the path that sorts, whose work goes by the choices that are "
        "served and not by slots: there a second choice can cost up to as much as the first."
    )
    head = ("capacity", "choices", "million operations, by slots", "ms, by slots", "ms, by sorting")
    return work_claims(operations, times), Section("M12: work against capacity", text, head, rows)


CAPACITIES = (1.0, 2.0, 4.0)


def work_claims(operations: dict[tuple[float, int], float], times: dict[tuple[float, int], float]) -> list[Claim]:
    """M12, from the operations and seconds of the whole layer by capacity and choices."""
    more = max(operations[c, 2] / operations[c, 1] for c in CAPACITIES)
    slots = min(operations[CAPACITIES[-1], n] / operations[CAPACITIES[0], n] for n in (1, 2))
    extra = max(times[c, 2] / times[c, 1] - 1 for c in CAPACITIES)
    rising = all(times[1.0, n] < times[2.0, n] < times[4.0, n] for n in (1, 2))
    return [
        Claim("M12: operations of the whole layer by slots, n = 2 over n = 1, most of three capacities", PAPER, more,
              "at most 1.1", more <= 1.1,
              fails_if="choosing two experts costs more than routing: work goes by choices and not by slots"),
        Claim("M12: operations of the whole layer by slots, capacity 4 over capacity 1, lesser of n = 1 and 2", PAPER,
              slots, "at least 3", slots >= 3,
              fails_if="most of the layer's work does not grow with the slots"),
        Claim("M12: time that n = 2 adds to n = 1 by slots, most of three capacities (time rises with capacity: "
              f"{'yes' if rising else 'no'})", PAPER, round(extra, 2), "below 0.3, rising", extra < 0.3 and rising,
              fails_if="dispatching a second choice takes time of its own, or slots cost none"),
    ]  # fmt: skip


class _Layer:
    """A layer's forward pass: by slots on a mesh of one device with `axis`, by the path of one device without."""

    def __init__(self, spec: ExpertSpec, tokens: int, width: int, axis: str | None) -> None:
        graph, params, rest = nnx.split(SparseMlp(spec, width, nnx.Rngs(0)), nnx.Param, ...)
        where = {"axis": axis} if axis else {}

        def local(params, x):  # type: ignore[no-untyped-def]
            module = nnx.merge(graph, params, rest)
            module.train()
            return module(x, key=jax.random.key(0), **where)[0]

        x = jnp.asarray(np.random.default_rng(0).normal(size=(tokens, width)), jnp.float32)
        if axis:
            mesh = jax.make_mesh((1,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
            whole = PartitionSpec()
            local = jax.shard_map(local, mesh=mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False)
        self._given = params, x
        self._compiled = jax.jit(local).lower(*self._given).compile()

    def operations(self) -> float:
        """Returns the operations that XLA counts, without those of foreign kernels."""
        return float((self._compiled.cost_analysis() or {})["flops"])

    def seconds(self) -> float:
        """The median of 25 passes."""
        taken = []
        for _ in range(30):
            start = time.perf_counter()
            jax.block_until_ready(self._compiled(*self._given))
            taken.append(time.perf_counter() - start)
        return float(np.median(taken[5:]))


def equality() -> Part:
    """M14."""
    rows, worst, same = [], 0.0, True
    cases: dict[str, dict[str, Any]] = {
        "top-2 by choices": {},
        "top-2 by tokens": {"order": "tokens"},
        "confident": {"order": "confident"},
        "threshold": {"second": "threshold"},
        "random": {"second": "random"},
        "top-1": {"chosen": 1},
        "dropless": {"dropless": True},
    }
    for name, changes in cases.items():
        routing = replace(Routing(8, group=64, second="all", capacity=1.0), **changes)
        plain = _layer(ExpertSpec(routing, 48, path="einsum"), 0)
        others = [_layer(ExpertSpec(routing, 48), devices) for devices in (0, 1, 2, 4)]
        error = max(_difference(plain[:2], other[:2]) for other in others)
        equal = all(np.allclose(plain[2], other[2], atol=1e-7) for other in others)
        worst, same = max(worst, error), same and equal
        rows.append((name, f"{error:.1e}", f"{float(plain[2][0]):.1%}", "yes" if equal else "no"))
    head = ("routing", "largest difference", "tokens that reach no expert", "same everywhere")
    return [equality_claim(worst, same)], Section(
        "M14: the paths agree", "512 tokens in groups of 64, 8 experts.", head, rows
    )


def equality_claim(worst: float, same: bool) -> Claim:
    """M14, from the largest difference of any path, and whether all dropped the same tokens."""
    return Claim(
        "M14: one-hot products, sorting, and experts over 1, 2 and 4 devices: largest relative difference of outputs "
        f"and gradients (the same tokens dropped: {'yes' if same else 'no'})",
        PAPER,
        worst,
        "1e-5",
        worst < 1e-5 and same,
        fails_if="a path computes another layer, or drops other tokens",
    )


def _layer(spec: ExpertSpec, devices: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output, gradient by the tokens, and shares of dropped and served. `devices` 0: without a mesh."""
    graph, params, rest = nnx.split(SparseMlp(spec, 32, nnx.Rngs(1)), nnx.Param, ...)
    params = jax.tree.map(lambda leaf: 3 * leaf, params)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(512, 32)), jnp.float32)
    axis = ("expert",) if devices else ()

    def local(params, x):  # type: ignore[no-untyped-def]
        def total(x):  # type: ignore[no-untyped-def]
            module = nnx.merge(graph, params, rest)
            module.train()
            y, report = module(x, axis=axis, key=jax.random.key(5))
            return jnp.sin(3 * y).sum(), (y, report)

        gradient, (y, report) = jax.grad(total, has_aux=True)(x)
        shares = jnp.stack([report[name] for name in ("dropped", "served_first")])
        return y, gradient, jax.lax.pmean(shares, axis) if axis else shares

    if not devices:
        return tuple(map(np.asarray, jax.jit(local)(params, x)))  # type: ignore[return-value]
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    whole, split = PartitionSpec(), PartitionSpec("expert")
    specs = nnx.map_state(lambda path, _: whole if path[0] == "router" else split, params)
    f = jax.shard_map(local, mesh=mesh, in_specs=(specs, split), out_specs=(split, split, whole), check_vma=False)
    return tuple(map(np.asarray, jax.jit(f)(params, x)))  # type: ignore[return-value]


def _difference(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> float:
    return max(float(np.abs(one - other).max() / np.abs(one).max()) for one, other in zip(a, b, strict=True))
