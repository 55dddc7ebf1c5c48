"""What of ST-MoE can be tried without training: round-off, who sees the future, slots, sizes, equality of the paths."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from multipod.experiments.outcome import Claim, Section
from multipod.models.st_moe import StMoe, st_moe_large
from multipod.nn.experts.layer import ExpertSpec, SparseMlp, apply_to_slots
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
    claims = [
        Claim("M1: with bfloat16 logits, ten of 128 and one of 128.5, the largest probability changes by",
              f"{PAPER}, figure 2", round(fall, 4), "-0.358", abs(fall + 0.358) < 1e-3),
        Claim("M1: growth of a log-probability's largest error with each doubling of the logits' scale", PAPER,
              float(np.mean(growth)), "2 within 10 %", abs(np.mean(growth) - 2) < 0.2, SEEDS,
              float(np.ptp(growth))),
        Claim("M1: error with bfloat16 logits over that with float32 logits", PAPER, finer,
              "about 65,536 (half to twice)", 2**15 < finer < 2**17, SEEDS),
    ]  # fmt: skip
    rows = [(str(n), f"{one[0]:.2e}", f"{one[1]:.2e}", f"{one[2]:.2%}") for n, one in means.items()]
    head = ("scale of the logits", "bfloat16: largest error of a log-probability, mean", "float32", "second choices "
            "that change in bfloat16")  # fmt: skip
    return claims, Section("M1: round-off in the router", "Normal logits, 32 experts, 4,096 tokens.", head, rows)


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
    return _future_claims(shares), Section(
        "M6: who sees the future", text, ("routing", "past tokens that change"), rows
    )


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


def _future_claims(shares: dict[str, list[float]]) -> list[Claim]:
    def claim(text: str, name: str, threshold: str, holds: bool) -> Claim:
        several = shares[name]
        source, mean, spread = "arXiv:2202.08906 and 2106.05974", float(np.mean(several)), float(np.ptp(several))
        return Claim(f"M6: {text}", source, mean, threshold, holds, SEEDS, spread)

    seeing = [name for name in ("top-1, choices", "top-2, tokens", "top-2, dropless") if max(shares[name])]
    confident, choices = "top-1, confident, capacity 0.5", "top-2, choices"
    return [
        claim("share of past tokens that top-1 changes when the future does", "top-1, choices", "0", not seeing),
        claim("the same of batch-prioritised routing", confident, "above 0", min(shares[confident]) > 0),
        claim("the same of top-2 by choices at a capacity of 1.25", choices, "above 0", min(shares[choices]) > 0),
        claim("the same of top-2 in the order of tokens", "top-2, tokens", "0", max(shares["top-2, tokens"]) == 0),
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
    low, high = ratios[0.25], ratios[1.25]
    holds = min(min(several) for several in ratios.values()) >= 1 - 1e-6 and min(low) > 1.2 and max(high) < 1.02
    claim = Claim(
        "M7: sum of the probabilities that are served, batch-prioritised over plain order, at a capacity of 0.25",
        "arXiv:2106.05974",
        float(np.mean(low)),
        "above 1.2; 1.00 at 1.25, and never below 1",
        holds,
        SEEDS,
        float(np.ptp(low)),
    )
    return [claim], Section(
        "M7: the confident first", "1,024 random tokens, 8 experts, top-1.", ("capacity", "ratio"), rows
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
        claims.append(
            Claim(
                f"M11: parameters of {name}",
                f"{PAPER}, table 11",
                count,
                f"{published:.4g}",
                abs(count - published) < within,
            )
        )
        flops, active = model.flops(512, 114), model.parameters(served=model.routing.capacity)
        rows.append((name, f"{count:,}", f"{active:,}", f"{share:.1%}", f"{flops:.3g}"))
    head = ("model", "parameters", "active at 1.25 slots a token", "in experts", "FLOPs of a sequence, forward")
    return claims, Section(
        "M11: sizes", "From shapes alone. Published: 645e9 and 20.2e12 FLOPs a sequence.", head, rows
    )


def work() -> Part:
    """M12."""
    tokens, width, hidden, experts = 2048, 64, 128, 8
    counts, times = {}, {}
    for capacity in (1.0, 2.0, 4.0):
        for chosen in (1, 2):
            routing = Routing(experts, chosen, group=1024, capacity=capacity, second="all")
            slots = 2 * routing.slots(train=True)
            spec = ExpertSpec(routing, hidden)
            weights = SparseMlp(spec, width, nnx.Rngs(0)).experts.weights()
            x = jnp.ones((experts, slots, width))
            compiled = (
                jax.jit(partial(apply_to_slots, spec, None))
                .lower(weights, x, jnp.zeros((experts, slots), int))
                .compile()
            )
            counts[capacity, chosen] = float((compiled.cost_analysis() or {})["flops"]) / slots
            times[capacity, chosen] = _slot_time_s(spec, tokens, width)
    ratio = max(counts.values()) / min(counts.values())
    extra = max(times[c, 2] / times[c, 1] - 1 for c in (1.0, 2.0, 4.0))
    rising = all(times[1.0, n] < times[2.0, n] < times[4.0, n] for n in (1, 2))
    claims = [
        Claim(
            "M12: operations of the experts over slots, largest over smallest of six settings",
            PAPER,
            round(ratio, 4),
            "1: proportional to the slots, whatever n",
            ratio < 1.001,
        ),
        Claim(
            "M12: time that n = 2 adds to n = 1, most of three capacities (time rises with capacity: "
            f"{'yes' if rising else 'no'})",
            PAPER,
            round(extra, 2),
            "below 0.3, rising",
            extra < 0.3 and rising,
        ),
    ]
    rows = [(f"{c}", str(n), f"{1e3 * s:.2f}") for (c, n), s in times.items()]
    text = "One layer with slots, 2,048 tokens in groups of 1,024, 8 experts, 64 features, 128 hidden."
    return claims, Section("M12: work against capacity", text, ("capacity", "choices", "ms, forward"), rows)


def _slot_time_s(spec: ExpertSpec, tokens: int, width: int) -> float:
    """Median of a forward pass by slots, on one device."""
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    graph, params, rest = nnx.split(SparseMlp(spec, width, nnx.Rngs(0)), nnx.Param, ...)

    def local(params, x):  # type: ignore[no-untyped-def]
        module = nnx.merge(graph, params, rest)
        module.train()
        return module(x, axis="expert", key=jax.random.key(0))[0]

    whole = PartitionSpec()
    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(tokens, width)), jnp.float32)
    taken = []
    for _ in range(30):
        start = time.perf_counter()
        jax.block_until_ready(f(params, x))
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
    claim = Claim(
        "M14: one-hot products, sorting, and experts over 1, 2 and 4 devices: largest relative difference of outputs "
        f"and gradients (the same tokens dropped: {'yes' if same else 'no'})",
        PAPER,
        worst,
        "1e-5",
        worst < 1e-5 and same,
    )
    head = ("routing", "largest difference", "tokens that reach no expert", "same everywhere")
    return [claim], Section("M14: the paths agree", "512 tokens in groups of 64, 8 experts.", head, rows)


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
