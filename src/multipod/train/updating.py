"""Updates on their way: given to the devices some ahead of what is known, waited for in their order, judged."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from multipod.errors import ClusterError
from multipod.pytrees import Batch
from multipod.recipe.bad_updates import BadUpdateRules
from multipod.recipe.recipe import Recipe
from multipod.step.guard import Controls
from multipod.step.program import Program
from multipod.step.several import SeveralUpdates
from multipod.step.state import State, Sums, begin_reading, read_sums
from multipod.train.bad_numbers.bad_updates import BadUpdatePolicy, CompiledUpdate, JudgedUpdate
from multipod.train.bad_numbers.culprit import Numbers
from multipod.train.clock import Clock
from multipod.train.stop import ExitWish

AHEAD = 2
"""Updates that wait on the devices behind the one that the host waits for, where nothing speaks against it."""


def default_run_ahead(devices: int, platform: str, jax_version: tuple[int, ...]) -> int:
    """How many updates a run gives its devices ahead, if it is not told.

    None on several CPU devices of one process up to JAX 0.10.2: they share a pool of threads, and collectives of
    several programs can wait for each other in it for ever.

    Args:
      devices: of this process.
      platform: of these, as `cpu`.
      jax_version: as `jax.__version_info__`.
    """
    return 0 if platform == "cpu" and devices > 1 and jax_version <= (0, 10, 2) else AHEAD


def run_ahead_of(asked: int | None, rules: BadUpdateRules, in_order: str = "") -> int:
    """How many updates a run gives its devices ahead. All processes of a run must come to the same number.

    Args:
      asked: what the user asked for; None leaves it to `default_run_ahead`.
      rules: of bad updates. What is a spike follows from the update before, so then nothing runs ahead.
      in_order: why each update must be done before the next begins; empty if it need not.

    Raises:
      ClusterError: more was asked for than can be.
    """
    why = in_order or ("bad_updates.spike compares each update with those before it" if rules.spike else "")
    if why and asked:
        raise ClusterError(f"--run-ahead {asked}: {why}, so updates are done one by one. Leave out --run-ahead.")
    if why:
        return 0
    local = jax.local_devices()
    return default_run_ahead(len(local), local[0].platform, jax.__version_info__) if asked is None else asked


def steps_per_call_of(asked: int, recipe: Recipe, image_order: str = "", in_order: str = "") -> int:
    """How many updates a run gives its devices in one call: as many as the user asked for, or a refusal.

    Args:
      image_order: in which the devices want images (`InputOptions`), which is found out for single updates alone.
      in_order: why each update must be done before the next begins; empty if it need not.

    Raises:
      ClusterError: says what is in the way, and what to leave out or to give.
    """
    if asked == 1:
        return 1
    if recipe.bad_updates.spike:
        in_order = "bad_updates.spike compares each update with those before it"
    if image_order:
        in_order = f"--image-order {image_order} is of single updates"
    if in_order:
        raise ClusterError(f"--steps-per-call {asked}: {in_order}. Leave out --steps-per-call.")
    pauses = {
        "updates": recipe.updates,
        "evaluate_every": recipe.evaluate_every,
        "checkpoint_every": recipe.checkpoint_every,
    }
    name, shortest = min(((name, every) for name, every in pauses.items() if every), key=lambda pause: pause[1])
    if asked > shortest:
        raise ClusterError(
            f"--steps-per-call {asked}: {name}={shortest}, so no call would have so many. Give at most {shortest}."
        )
    return asked


@dataclass(frozen=True)
class InFlightUpdate:
    """An update that the devices work on or will: what they were given, what they will return, and since when.

    Attributes:
      batch: what it was given, if it may have to be given it again.
      together: how many updates of its call are done with it or after it.
    """

    batch: "Batch | None"
    wish: int
    controls: Controls
    sums: Sums
    since_s: float
    together: int = 1


class SettledUpdate(NamedTuple):
    """An update that is done.

    Attributes:
      judged: the state and the sums that count, and what was bad about it.
      since_s: when it was given to the devices.
      undone: the batches of those that were under way behind it, if it was bad: they changed nothing.
      together: how many updates came back with it, itself among them, that were not settled before.
    """

    judged: JudgedUpdate
    since_s: float
    undone: list[Batch]
    together: int


class UpdateRunner:
    """Runs the compiled update of a program, and judges what comes out if the program is watched.

    Args:
      several: several updates as one program; None where every call has one.
      numbers: of the examples of a batch.
    """

    def __init__(
        self,
        program: Program,
        compiled: CompiledUpdate,
        several: SeveralUpdates | None,
        clock: Clock,
        numbers: Numbers,
    ) -> None:
        self.program, self.compiled, self.several, self.clock = program, compiled, several, clock
        self.policy = BadUpdatePolicy(program, numbers, clock)
        self._under_way: deque[InFlightUpdate] = deque()

    def __len__(self) -> int:
        """How many updates are under way."""
        return len(self._under_way)

    @property
    def calls(self) -> int:
        """How many calls are under way."""
        return sum(update.together == 1 for update in self._under_way)

    @property
    def is_busy(self) -> bool:
        """Whether the devices have something to do."""
        return bool(self._under_way) and not self._under_way[-1].sums["count"].is_ready()  # type: ignore[attr-defined]

    def dispatch(self, state: State, batches: Sequence[Batch], wish: ExitWish, flip: int) -> State:
        """Gives the devices an update to do for each batch, and the state up; returns the last one, without waiting.

        If the update before turns out to be bad, those behind change nothing: the devices see to that themselves.
        """
        since_s, number = self.clock(), wish.encode()
        watched = self.program.watched
        halt = self._under_way[-1].sums["bad"] if watched and self._under_way else None
        controls = self.policy.controls(number, flip, halt)
        if len(batches) == 1:
            state, alone = self.compiled(state, batches[0], controls)
            all_sums: tuple[Sums, ...] = (alone,)
        else:
            assert self.several is not None
            state, all_sums = self.several(state, tuple(batches), controls)
        for left, batch, sums in zip(range(len(batches), 0, -1), batches, all_sums, strict=True):
            begin_reading(sums)
            self._under_way.append(InFlightUpdate(batch if watched else None, number, controls, sums, since_s, left))
        return state

    def settle(self, state: State, sticky: bool) -> SettledUpdate:
        """Waits for the oldest update, and repeats it if it is bad; a `sticky` fault happens in the repetition, too.

        `state` is what the newest will return.
        """
        update = self._under_way.popleft()
        jax.block_until_ready(update.sums if self._under_way else (state, update.sums))
        self.program.check(update.sums)
        sums = read_sums(update.sums)
        if not self.program.watched:
            return SettledUpdate(JudgedUpdate(state, sums, None), update.since_s, [], update.together)
        again = self.policy.controls(update.wish) if int(sums["bad"]) and not sticky else None
        assert update.batch is not None
        judged = self.policy(self.compiled, state, sums, update.batch, update.controls, again)
        undone, together = [], update.together
        if judged.bad is not None:
            undone = [later.batch for later in self._under_way if later.batch is not None]
            self._under_way.clear()
            together = 1
        return SettledUpdate(judged, update.since_s, undone, together)
