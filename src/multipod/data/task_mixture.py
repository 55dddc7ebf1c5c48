"""Several text-to-text tasks at once, mixed by their sizes up to a limit."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from multipod.data.order import generator
from multipod.data.source import ArraySource, HostBatch, fingerprint
from multipod.data.tasks import Task
from multipod.data.text.text_tokens import TextTokens
from multipod.errors import RecipeError
from multipod.pytrees import IdRange


@dataclass(frozen=True)
class TaskMixture:
    """Examples of several tasks; how many of each, their sizes say, and a limit keeps large ones from taking it all.

    With e examples of each task and the limit K, a task has the share r = min(e, K)^(1 / temperature) of what is read,
    over the sum of that over all tasks: examples-proportional mixing, and temperature-scaled mixing above it.

    Rows of all tasks are as long as the longest needs, and have an entry `task`, the number of their task.

    Source: Raffel et al., 2019, arXiv:1910.10683, section 3.5.2. There tasks are drawn at random; here an epoch has
    exactly these shares of them, rounded to whole examples (`MixedRows`).

    Attributes:
      tasks: at least one, all of one pre-training.
      limit: K, examples; 0: none.
      temperature: 1 or more; the larger, the more alike are the shares.
    """

    tasks: tuple[Task, ...]
    limit: int = 0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.tasks or any(task.pretrained != self.tasks[0].pretrained for task in self.tasks):
            raise RecipeError(
                f"task mixture: {len(self.tasks)} tasks of {len({task.pretrained for task in self.tasks})} "
                "pre-trainings. Give one task or more, all of the data that the model was pre-trained on."
            )
        if self.limit < 0 or not 1 <= self.temperature < math.inf:
            raise RecipeError(
                f"task mixture: limit={self.limit} (examples; 0: none), temperature={self.temperature} (1 or more). "
                "Change data.limit or data.temperature."
            )

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text; see `Task.decode`."""
        return self.tasks[0].decode(tokens)

    def answer_text(self, tokens: np.ndarray) -> str:
        """The words of an answer; see `Task.answer_text`."""
        return self.tasks[0].answer_text(tokens)

    def marks(self) -> tuple[int, int]:
        """The token that a decoder begins with, and the one that ends a text."""
        return self.tasks[0].marks()

    def task_names(self) -> tuple[str, ...]:
        """The names of all tasks; those of one name have their numbers behind it."""
        names = [name for task in self.tasks for name in task.task_names()]
        several = {name for name, count in Counter(names).items() if count > 1}
        return tuple(f"{name}.{number}" if name in several else name for number, name in enumerate(names))

    def text_tokens(self) -> TextTokens:
        """The tokens of the pre-training; see `Task.text_tokens`."""
        return self.tasks[0].text_tokens()

    def ids_given(self) -> dict[str, IdRange]:
        """Tokens and sentinels of the pre-training."""
        return self.tasks[0].ids_given()

    def train(self) -> "MixedRows":
        """The examples to learn from."""
        parts = [task.train() for task in self.tasks]
        return MixedRows(_joined(parts), tuple(map(len, parts)), self.limit, self.temperature)

    def test(self) -> ArraySource:
        """The examples of all tasks to be judged by, one task behind the other."""
        return ArraySource(_joined([task.test() for task in self.tasks]))


def mixing_shares(examples: Sequence[int], limit: int = 0, temperature: float = 1.0) -> np.ndarray:
    """Returns the share of each task in what is read, float64; see `TaskMixture`."""
    capped = np.minimum(examples, limit or math.inf)
    scaled = (capped / capped.max()) ** (1 / temperature)
    return scaled / scaled.sum()


@dataclass(frozen=True, eq=False)
class MixedRows:
    """A source that reads of each task as many examples in an epoch as its share is.

    An epoch has as many examples as all tasks together below the limit. Each task goes through its own examples in
    orders of its own, each exactly once before any comes again: a task above the limit goes on in the next epoch where
    it stopped in the last one, and one that the temperature makes larger begins again within an epoch. What stands at
    which place of an epoch is a pure function of the seed and the epoch.

    Attributes:
      arrays: rows of all tasks, one task behind the other; their numbers are those of these rows.
      examples: how many each task has.
      limit, temperature: see `TaskMixture`.
    """

    arrays: HostBatch
    examples: tuple[int, ...]
    limit: int = 0
    temperature: float = 1.0

    def __len__(self) -> int:
        """How many examples are read in an epoch."""
        return sum(min(count, self.limit or count) for count in self.examples)

    @cached_property
    def quotas(self) -> np.ndarray:
        """How many examples of each task an epoch has, int64: shares of it, rounded so that they add up."""
        wanted = mixing_shares(self.examples, self.limit, self.temperature) * len(self)
        # Shares that are whole numbers are that but for round-off, which must not make one less of them.
        whole = np.floor(wanted + 1e-6).astype(np.int64)
        more = np.argsort(whole - wanted, kind="stable")[: len(self) - whole.sum()]
        whole[more] += 1
        return whole

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The rows with these numbers."""
        return {name: array[numbers] for name, array in self.arrays.items()}

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch

    def epoch_order(self, seed: int, epoch: int, batch: int) -> np.ndarray:
        """The numbers of the rows of an epoch, int64 [len]: not all of a task of many, perhaps twice those of few."""
        task = generator(seed, epoch).permutation(np.repeat(np.arange(len(self.examples)), self.quotas))
        order = np.empty(len(task), np.int64)
        firsts = np.cumsum([0, *self.examples])
        for number, (count, quota) in enumerate(zip(self.examples, self.quotas.tolist(), strict=True)):
            order[task == number] = firsts[number] + _own_numbers(number, count, seed, epoch * quota, quota)
        return order

    def identity(self) -> str:
        """The sizes of the tasks, how they are mixed, and a fingerprint of all rows."""
        rows = fingerprint(array.tobytes() for array in self.arrays.values())
        sizes = " + ".join(f"{count:,}" for count in self.examples)
        return f"{sizes} examples {rows}, limit {self.limit}, temperature {self.temperature:g}"


def _own_numbers(task: int, count: int, seed: int, first: int, length: int) -> np.ndarray:
    """Places `first` to `first + length` - 1 of a task's own order: pass after pass over its `count` examples."""
    passes, within = np.divmod(np.arange(first, first + length), count)
    numbers = np.empty(length, np.int64)
    for own in np.unique(passes):
        # The counter keeps it apart from the orders of epochs and from the draws of the augmentation.
        rng = np.random.Generator(np.random.Philox(key=seed, counter=[0, task + 1, 1, int(own)]))
        numbers[passes == own] = rng.permutation(count)[within[passes == own]]
    return numbers


def _joined(parts: Sequence[ArraySource]) -> HostBatch:
    """The rows of all parts, padded to the longest, and the number of each one's part as `task`."""
    joined = {}
    for name in parts[0].arrays:
        longest = max(part.arrays[name].shape[1] for part in parts)
        rows = [np.pad(part.arrays[name], ((0, 0), (0, longest - part.arrays[name].shape[1]))) for part in parts]
        joined[name] = np.concatenate(rows)
    return joined | {"task": np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])}
