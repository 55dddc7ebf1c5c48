"""Options that say how this host reads its data. None of them changes what a run learns."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from multipod.cli.schedules.machine import BYTES
from multipod.data.reading import InputOptions

if TYPE_CHECKING:
    pass

F = TypeVar("F", bound=Callable[..., Any])


def reading_options(command: F) -> F:
    """Adds --read-threads, --read-processes, --read-ahead, --read-limit, --image-order, and the decoded cache's two.

    The command gets one argument `reading`.
    """

    @click.option("--read-threads", type=click.IntRange(1), help="Threads that read and decode.  [default: as needed]")
    @click.option("--read-processes", type=click.IntRange(1), help="Processes that do so instead of threads.")
    @click.option("--read-ahead", type=click.IntRange(1), help="Batches made ahead.  [default: as needed, 2 to 8]")
    @click.option("--read-limit", type=float, help="Seconds after which a process is taken to hang.  [default: 300]")
    @click.option(
        "--image-order",
        type=click.Choice(["auto", "HWNC", "HWCN"]),
        help="In which the dims of images lie in device memory.  [default: row by row]",
    )
    @click.option("--decoded-cache", type=BYTES, help="Keep decoded images in so much memory, as 20G.")
    @click.option("--decoded-cache-folder", metavar="DIR", help="Keep them on disk there instead.")
    @functools.wraps(command)
    def with_reading(
        *args: Any,
        read_threads: int | None,
        read_processes: int | None,
        read_ahead: int | None,
        read_limit: float | None,
        image_order: str | None,
        decoded_cache: int | None,
        decoded_cache_folder: str | None,
        **kwargs: Any,
    ) -> Any:

        numbers = (read_threads or 0, read_processes or 0, read_ahead or 0, decoded_cache or 0)
        limit_s = InputOptions.limit_s if read_limit is None else read_limit
        reading = InputOptions(*numbers, decoded_cache_folder or "", limit_s, image_order or "")  # type: ignore[arg-type]
        return command(*args, reading=reading, **kwargs)

    return with_reading  # type: ignore[return-value]
