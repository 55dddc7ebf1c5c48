"""A tensor-train bag in PyTorch and in JAX: CPU time of the same kernel in both, interleaved in one process.

    python benchmarks/torch_bag.py [--cases 10M:64:16:10 ...] [--rounds 15] [--page docs/results/torch_bag.md]

A case is rows:features:rank:ids a bag, as in `tensor_train.py`, whose batches and JAX form these are. Forward is a
lookup without gradients; gradient is a lookup and the gradients of the cores; a step is that and plain SGD, in PyTorch
by torch.optim.SGD, in JAX inside the program. The ways take turns of some ten milliseconds; CPU time is that of all
threads. Bags, gradients and updated cores are compared before anything is timed.

PyTorch's OpenMP threads sleep when they wait here (OMP_WAIT_POLICY=passive, unless it is set): by default they spin
after each operation that takes several, as SGD's update, and that can take more time than all the rest of a step.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when PyTorch is imported

import tensor_train as jax_form  # isort: skip  # first: it settles what JAX reads when it is imported
import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import machine  # isort: skip
import torch  # isort: skip

from multipod.interop.torch import TTEmbeddingBag  # isort: skip

PARTS = ("forward", "gradient", "step")
CASES = [f"10M:{features}:{rank}:{ids}" for features in (16, 64) for rank in (8, 16, 32) for ids in (1, 10, 32)]
THREADS = (1, 2)
GOAL = 1.1
NOTES = jax_form.NOTES


def in_jax(case: jax_form.Case) -> tuple[Callable, ...]:
    """Each of `PARTS` by the JAX form."""
    forward, step = jax_form.ours(case, "native")
    cores, ids, gradient = jax.tree.map(jnp.asarray, (tuple(case.cores), case.ids, case.gradient))
    offsets = jnp.arange(0, len(case.ids) + 1, case.hot, dtype=jnp.int32)

    @jax.jit
    def both(cores, ids, offsets, gradient):
        bags, back = jax.vjp(lambda cores: jax_form.bag(case.tt, cores, ids, offsets, way="native"), cores)
        return back(gradient)[0], bags

    return forward, lambda: jax.block_until_ready(both(cores, ids, offsets, gradient))[0], step


def in_torch(case: jax_form.Case) -> tuple[Callable, ...]:
    """Each of `PARTS` by the module."""
    tt = case.tt
    bag = TTEmbeddingBag(tt.rows, tt.features, tt.ranks, tt.row_factors, tt.column_factors, mode="sum", way="native")
    bag.load_state_dict({f"cores.{k}": torch.from_numpy(core) for k, core in enumerate(case.cores)})
    optimizer = torch.optim.SGD(bag.parameters(), lr=jax_form.RATE)
    ids = torch.from_numpy(case.ids.astype(np.int64)).view(-1, case.hot)
    gradient = torch.from_numpy(case.gradient)

    def forward():
        with torch.no_grad():
            return bag(ids)

    def both():
        bag(ids).backward(gradient)
        gradients = [core.grad for core in bag.cores]
        optimizer.zero_grad()
        return gradients

    def step():
        bag(ids).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
        return [core.detach() for core in bag.cores]

    return forward, both, step


def on(threads: int, run: Callable) -> Callable:
    """`run` on so many of PyTorch's threads."""

    def with_threads():
        torch.set_num_threads(threads)
        return run()

    return with_threads


def check(ways: dict[str, tuple[Callable, ...]]) -> None:
    """Bags, gradients, and cores after one step, of all ways."""
    first, *others = [
        [np.array(one) for run in programs for one in jax.tree.leaves(run())] for programs in ways.values()
    ]
    for other in others:
        for found, right in zip(other, first, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6 * np.abs(right).max())


def measure(name: str, rounds: int) -> dict:
    """CPU milliseconds of each way, the least of the rounds; PyTorch's over JAX's; the median ratio of a round."""
    case = jax_form.made(name)
    ways = {"jax": in_jax(case)}
    for threads in THREADS:
        ways[f"torch {threads}"] = tuple(on(threads, run) for run in in_torch(case))
    check(ways)
    found = {"case": name}
    for part, what in enumerate(PARTS):
        taken = {way: [] for way in ways}
        calls = {way: jax_form.calls_of(programs[part]) for way, programs in ways.items()}
        for _ in range(rounds):
            for way, programs in ways.items():
                taken[way].append(jax_form.per_call_ms(programs[part], calls[way]))
        for way, times in taken.items():
            found[what, way] = min(times)
            found[what, way, "ratio"] = min(times) / min(taken["jax"])
            found[what, way, "median ratio"] = float(np.median(np.array(times) / np.array(taken["jax"])))
    return found


def report(results: list[dict]) -> str:
    """The table, and what became of the goal."""
    head = ["rows:features:rank:ids"]
    head += [
        f"{what}: {way}" for what in PARTS for way in ("JAX, ms", *(f"{n} thread{'s' * (n > 1)}" for n in THREADS))
    ]
    rows, lines = [], []
    for one in results:
        row = [one["case"]]
        for what in PARTS:
            row += [f"{one[what, 'jax']:.2f}", *(f"{one[what, f'torch {n}', 'ratio']:.2f}x" for n in THREADS)]
        rows.append(row)
    for what in PARTS:
        for n in THREADS:
            ratios = [one[what, f"torch {n}", "ratio"] for one in results]
            medians = [one[what, f"torch {n}", "median ratio"] for one in results]
            held, held_in_rounds = (sum(ratio <= GOAL for ratio in some) for some in (ratios, medians))
            lines.append(
                f"- {what.capitalize()}, {n} thread{'s' * (n > 1)}, at most {GOAL} of JAX's CPU time: {held} of "
                f"{len(ratios)} cases; {min(ratios):.2f} to {max(ratios):.2f}. By the medians of rounds: "
                f"{held_in_rounds}; {min(medians):.2f} to {max(medians):.2f}."
            )
    return "\n".join(lines) + "\n\n" + machine.table(head, rows)


def page(facts: dict, text: str, load: float, notes: str) -> str:
    """The results page."""
    return f"""# A tensor-train bag in PyTorch

`python benchmarks/torch_bag.py --page docs/results/torch_bag.md`

{machine.headline(facts)}, commit {facts["commit"]}; load average at the end {load}

CPU time of `multipod.interop.torch.TTEmbeddingBag`, of all its threads, over that of the JAX form: the least of the
rounds of each, since load from elsewhere only adds; the ways take turns. Both call one C++ kernel, JAX's on one thread.
Gradient is a lookup and the gradients of the cores; a step is that and SGD, in PyTorch by torch.optim.SGD, in JAX
inside the program.

{text}

{notes}"""


def main() -> None:
    """Prints the table, and writes the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    facts = machine.facts() | {"commit": machine.commit()}
    print(f"{machine.headline(facts)}, commit {facts['commit']}\n", flush=True)
    results = []
    for name in options.cases:
        results.append(measure(name, options.rounds))
        print({" ".join(key): round(value, 2) for key, value in results[-1].items() if "ratio" in key}, flush=True)
    text, load = report(results), machine.facts()["load"]
    print(f"\n{text}\n\nLoad average at the end: {load}")
    if options.page:
        old = options.page.read_text() if options.page.exists() else ""
        options.page.write_text(page(facts, text, load, old[old.index(NOTES) :] if NOTES in old else NOTES + "\n"))


if __name__ == "__main__":
    main()
