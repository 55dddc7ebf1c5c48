"""One dense Transformer priced by the planner, by llm-analysis and by Calculon: memory and time side by side.

    git clone https://github.com/cli99/llm-analysis; git clone https://github.com/calculon-ai/calculon
    pip install fire pandas psutil
    PYTHONPATH=llm-analysis:calculon:src python benchmarks/planner_peers.py > docs/results/planner-peers.md

Nothing is run on a GPU: all three are arithmetic. What is not installed is left out of the table, and said.
"""

import contextlib
import importlib.util
import io
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine

from multipod.layout.layout import Layout
from multipod.layout.split import ModelSplit
from multipod.layout.sync import Sync
from multipod.plan.machine import find
from multipod.plan.predict import predict_step
from multipod.plan.tables.layers import HALF, AttentionCost, elementwise, looked_up, told_of
from multipod.plan.work import Work
from multipod.plan.workload import Workload

FEATURES, HIDDEN, HEADS, LAYERS, LENGTH, VOCAB = 6144, 24576, 64, 48, 2048, 51_200
BATCH, WAYS = 4, 8
"""Megatron's 22 billion parameters, as in arXiv:2205.05198: eight A100 with 80 GB that split every layer."""

PARAMETERS = LAYERS * (12 * FEATURES**2 + 13 * FEATURES) + (VOCAB + LENGTH) * FEATURES

ROWS = {
    "parameters, 10^9": "parameters",
    "products of a step, PFLOP": "flops",
    "weights, gradients, optimizer, GiB": "state",
    "kept for the backward pass, GiB": "activations",
    "forward and backward, ms": "passes",
    "sums between the eight, ms": "sums",
    "update, ms": "update",
    "step, ms": "step",
}

Figures = dict[str, float]


def ours(ideal: bool) -> Figures:
    """The planner, with the layers of its own tables."""

    def build(examples: float, split: ModelSplit, lanes: int) -> Work:
        layer = AttentionCost(FEATURES, HIDDEN, HEADS, split.model).work(examples, LENGTH, [LENGTH], lanes=lanes)
        tokens = examples * LENGTH
        ends = told_of(tokens, FEATURES, VOCAB, split.model, lanes) + looked_up(tokens, FEATURES, VOCAB / split.model)
        return layer.times(LAYERS) + ends + elementwise("embedding", tokens * FEATURES, 12, HALF, count=6)

    model = Workload("gpt-22b", PARAMETERS, build, optimizer="adam", axes=("model",), wire_bytes=4)
    on = find("dgx-a100")
    if ideal:
        on = replace(on, lanes=1).calibrated(
            matmul=1.0, vector=0.25, memory=1.0, link=1.0, op_s=0.0, hop_s=0.0, message_s=0.0
        )
    step = predict_step(model, Layout(split=ModelSplit(model=WAYS), sync=Sync("ring")), BATCH, on)
    memory = step.memory
    return {
        "parameters": PARAMETERS / 1e9,
        "flops": sum(op.flops for op in build(BATCH, ModelSplit(model=WAYS), 1).ops if op.kind == "matmul")
        * WAYS
        / 1e15,
        "state": (memory.parameters + memory.gradients + memory.optimizer) / 2**30,
        "activations": memory.activations / 2**30,
        "passes": 1e3 * step.compute_s,
        "sums": 1e3 * step.collectives_s,
        "update": 1e3 * step.update_s,
        "step": 1e3 * step.step_s,
    }


def llm_analysis(ideal: bool) -> Figures:
    """llm-analysis: peaks by default; otherwise the efficiencies that its README takes from the literature."""
    from llm_analysis.analysis import LLMAnalysis  # type: ignore[import-not-found]
    from llm_analysis.config import (  # type: ignore[import-not-found]
        ModelConfig,
        ParallelismConfig,
        get_dtype_config_by_name,
        get_gpu_config_by_name,
    )

    sizes = {"num_layers": LAYERS, "n_head": HEADS, "hidden_dim": FEATURES, "ffn_embed_dim": HIDDEN}
    model = ModelConfig("gpt-22b", vocab_size=VOCAB, max_seq_len=LENGTH, **sizes)
    shares = {} if ideal else {"flops_efficiency": 0.5, "hbm_memory_efficiency": 0.9}
    chip, dtype = get_gpu_config_by_name("a100-sxm-80gb"), get_dtype_config_by_name("w16a16e16")
    tool = LLMAnalysis(model, chip, dtype, ParallelismConfig(tp_size=WAYS, sp_size=1), **shares)
    found = tool.training(BATCH, 1, seq_len=LENGTH, total_num_tokens=BATCH * LENGTH, flash_attn=False)
    state = found["(weight+op_state+grad)_memory_per_gpu"]
    step_ms = 1e3 * found["latency_per_iter"]
    sums_ms = 3e3 * found["latency_fwd_tp_comm"]  # it takes the backward pass for twice the forward pass
    return {
        "parameters": found["num_params_total"] / 1e9,
        "flops": found["num_flops_total_per_micro_batch"] / 1e15,
        "state": state / 2**30,
        "activations": found["activation_memory_per_gpu"] / 2**30,
        "passes": 1e3 * found["latency_per_micro_batch"] - sums_ms,
        "sums": sums_ms,
        "update": step_ms - 1e3 * found["latency_per_micro_batch"],
        "step": step_ms,
    }


def calculon(ideal: bool) -> Figures:
    """Calculon, with the system file of its validation, or with all of that file's efficiencies 1."""
    import calculon as package  # type: ignore[import-not-found]
    from calculon.llm import Llm  # type: ignore[import-not-found]

    files = Path(package.__file__).parent.parent
    on = _read(files / "systems" / "a100_80e.json")
    if ideal:
        for part, key in (("matrix", "gflops_efficiency"), ("vector", "gflops_efficiency")):
            on[part]["float16"][key] = [[0, 1.0]]
        on["mem1"]["MB_efficiency"] = [[0, 1.0]]
        for link in on["networks"]:
            link |= {"efficiency": 1.0, "latency": 0.0, "processor_usage": 0.0}
    model = _read(files / "models" / "megatron-22B.json")
    laid = _read(files / "validation" / "seqsel" / "fig1" / "megatron-22B_none.json")
    tool = Llm(Llm.Application(model), logging.getLogger())
    system = package.System(on)
    tool.compile(system, Llm.Execution.from_json(laid))
    tool.run(system)
    found = tool.get_stats_json(False)
    block = sum(found[f"block_{part}_flops"] for part in ("fw", "agrad", "wgrad"))
    state = found["weight_space"] + found["weight_grad_space"] + found["optimizer_space"]
    return {
        "parameters": Llm.Application(model).num_parameters() / 1e9,
        "flops": block * LAYERS * WAYS / 1e15,
        "state": state / 2**30,
        "activations": found["act_space"] / 2**30,
        "passes": 1e3 * (found["fw_time"] + found["bw_time"]),
        "sums": 1e3 * found["tp_comm_exposed_time"],
        "update": 1e3 * found["optim_step_time"],
        "step": 1e3 * found["total_time"],
    }


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


TOOLS: dict[str, tuple[str, Callable[[bool], Figures]]] = {
    "multipod": ("multipod", ours),
    "Calculon": ("calculon", calculon),
    "llm-analysis": ("llm_analysis", llm_analysis),
}

PUBLISHED: dict[str, str] = {"state": "45.6", "activations": "59.3", "step": "1,100"}
"""Megatron-LM itself (arXiv:2205.05198): memory from figure 1, without recomputation; the step from table 5, where
attention is recomputed and norms are split, which together cost about what they save (its section 6)."""


def figures(name: str, ideal: bool) -> Figures | None:
    """What a tool says; None if it is not installed. Its own remarks go nowhere."""
    package, tool = TOOLS[name]
    if importlib.util.find_spec(package) is None:
        return None
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return tool(ideal)


def main() -> None:
    """Prints the page."""
    print("# The planner beside Calculon and llm-analysis\n")
    print(f"`python benchmarks/planner_peers.py`, commit {machine.commit()}, {machine.headline(machine.facts())}.\n")
    print(
        f"GPT with {PARAMETERS / 1e9:.1f} billion parameters on eight A100 (80 GB) that split every layer, {BATCH} rows"
    )
    print(f"of {LENGTH:,} tokens, nothing computed again. Memory and times are of one GPU.\n")
    for title, ideal in (
        ("With peaks of the data sheet and no latency", True),
        ("With each tool's own efficiencies", False),
    ):
        found: dict[str, Any] = {name: figures(name, ideal) for name in TOOLS}
        missing = [name for name, row in found.items() if row is None]
        known = {name: row for name, row in found.items() if row is not None}
        rows = []
        for label, key in ROWS.items():
            cells = [f"{row[key]:,.2f}" if row[key] < 100 else f"{row[key]:,.0f}" for row in known.values()]
            rows.append((label, *cells, *([] if ideal else [PUBLISHED.get(key, "")])))
        print(f"## {title}\n")
        print(machine.table(("", *known, *([] if ideal else ["published"])), rows) + "\n")
        if missing:
            print(f"Not installed, so left out: {', '.join(missing)}. The script's first lines say how to get them.\n")
    print((Path(__file__).parent / "planner_peers_text.md").read_text(), end="")


if __name__ == "__main__":
    main()
