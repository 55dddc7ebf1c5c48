"""A tensor-train bag in PyTorch and in JAX: CPU time of the same kernel in both, interleaved in one process.

    python benchmarks/torch_bag.py [--cases 10M:64:16:10 ...] [--rounds 15] [--page docs/results/torch_bag.md]

A case is rows:features:rank:ids a bag, as in `tensor_train.py`, whose batches and JAX form these are. Forward is a
lookup without gradients; a step is lookup, gradient and plain SGD (torch.optim.SGD there), with the bags handed out.
The ways take turns of some ten milliseconds; CPU time is that of all threads. Bags and updated cores are compared
before anything is timed.

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
import machine  # isort: skip
import torch  # isort: skip

from multipod.interop.torch import TTEmbeddingBag  # isort: skip

CASES = [f"10M:{features}:{rank}:{ids}" for features in (16, 64) for rank in (8, 16, 32) for ids in (1, 10, 32)]
THREADS = (1, 2)
GOAL = 1.1
NOTES = jax_form.NOTES


def in_torch(case: jax_form.Case, sparse: bool = False) -> tuple[Callable, Callable]:
    """Forward and step of the module."""
    tt = case.tt
    bag = TTEmbeddingBag(
        tt.rows, tt.features, tt.ranks, tt.row_factors, tt.column_factors, mode="sum", sparse=sparse, way="native"
    )
    bag.load_state_dict({f"cores.{k}": torch.from_numpy(core) for k, core in enumerate(case.cores)})
    optimizer = torch.optim.SGD(bag.parameters(), lr=jax_form.RATE)
    ids = torch.from_numpy(case.ids.astype(np.int64)).view(-1, case.hot)
    gradient = torch.from_numpy(case.gradient)

    def forward():
        with torch.no_grad():
            return bag(ids)

    def step():
        bag(ids).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
        return [core.detach() for core in bag.cores]

    return forward, step


def on(threads: int, run: Callable) -> Callable:
    """`run` on so many of PyTorch's threads."""

    def with_threads():
        torch.set_num_threads(threads)
        return run()

    return with_threads


def check(case: jax_form.Case, ways: dict[str, tuple[Callable, Callable]]) -> None:
    """Bags, and cores after one step, of all ways."""
    (forward, step), *others = ways.values()
    bags, cores = np.asarray(forward()), [np.array(core) for core in step()]
    for forward, step in others:
        np.testing.assert_allclose(forward().numpy(), bags, rtol=1e-5, atol=1e-6 * np.abs(bags).max())
        for found, core in zip(step(), cores, strict=True):
            np.testing.assert_allclose(found.numpy(), core, rtol=1e-5, atol=1e-6 * np.abs(core).max())


def measure(name: str, rounds: int) -> dict:
    """CPU milliseconds of each way, medians; and the median of PyTorch's over JAX's within a round."""
    case = jax_form.made(name)
    ways = {"jax": jax_form.ours(case, "native")}
    for threads in THREADS:
        ways[f"torch {threads}"] = tuple(on(threads, run) for run in in_torch(case))
    check(case, ways)
    found = {"case": name}
    for part, what in enumerate(("forward", "step")):
        taken = {way: [] for way in ways}
        calls = {way: jax_form.calls_of(programs[part]) for way, programs in ways.items()}
        for _ in range(rounds):
            for way, programs in ways.items():
                taken[way].append(jax_form.per_call_ms(programs[part], calls[way]))
        for way, times in taken.items():
            found[what, way] = float(np.median(times))
            found[what, way, "ratio"] = float(np.median(np.array(times) / np.array(taken["jax"])))
    return found


def report(results: list[dict]) -> str:
    """The table, and what became of the goal."""
    parts = ("forward", "step")
    head = ["rows:features:rank:ids"]
    head += [
        f"{what}: {way}" for what in parts for way in ("JAX, ms", *(f"{n} thread{'s' * (n > 1)}" for n in THREADS))
    ]
    rows, lines = [], []
    for one in results:
        row = [one["case"]]
        for what in parts:
            row += [f"{one[what, 'jax']:.2f}", *(f"{one[what, f'torch {n}', 'ratio']:.2f}x" for n in THREADS)]
        rows.append(row)
    for what in parts:
        for n in THREADS:
            ratios = [one[what, f"torch {n}", "ratio"] for one in results]
            held = sum(ratio <= GOAL for ratio in ratios)
            lines.append(
                f"- {what.capitalize()}, {n} thread{'s' * (n > 1)}, at most {GOAL} of JAX's CPU time: {held} of "
                f"{len(ratios)} cases; {min(ratios):.2f} to {max(ratios):.2f}, median {np.median(ratios):.2f}."
            )
    return "\n".join(lines) + "\n\n" + machine.table(head, rows)


def page(facts: dict, text: str, load: float, notes: str) -> str:
    """The results page."""
    return f"""# A tensor-train bag in PyTorch

`python benchmarks/torch_bag.py --page docs/results/torch_bag.md`

{machine.headline(facts)}, commit {facts["commit"]}; load average at the end {load}

CPU time of `multipod.interop.torch.TTEmbeddingBag`, of all its threads, over that of the JAX form in the same round
(medians). Both call one C++ kernel, JAX's on one thread. A step is lookup, gradient and SGD.

{text}

{notes}"""


def main() -> None:
    """Prints the table, and writes the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--rounds", type=int, default=15)
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
