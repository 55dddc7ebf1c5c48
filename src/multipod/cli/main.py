"""Entry point: finds the command, and turns errors into one message and an exit code."""

import errno
import importlib
import os
import select
import sys
import time

import click

from multipod.errors import MultipodError, nearest

_started_s = time.monotonic()

COMMANDS = {
    "train": "multipod.cli.train:train",
    "import": "multipod.cli.weights:import_weights",
    "finetune": "multipod.cli.finetune:finetune",
    "eval": "multipod.cli.evaluate:evaluate",
    "average": "multipod.cli.average:average",
    "report": "multipod.cli.report:report",
    "data": "multipod.cli.data:data",
    "list": "multipod.cli.show:list_recipes",
    "show": "multipod.cli.show:show",
    "topology": "multipod.cli.schedules.topology:topology",
    "schedule": "multipod.cli.schedules.schedule:schedule",
    "simulate": "multipod.cli.schedules.simulate:simulate",
    "plan": "multipod.cli.plan:plan",
    "pipeline": "multipod.cli.schedules.pipeline:pipeline",
    "export": "multipod.cli.export:export",
    "hub": "multipod.cli.weights:hub",
    "micro": "multipod.cli.micro:micro",
    "launch": "multipod.cli.launch:launch",
    "agent": "multipod.cli.agent:agent",
    "rank-proxy": "multipod.cli.agent:rank_proxy",
    "chaos": "multipod.cli.chaos:chaos",
    "verify": "multipod.cli.verify:verify",
    "reproduce": "multipod.cli.reproduce:reproduce",
    "clicks": "multipod.cli.clicks:clicks",
    "mlperf": "multipod.cli.mlperf:mlperf",
    "doctor": "multipod.cli.doctor:doctor",
}
"""Every command: its name, and the click command behind it. Modules are imported only when called."""

GROUPS = {
    "Train": ("train", "finetune", "eval", "average", "report", "export", "list", "show", "data", "clicks"),
    "Weights of others": ("import", "hub"),
    "Check": ("verify", "reproduce", "mlperf"),
    "Plan and simulate": ("plan", "simulate", "schedule", "topology", "pipeline"),
    "Many processes": ("launch", "agent", "chaos", "doctor"),
    "Microcontrollers": ("micro",),
}
"""The commands as `multipod --help` groups them; those that are named nowhere come last."""

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM, errno.EFBIG, errno.EIO)


FIELDS = {
    "--batch": "--set batch=N",
    "--batch-size": "--set batch=N",
    "--lr": "--set optimizer.rate=X",
    "--learning-rate": "--set optimizer.rate=X",
    "--rate": "--set optimizer.rate=X",
    "--epochs": "--set updates=N (an epoch is the training examples over the batch)",
    "--steps": "--set updates=N",
    "--max-steps": "--set updates=N",
    "--updates": "--set updates=N",
    "--optimizer": "--set optimizer=NAME",
    "--weight-decay": "--set optimizer.weight_decay=X",
    "--checkpoint-every": "--set checkpoint_every=N",
    "--eval-every": "--set evaluate_every=N",
    "--output-dir": "--out DIR",
    "--extend": "--resume RUN --set updates=N",
}
"""Options of other programs, and what says the same here: fields of the recipe, for the most part."""

PIPE_CLOSED = 128 + 13
"""Exit code when nobody reads our output any more: that of a process ended by SIGPIPE."""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(":")
        return getattr(importlib.import_module(module), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands in their groups, each with its whole first sentence."""
        named = {name for names in GROUPS.values() for name in names}
        groups = {**GROUPS, "Others": tuple(name for name in COMMANDS if name not in named)}
        for title, names in groups.items():
            known = [(name, command) for name in names if (command := self.get_command(ctx, name)) is not None]
            rows = [(name, command.get_short_help_str(limit=400)) for name, command in known if not command.hidden]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}. {nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="multipod")
def cli() -> None:
    """Train models on a mesh of devices: one CPU, a GPU server, a cluster, thousands of chips.

    \b
    multipod doctor                 what is installed and found here, and does it work
    multipod train digits           train a small network on eight virtual devices
    multipod train FILE.py:FUNCTION train your own recipe
    """


def main() -> None:
    """Runs the command line; exits 2 on what the user can mend, with one message and no traceback."""
    try:
        leave(cli.main(standalone_mode=False) or 0)
    except click.exceptions.Exit as done:
        leave(done.exit_code)
    except click.exceptions.Abort:
        leave(130, "interrupted")
    except click.NoSuchOption as error:
        _explained(error).show()
        leave(2)
    except click.ClickException as error:
        error.show()
        leave(2)
    except MultipodError as error:
        leave(error.exit_code, f"multipod: {error}")
    except BrokenPipeError:
        discard_output()
        leave(PIPE_CLOSED)
    except OSError as error:
        if error.errno not in DISK:
            raise
        where = f" {error.filename}" if error.filename else ""
        leave(
            2,
            f"multipod: cannot write{where}: {error.strerror}. "
            "Make room or choose another --out, then go on with --resume.",
        )
    except KeyboardInterrupt:
        leave(130, "interrupted")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError) or (end.code == 1 and _nobody_reads()):  # so do Rich and click
            discard_output()
            sys.exit(PIPE_CLOSED)
        raise


def _explained(error: click.NoSuchOption) -> click.UsageError:
    """The error, with what says the same here if the option is one of other programs and the command takes --set."""
    command = error.ctx.command if error.ctx else cli
    if error.option_name not in FIELDS or not any("--set" in param.opts for param in command.params):
        return error
    hint = f"Say {FIELDS[error.option_name]}. `multipod show RECIPE` has all fields."
    return click.UsageError(f"No such option '{error.option_name}'. {hint}", error.ctx)


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose other end is closed."""
    try:
        pipe = select.poll()
        pipe.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in pipe.poll(0))
    except (OSError, ValueError):  # no file at all, in tests
        return False


def discard_output() -> None:
    """Lets what is still printed go nowhere: nobody reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def started_s() -> float:
    """When this process started on what it does, on the monotonic clock."""
    return _started_s


def starts_now() -> None:
    """What this process does starts only now: it has waited for it."""
    global _started_s
    _started_s = time.monotonic()


def leave(code: int, message: str = "") -> None:
    """Ends the process with `code`. One of several processes ends at once: its peers may never answer."""
    if message:
        click.echo(message, err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    distributed = sys.modules.get("jax") and sys.modules["jax"].distributed.is_initialized()
    if code and distributed:
        os._exit(code)
    sys.exit(code)
