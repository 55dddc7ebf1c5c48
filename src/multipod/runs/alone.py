"""A run whose processes stay the same from its start to its end."""

from contextlib import ExitStack

import jax

from multipod.chaos.inject import Injector
from multipod.layout.mesh import topology_of
from multipod.runs.example_log import open_example_log
from multipod.runs.lengthening import complete_end, complete_notice
from multipod.runs.object_store import copied
from multipod.runs.options import RuntimeOptions
from multipod.runs.pictures import write_pictures
from multipod.runs.profiling import open_profile, refuse_unfit_libtpu
from multipod.runs.request import (
    RunResult,
    TrainRequest,
    copy_arguments,
    logger_arguments,
    pace_arguments,
    reading_arguments,
    relocation_arguments,
    remember,
    resume_command,
)
from multipod.runs.stages import (
    hold_folder,
    open_observers,
    prepare_folder,
    prepare_program,
    print_warning,
    read_past,
    report_to_launcher,
    run_facts,
    stop_when_asked,
    write_report,
)
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.clock import StartTimes
from multipod.train.context import LoopHooks, Resumption, RunContext, RunInfo
from multipod.train.hooks import ignore_phase, no_faults
from multipod.train.loop import train as train_program
from multipod.train.multihost import barrier
from multipod.train.updating import run_ahead_of, steps_per_call_of

IN_ORDER = "a fault that is injected happens when so many updates are done"


def run_alone(request: TrainRequest, options: RuntimeOptions) -> RunResult:
    """Prepares the run, trains, and writes its report."""
    start = StartTimes(options.started_s)
    start.mark("import")
    jax.devices()
    start.mark("devices")
    request, options = remember(request, options)
    faults = Injector(request.inject, options.cluster.process) if request.inject else no_faults
    program = prepare_program(request, options, faults)
    start.mark("trace")
    recipe = program.recipe
    if request.profile is not None:
        request.profile.check(recipe.updates)
        refuse_unfit_libtpu(jax.config.jax_platforms)  # type: ignore[attr-defined]
    in_order = IN_ORDER if request.inject else ""
    together = steps_per_call_of(request.steps_per_call, recipe, request.reading.image_order, in_order)
    folder = prepare_folder(request, options, program)
    with copied(folder, request, recipe.keep_checkpoints, print_warning) as copy_checkpoint:
        with ExitStack() as stack:
            stack.callback(hold_folder(folder, options.command))
            report_saved = report_to_launcher(options, stack, folder)

            def committed(update: int) -> None:
                report_saved(update)
                copy_checkpoint(update)

            stop = stack.enter_context(stop_when_asked())
            chips = topology_of(recipe.layout, program.mesh).chips if recipe.layout.sync.local_state else ()
            checkpoints = Checkpoints(folder.checkpoints, recipe.keep_checkpoints, committed=committed, chips=chips)
            stack.callback(checkpoints.close)
            state = checkpoints.restore(program.shapes, request.at, print_warning) if request.resume else None
            if (done := complete_end(folder, state, recipe.target)) is not None:
                print_warning(complete_notice(folder, done))
                return RunResult(folder.path, done, state)
            past, repeated = read_past(folder, None if state is None else int(state.update), options.started_s)
            observers = stack.enter_context(open_observers(folder, request, recipe, state))
            state = request.begin(program) if request.begin else state
            log = stack.enter_context(open_example_log(request.log_examples, folder, program, state))
            if request.profile is not None:
                request.profile.check(recipe.updates, done=0 if state is None else int(state.update))
            profile = stack.enter_context(open_profile(request.profile, folder, request.planned_parts))
            arguments = relocation_arguments(request, recipe.layout) + reading_arguments(request.reading)
            arguments += pace_arguments(request) + copy_arguments(request) + logger_arguments(request)
            start.mark("folder")
            context = RunContext(
                checkpoints=checkpoints,
                observers=observers,
                hooks=LoopHooks(
                    on_phase=profile.follow(log.follow(options.heartbeat or ignore_phase)),
                    barrier=lambda name: barrier(name, options.timeouts.compile_s),
                    on_update=profile.after(log.on_update),
                    faults=faults.of_run(folder.checkpoints),
                ),
                resumption=Resumption(past, repeated),
                info=RunInfo(
                    str(folder.path), run_facts(program, request, options), resume_command(folder, options, arguments)
                ),
                stop=stop,
                stop_after=request.stop_after,
                run_ahead=run_ahead_of(request.run_ahead, recipe.bad_updates, in_order),
                steps_per_call=together,
                evaluate_beside=request.evaluate_beside,
                reading=request.reading,
                start=start,
                began_s=options.started_s,
            )
            state, ended = train_program(program, context, state)
            if not ended.interrupted:
                write_pictures(folder, program, state)
        write_report(folder)
    return RunResult(folder.path, ended, state)
