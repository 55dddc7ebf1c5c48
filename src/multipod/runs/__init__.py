"""Runs as a library: everything that `multipod train`, `eval`, `finetune` and `export` do is one call here.

    from multipod import runs

    result = runs.train("digits", out="runs/first", changes=["updates=200"])
    result = runs.train(resume="runs/first")
    run = runs.open("runs/first")
    runs.evaluate(run).values
    runs.export(run).write(Path("model.tflite"))

The names are imported when they are first used, so that a command line can read its options before JAX starts.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multipod.micro.quantising.options import Quantisation
    from multipod.recipes.finetune import FineTuning
    from multipod.runs.averaging import average_run as average
    from multipod.runs.evaluation import evaluate_run as evaluate
    from multipod.runs.evaluation import tell_answers
    from multipod.runs.exporting import ExportRequest
    from multipod.runs.exporting import export_run as export
    from multipod.runs.finetuning import finetune_run as finetune
    from multipod.runs.opening import OpenedRun
    from multipod.runs.opening import open_run as open
    from multipod.runs.options import RuntimeOptions
    from multipod.runs.recipes import configure_recipe
    from multipod.runs.request import RunResult, TrainRequest
    from multipod.runs.training import train_request
    from multipod.runs.training import train_run as train
    from multipod.runs.weights.exporting import export_weights
    from multipod.runs.weights.hub import load_run as hub_load
    from multipod.runs.weights.hub import push_run as hub_push
    from multipod.runs.weights.hub import save_run as hub_save
    from multipod.runs.weights.importing import ForeignStart, import_run
    from multipod.runs.weights.importing import begin_from as start_from

_PUBLIC = {
    "train": "multipod.runs.training:train_run",
    "open": "multipod.runs.opening:open_run",
    "evaluate": "multipod.runs.evaluation:evaluate_run",
    "finetune": "multipod.runs.finetuning:finetune_run",
    "average": "multipod.runs.averaging:average_run",
    "export": "multipod.runs.exporting:export_run",
    "start_from": "multipod.runs.weights.importing:begin_from",
    "import_run": "multipod.runs.weights.importing:import_run",
    "export_weights": "multipod.runs.weights.exporting:export_weights",
    "hub_save": "multipod.runs.weights.hub:save_run",
    "hub_load": "multipod.runs.weights.hub:load_run",
    "hub_push": "multipod.runs.weights.hub:push_run",
    "ExportRequest": "multipod.runs.exporting:ExportRequest",
    "ForeignStart": "multipod.runs.weights.importing:ForeignStart",
    "OpenedRun": "multipod.runs.opening:OpenedRun",
    "RunResult": "multipod.runs.request:RunResult",
    "RuntimeOptions": "multipod.runs.options:RuntimeOptions",
    "TrainRequest": "multipod.runs.request:TrainRequest",
    "FineTuning": "multipod.recipes.finetune:FineTuning",
    "Quantisation": "multipod.micro.quantising.options:Quantisation",
    "configure_recipe": "multipod.runs.recipes:configure_recipe",
    "tell_answers": "multipod.runs.evaluation:tell_answers",
    "train_request": "multipod.runs.training:train_request",
}
"""The public names, and what each stands for."""

__all__ = [
    "ExportRequest",
    "FineTuning",
    "ForeignStart",
    "OpenedRun",
    "Quantisation",
    "RunResult",
    "RuntimeOptions",
    "TrainRequest",
    "average",
    "configure_recipe",
    "evaluate",
    "export",
    "export_weights",
    "finetune",
    "hub_load",
    "hub_push",
    "hub_save",
    "import_run",
    "open",
    "start_from",
    "tell_answers",
    "train",
    "train_request",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"multipod.runs has no {name!r}. It has: {', '.join(__all__)}.")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
