"""A sparse feed-forward layer, forward and backward, against its peers and the dense layer of the same work.

    python benchmarks/experts.py [--cases 256:8 256:64 512:8 512:64] [--tokens 4096] [--repeats 5] [--cores 1]

Top-2, ReLU, two matrices, no router losses. Peers: a dense layer in JAX and in PyTorch, one-hot products with slots
(ours, `path="einsum"`; groups of 1,024, slots for 1.25 times all choices, of which few are dropped),
`jax.lax.ragged_dot`, and PyTorch's sort with one product an expert. All take turns in one process, which is kept to
`--cores` cores, and each has that many threads: nobody's threads wait for cores that another's hold. Shown: medians of
wall and CPU milliseconds, the ratio to the dense layer of the same framework and type, and what a step takes of
resident memory at its peak, in a process of its own.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import util

from multipod import runtime

runtime.prepare(1)  # before JAX is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import machine  # noqa: E402
import memory  # noqa: E402
import numpy as np  # noqa: E402

from multipod.nn.experts import einsum, grouped, sorting  # noqa: E402
from multipod.nn.experts.routing import Choices, Routing, choose  # noqa: E402

CHOSEN = 2
Step = Callable[[], object]


def numbers(tokens: int, width: int, experts: int) -> list[np.ndarray]:
    """Tokens, router and the two stacks of kernels."""
    rng = np.random.default_rng(0)
    shapes = (tokens, width), (width, experts), (experts, width, 4 * width), (experts, 4 * width, width)
    scales = 1, width**-0.5, width**-0.5, (4 * width) ** -0.5
    return [np.float32(scale * rng.normal(size=shape)) for scale, shape in zip(scales, shapes, strict=True)]


def routed(x: jax.Array, router: jax.Array, routing: Routing) -> Choices:
    """The choices of x [tokens, width]."""
    logits = jnp.einsum("gsm,me->gse", x.reshape(-1, routing.group, x.shape[-1]), router)
    return choose(logits, routing, train=True)


def by_sorting(way: grouped.Way, params: list[jax.Array], x: jax.Array) -> jax.Array:
    """Ours, dropless; `way` as of `grouped.product`."""
    router, inner, outer = params
    routing = Routing(router.shape[1], CHOSEN, group=len(x), second="all", dropless=True)
    choices = routed(x, router, routing)
    where, _ = sorting.plan_dispatch(choices, routing, 0)
    hidden = jax.nn.relu(grouped.product(sorting.send_to_rows(x.astype(inner.dtype), where), inner, where.sizes, way))
    y = grouped.product(hidden, outer, where.sizes, way)
    return sorting.return_to_tokens(y, choices.gate.reshape(-1, CHOSEN).astype(y.dtype), where)


def by_products(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """One-hot products with slots."""
    router, inner, outer = params
    # `capacity` counts tokens, not choices; at 1.25 half of the work would be dropped.
    routing = Routing(router.shape[1], CHOSEN, group=min(1024, len(x)), second="all", capacity=1.25 * CHOSEN)
    dispatch, combine, _ = einsum.masks(routed(x, router, routing), routing, routing.slots(train=True))
    packed = einsum.send_to_slots(x.astype(inner.dtype).reshape(*dispatch.shape[:2], -1), dispatch)
    hidden = jax.nn.relu(jnp.einsum("egcm,emf->egcf", packed, inner))
    return einsum.return_to_tokens(jnp.einsum("egcf,efm->egcm", hidden, outer), combine).reshape(x.shape)


def dense(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """Every token twice through one expert."""
    _, inner, outer = params
    return jax.nn.relu(jnp.concatenate([x] * CHOSEN).astype(inner.dtype) @ inner[0]) @ outer[0]


def in_jax(layer: Callable[[list[jax.Array], jax.Array], jax.Array], arrays: list[np.ndarray], dtype: str) -> Step:
    """Forward and backward of the mean square."""
    x, router, *kernels = map(jnp.asarray, arrays)
    if layer is dense:
        kernels = [kernel[:1] for kernel in kernels]
    params = [router, *(kernel.astype(dtype) for kernel in kernels)]
    loss = lambda params, x: (layer(params, x).astype(jnp.float32) ** 2).mean()  # noqa: E731
    step = jax.jit(jax.grad(loss, (0, 1)))
    return lambda: jax.block_until_ready(step(params, x))


def in_torch(name: str, arrays: list[np.ndarray], dtype: str) -> Step:
    """The dense layer, or tokens sorted and one product for each expert."""
    import torch

    x, router, inner, outer = (torch.from_numpy(array).requires_grad_() for array in arrays)
    kind = getattr(torch, dtype)
    tensors = [x, router, inner, outer]

    def sparse() -> torch.Tensor:
        gate, expert = torch.softmax(x @ router, -1).topk(CHOSEN, -1)
        gate = gate / gate.sum(-1, keepdim=True)
        flat, order = expert.flatten().sort(stable=True)
        sizes = torch.bincount(flat, minlength=router.shape[1]).tolist()
        parts = x[order // CHOSEN].to(kind).split(sizes)
        # unbind: the backward pass of inner[e] would write one array of the full size for every expert
        made = [
            torch.relu(one @ a) @ b
            for one, a, b in zip(parts, inner.to(kind).unbind(), outer.to(kind).unbind(), strict=True)
        ]
        weighted = torch.cat(made).float() * gate.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, order // CHOSEN, weighted)

    def plain() -> torch.Tensor:
        return (torch.relu(torch.cat([x] * CHOSEN).to(kind) @ inner[0].to(kind)) @ outer[0].to(kind)).float()

    def step() -> None:
        ((plain() if name == "dense" else sparse()) ** 2).mean().backward()
        for tensor in tensors:
            tensor.grad = None

    return step


def cases(arrays: list[np.ndarray], experts: int) -> dict[str, Callable[[], Step]]:
    """What makes every layer's step, by its name; what cannot be had here is left out."""
    makers: dict[str, Callable[[], Step]] = {}
    for dtype in ("float32", "bfloat16"):
        makers[f"jax dense {dtype}"] = partial(in_jax, dense, arrays, dtype)
        makers[f"ours, sorted {dtype}"] = partial(in_jax, partial(by_sorting, "auto"), arrays, dtype)
        if dtype == "float32":
            makers["ours, one-hot float32"] = partial(in_jax, by_products, arrays, dtype)
            if experts <= 8:
                makers["jax ragged_dot float32"] = partial(in_jax, partial(by_sorting, "ragged"), arrays, dtype)
        if util.find_spec("torch"):
            makers[f"torch dense {dtype}"] = partial(in_torch, "dense", arrays, dtype)
            makers[f"torch sorted {dtype}"] = partial(in_torch, "sorted", arrays, dtype)
    return makers


def times(steps: dict[str, Step], repeats: int) -> dict[str, tuple[float, float]]:
    """Median wall and CPU milliseconds; the steps take turns."""
    for step in steps.values():
        step()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: tuple(1e3 * np.median(several, 0)) for name, several in taken.items()}  # type: ignore[misc]


def keep_to(cores: int) -> None:
    """Keeps this process, XLA's threads and PyTorch's to so many cores; before either makes its threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # XLA has as many threads as it may use cores
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # PyTorch's threads sleep, not spin, while others have their turn
    if util.find_spec("torch"):
        import torch

        torch.set_num_threads(cores)


def peak_mb(arguments: list[str], name: str) -> float:
    """MiB that a step takes at its peak above its arguments, in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--only", name]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["256:8", "256:64", "512:8", "512:64"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", type=int, default=1, help="of this process, and threads of each framework")
    parser.add_argument("--memory", action="store_true", help="measure the peaks of memory too")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    keep_to(given.cores)
    rows = []
    for case in given.cases:
        width, experts = map(int, case.split(":"))
        makers = cases(numbers(given.tokens, width, experts), experts)
        if given.only:
            print(memory.step_peak_mb(makers[given.only]()))
            return
        found = times({name: make() for name, make in makers.items()}, given.repeats)
        own = ["--cases", case, "--tokens", str(given.tokens), "--cores", str(given.cores)]
        for name, (wall, cpu) in found.items():
            limit = found[f"{name.replace('ours,', 'jax').split()[0]} dense {name.split()[-1]}"]
            peak = f"{peak_mb(own, name):,.0f}" if given.memory else ""
            ratios = f"{wall / limit[0]:.2f}", f"{cpu / limit[1]:.2f}"
            rows.append((f"{case} {name}", f"{wall:.0f}", f"{cpu:.0f}", *ratios, peak))
    print(f"{machine.headline(machine.facts())}, commit {machine.commit()}, {given.cores} of the cores\n")
    print(machine.table(("width:experts layer", "ms", "CPU ms", "x dense", "x dense, CPU", "peak MB"), rows))


if __name__ == "__main__":
    main()
