"""The planner on this host: constants from ten small steps, predictions of six others, and what XLA says of memory."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.layout.layout import Layout
from multipod.layout.sync import Sync
from multipod.plan.calibration.fit import Fit
from multipod.plan.calibration.host import (
    CALIBRATION,
    calibrate,
    images,
    memory_bytes,
    predict_recipe,
    priced,
    step_s,
    words,
)
from multipod.plan.machine import Machine, here
from multipod.plan.traced.program import workload_of
from multipod.plan.traced.splits import Splits
from multipod.plan.workload import Workload
from multipod.recipe.recipe import Recipe
from multipod.recipes.digits import digits

HELD_OUT = (
    replace(digits(), layout=Layout((2, 4))),
    images(24, 24, 32),
    images(16, 24, 64, layout=Layout((2, 4), sync=Sync(sharding="zero1"))),
    images(16, 32, 32, layout=Layout((1, 2))),
    words(192, 48, 16),
    words(128, 32, 64, layout=Layout((1, 8))),
)
"""Six recipes and layouts that the constants are not fitted to."""


def run(report: Callable[[str], None]) -> Outcome:
    """Measures, fits, and holds the predictions against six other measured steps. Other work on the host spoils it."""
    fit, measured = calibrate(here(8, os.cpu_count() or 1), told=report)
    rows, errors, memory = [], [], []
    for recipe in HELD_OUT:
        report(f"predicting {recipe.name}")
        workload = workload_of(recipe, Splits(recipe))
        found, seconds = priced(recipe, workload, fit.machine), step_s(recipe)
        laid_out, estimated = memory_bytes(recipe), _memory(workload, recipe, fit.machine)
        errors.append(found / seconds - 1)
        memory.append(estimated / laid_out - 1)
        cells = (recipe.name, _layout(recipe), f"{1e3 * seconds:.2f}", f"{1e3 * found:.2f}", f"{errors[-1]:+.0%}")
        rows.append((*cells, f"{laid_out / 1e6:.1f}", f"{estimated / 1e6:.1f}"))
    head = ("recipe", "layout", "measured, ms", "predicted, ms", "error", "XLA's memory, MB", "estimated, MB")
    section = Section("Six steps", _text(fit, measured), head, rows)
    fitted = [(name, f"{1e3 * s:.2f}", f"{fit.errors[name]:+.0%}") for name, s in measured.items()]
    beside = Section("What the constants were fitted to", "", ("recipe and layout", "measured, ms", "error"), fitted)
    return Outcome("The planner on this host", tuple(claims_of(errors, memory)), (section, beside))


def claims_of(of_steps: Sequence[float], of_memory: Sequence[float]) -> list[Claim]:
    """What relative errors of the six steps, and of their memory, say."""
    median, worst = (100 * float(f(np.abs(of_steps))) for f in (np.median, np.max))
    source, most = "this repository's own goal", 100 * float(np.max(np.abs(of_memory)))
    return [
        Claim("Six steps on this host: median error, %", source, median, 15, median < 15,
              fails_if="constants of ten steps do not carry over to half of six others"),
        Claim("Six steps on this host: largest error, %", source, worst, 30, worst < 30,
              fails_if="one of six steps that the fit has not seen is off by a third"),
        Claim("Memory from the program of one device: largest error against XLA's own, %", source, most, 5, most < 5,
              fails_if="what XLA lays out for a layout does not follow from one device's program"),
    ]  # fmt: skip


def _memory(workload: Workload, recipe: Recipe, machine: Machine) -> float:
    return predict_recipe(recipe, workload, machine).memory.total


def _layout(recipe: Recipe) -> str:
    rows, columns = recipe.layout.mesh
    return f"{rows}x{columns}" + (", sharded update" if recipe.layout.sync.zero1 else "")


def _text(fit: Fit, measured: dict[str, float]) -> str:
    constants = ", ".join(f"{name} {value:.3g} (±{spread:.0%})" for name, (value, spread) in fit.constants.items())
    load = os.getloadavg()[0]
    return (
        f"Constants fitted to {len(CALIBRATION)} other steps of {1e3 * min(measured.values()):.1f} to "
        f"{1e3 * max(measured.values()):.0f} ms (median error {fit.median_error:.0%}): {constants}. Load average "
        f"{load:.1f}. "
        "Memory is what XLA lays out for a device's examples alone, with what the layout splits; a run asks XLA for "
        "its own program before the first update, and refuses what does not fit."
    )
