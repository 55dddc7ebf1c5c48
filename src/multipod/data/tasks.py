"""Text-to-text tasks: JSON lines, `{"input": "...", "target": "..."}`, or two columns of a Hugging Face data set."""

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from multipod.data.files.formats import open_records
from multipod.data.files.hub import PREFIX
from multipod.data.source import ArraySource
from multipod.data.span_corruption import SpanCorruption, teacher_forced
from multipod.data.text.files import TextFiles
from multipod.data.text.kept_tokens import text_of
from multipod.data.text.text_tokens import TextTokens
from multipod.errors import RecipeError
from multipod.pytrees import IdRange

SHOWN = 5


@dataclass(frozen=True)
class Task:
    """Pairs of texts to fine-tune on, cut into tokens as the pre-training's text was.

    Attributes:
      file: a file of JSON lines, each with the texts `input` and `target`; or a data set, `hub:NAME:SPLIT` or a folder
        that `Dataset.save_to_disk` wrote.
      pretrained: the data of the pre-training, for its tokens and its vocabulary; `TextFiles` with spans.
      test_every: every so many lines one is for testing, from the first on.
      sentinels: `input` ends with a sentinel and `target` begins with it, as a span that is to be told; it helps tasks
        that resemble span corruption (arXiv:2202.08906, table 7).
      longest: rows are as long as the longest text needs, and no text may need more tokens than this.
      input_field: of a data set, the column with the inputs.
      target_field: the same of the targets.
    """

    file: str
    pretrained: SpanCorruption | TextFiles = field(default_factory=SpanCorruption)
    test_every: int = 5
    sentinels: bool = True
    longest: int = 1024
    input_field: str = "input"
    target_field: str = "target"

    def __post_init__(self) -> None:
        if self.test_every < 2:
            raise RecipeError(f"task: test_every={self.test_every} leaves no line to learn from. Take 2 or more.")

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text; see `SpanCorruption.decode`."""
        return self.pretrained.decode(tokens)

    def answer_text(self, tokens: np.ndarray) -> str:
        """The words of an answer, without special tokens and sentinels."""
        return self.text_tokens().decode(tokens)

    def marks(self) -> tuple[int, int]:
        """The token that a decoder begins with, and the one that ends a text."""
        tokens = self.text_tokens()
        return tokens.start, tokens.end

    def task_names(self) -> tuple[str, ...]:
        """What the task is called: its file's name without the ending, or the data set's."""
        name = self.file.removeprefix(PREFIX).split(":")[0] if self.file.startswith(PREFIX) else Path(self.file).stem
        return (re.sub(r"[^\w.-]", "_", name.rpartition("/")[2]),)

    def text_tokens(self) -> TextTokens:
        """The tokens of the pre-training.

        Raises:
          RecipeError: it hides no spans, so that its vocabulary has no sentinels.
        """
        tokens = self.pretrained.text_tokens()
        if tokens is None:
            raise RecipeError("task: the text of the pre-training hides no spans. Pre-train with data.spans=true.")
        return tokens

    def ids_given(self) -> dict[str, IdRange]:
        """Tokens and sentinels of the pre-training."""
        return {name: ids._replace(field="") for name, ids in self.pretrained.ids_given().items()}

    def train(self) -> ArraySource:
        """The lines to learn from."""
        return self._part(test=False)

    def test(self) -> ArraySource:
        """The lines to be judged by."""
        return self._part(test=True)

    def _part(self, *, test: bool) -> ArraySource:
        arrays = _arrays(self)
        number = np.arange(len(arrays["source"]))
        chosen = (number % self.test_every == 0) == test
        return ArraySource({name: array[chosen] for name, array in arrays.items()})


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """The pairs of the file.

    Raises:
      RecipeError: no such file, fewer than two pairs, or lines that are none, all of which are named.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"task {path}: it cannot be read: {error}. Give a file of JSON lines in UTF-8.") from error
    pairs, wrong = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = _pair(line)
        if isinstance(found, str):
            wrong.append(f"line {number}: {found}")
        else:
            pairs.append(found)
    if wrong:
        more = f"\n  and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise RecipeError(
            f"task {path}: {len(wrong)} of {len(lines)} lines are no pairs of texts:\n  "
            + "\n  ".join(wrong[:SHOWN])
            + more
            + '\nWrite each as {"input": "...", "target": "..."}.'
        )
    if len(pairs) < 2:
        raise RecipeError(f"task {path}: it has {len(pairs)} pairs. Give at least two: one to learn from, one to test.")
    return pairs


def _pair(line: str) -> tuple[str, str] | str:
    """The pair, or what is wrong."""
    try:
        value = json.loads(line)
    except ValueError as error:
        return f"no JSON ({error})"
    if not isinstance(value, dict):
        return f"a {type(value).__name__}, not an object"
    bad = [name for name in ("input", "target") if not isinstance(value.get(name), str)]
    if bad:
        return f"no text {' and no text '.join(map(repr, bad))} among {', '.join(value) or 'nothing'}"
    return value["input"], value["target"]


def _pairs(task: Task) -> list[tuple[str, str]]:
    """The pairs of a file, or of the rows of a data set.

    Raises:
      RecipeError: see `read_pairs`.
      DataError: no such data set, or a row without one of the two texts.
    """
    if not task.file.startswith(PREFIX) and not Path(task.file).is_dir():
        return read_pairs(Path(task.file))
    rows = open_records(task.file)
    return [(text_of(rows, n, task.input_field), text_of(rows, n, task.target_field)) for n in range(len(rows))]


@lru_cache(maxsize=16)
def _arrays(task: Task) -> dict[str, np.ndarray]:
    pairs, tokens = _pairs(task), task.text_tokens()
    sentinel = [tokens.sentinel] if task.sentinels else []
    inputs, targets = (tokens.encode(several) for several in zip(*pairs, strict=True))
    sources = [np.array([*one, *sentinel, tokens.end], np.int32) for one in inputs]
    labels = [np.array([*sentinel, *one, tokens.end], np.int32) for one in targets]
    return teacher_forced(_padded(sources, task, "input"), _padded(labels, task, "target"), tokens.start)


def _padded(rows: list[np.ndarray], task: Task, name: str) -> np.ndarray:
    longest = max(map(len, rows))
    if longest > task.longest:
        over = sum(len(row) > task.longest for row in rows)
        raise RecipeError(
            f"task {task.file}: {over} of {len(rows)} texts {name!r} need more than {task.longest} tokens, the longest "
            f"{longest}. Cut them, or set data.longest={longest}."
        )
    return np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
