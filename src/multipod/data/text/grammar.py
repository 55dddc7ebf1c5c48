"""A translation task that needs no file: sentences that a small grammar makes, in English and in German.

German puts words elsewhere than English does: participles end the main clause, verbs end clauses with "dass" and
"weil", and articles and adjectives follow gender and case. A model that tells word by word gets few sentences right.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from multipod.data.order import generator
from multipod.data.pairs import Pairs
from multipod.data.sequences import token_file
from multipod.errors import DataError
from multipod.pytrees import IdRange

SPECIAL = ("[PAD]", "[START]", "[END]")
PAD, START, END = range(3)

NOUNS = (
    ("dog", "Hund", "m"), ("cat", "Katze", "f"), ("horse", "Pferd", "n"), ("man", "Mann", "m"), ("woman", "Frau", "f"),
    ("child", "Kind", "n"), ("baker", "Bäcker", "m"), ("teacher", "Lehrer", "m"), ("cow", "Kuh", "f"),
    ("girl", "Mädchen", "n"), ("tree", "Baum", "m"), ("city", "Stadt", "f"), ("house", "Haus", "n"),
    ("king", "König", "m"), ("queen", "Königin", "f"), ("sheep", "Schaf", "n"),
)  # fmt: skip
ADJECTIVES = (
    ("old", "alt"), ("small", "klein"), ("big", "groß"), ("young", "jung"), ("quiet", "still"), ("rich", "reich"),
    ("cheerful", "fröhlich"), ("clever", "klug"),
)  # fmt: skip
VERBS = (
    ("sees", "seen", "sieht", "gesehen"), ("hears", "heard", "hört", "gehört"),
    ("finds", "found", "findet", "gefunden"),
    ("looks for", "looked for", "sucht", "gesucht"), ("loves", "loved", "liebt", "geliebt"),
    ("draws", "drawn", "zeichnet", "gezeichnet"), ("asks", "asked", "fragt", "gefragt"),
    ("knows", "known", "kennt", "gekannt"),
)  # fmt: skip
SAYING = (("says", "sagt"), ("believes", "glaubt"), ("hopes", "hofft"))
ARTICLES = {
    # article, case: forms by gender, and the endings of an adjective behind them
    ("the", "subject"): ({"m": "der", "f": "die", "n": "das"}, {"m": "e", "f": "e", "n": "e"}),
    ("the", "object"): ({"m": "den", "f": "die", "n": "das"}, {"m": "en", "f": "e", "n": "e"}),
    ("a", "subject"): ({"m": "ein", "f": "eine", "n": "ein"}, {"m": "er", "f": "e", "n": "es"}),
    ("a", "object"): ({"m": "einen", "f": "eine", "n": "ein"}, {"m": "en", "f": "e", "n": "es"}),
}
Texts = tuple[str, str]


@dataclass(frozen=True)
class Grammar:
    """Sentences and their translations, one pair a row, in batches of like lengths (`multipod.data.pairs.Pairs`).

    Tokens are words. No sentence of the test set is among those to learn from.

    Attributes:
      train_pairs, test_pairs: how many of each.
      buckets: tokens of a row of either side in a batch, growing; the longest sentence has 20 with its end.
      seed: of the sentences; not the seed of a run.
    """

    train_pairs: int = 16_000
    test_pairs: int = 500
    buckets: tuple[int, ...] = (10, 15, 20)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train_pairs < 1 or self.test_pairs < 1:
            raise DataError(f"grammar: {self.train_pairs} pairs to learn from and {self.test_pairs} to be judged by.")

    def train(self) -> Pairs:
        """The pairs to learn from."""
        return self._pairs(slice(self.test_pairs, None), self.buckets)

    def test(self) -> Pairs:
        """The pairs to be judged by."""
        return self._pairs(slice(self.test_pairs), self.buckets[-1:])

    def ids_given(self) -> dict[str, IdRange]:
        """Words, the same on both sides."""
        return dict.fromkeys(("source", "target", "label"), IdRange((len(self.words),), "vocab"))

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text, up to the first that ends it."""
        ended = np.flatnonzero(tokens == END)
        told = tokens[: ended[0] if len(ended) else None]
        text = " ".join(self.words[token] for token in told if token != PAD)
        return text.replace(" .", ".").replace(" ,", ",")

    def marks(self) -> tuple[int, int]:
        """The token that a decoder begins with, and the one that ends a text."""
        return START, END

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Every word of both languages behind the special tokens."""
        return (*SPECIAL, *known_words())

    def _pairs(self, part: slice, bounds: tuple[int, ...]) -> Pairs:
        numbers = {word: number for number, word in enumerate(self.words)}
        chosen = _sentences(self.train_pairs + self.test_pairs, self.seed)[part]
        source, label = (
            token_file([np.array([*map(numbers.__getitem__, text.split()), *end], np.int32) for text in texts])
            for texts, end in zip(zip(*chosen, strict=True), ((), (END,)), strict=True)
        )
        return Pairs(source, label, tuple((length, length) for length in bounds), START)


@lru_cache(maxsize=1)
def known_words() -> tuple[str, ...]:
    """Every word that a sentence can have, in alphabetical order."""
    phrases = [text for row in (*ADJECTIVES, *VERBS, *SAYING) for text in row]
    phrases += [text for english, german, _ in NOUNS for text in (english, german)]
    phrases += [german + ending for _, german in ADJECTIVES for ending in ("e", "en", "er", "es")]
    phrases += [form for forms, _ in ARTICLES.values() for form in forms.values()]
    phrases += ["the a that because has .", "dass weil hat ,"]
    return tuple(sorted({word for phrase in phrases for word in phrase.split()}))


@lru_cache(maxsize=4)
def _sentences(count: int, seed: int) -> list[Texts]:
    """So many different sentences."""
    rng = generator(seed, 0)
    found: dict[Texts, None] = {}
    while len(found) < count:
        found[_sentence(rng)] = None
    return list(found)


def _sentence(rng: np.random.Generator) -> Texts:
    """A main clause, which may be followed by a reason or be about what somebody says."""
    kind = rng.integers(4)
    if kind == 3:
        who, says, what = _thing(rng, "subject"), SAYING[rng.integers(len(SAYING))], _clause(rng, last=True)
        english, german = (
            f"{who[side]} {says[side]} {that} {what[side]}" for side, that in enumerate(("that", ", dass"))
        )
    elif kind == 2:
        first, reason = _clause(rng, last=False), _clause(rng, last=True)
        english, german = (f"{first[side]} {why} {reason[side]}" for side, why in enumerate(("because", ", weil")))
    else:
        english, german = _clause(rng, last=False)
    return f"{english} .", f"{german} ."


def _clause(rng: np.random.Generator, *, last: bool) -> Texts:
    """Somebody does or did something to somebody; with `last`, German has the verb at the end."""
    who, whom = _thing(rng, "subject"), _thing(rng, "object")
    now, done, jetzt, getan = VERBS[rng.integers(len(VERBS))]
    if rng.random() < 0.5:
        ending = f"{whom[1]} {jetzt}" if last else f"{jetzt} {whom[1]}"
        return f"{who[0]} {now} {whom[0]}", f"{who[1]} {ending}"
    ending = f"{whom[1]} {getan} hat" if last else f"hat {whom[1]} {getan}"
    return f"{who[0]} has {done} {whom[0]}", f"{who[1]} {ending}"


def _thing(rng: np.random.Generator, case: str) -> Texts:
    """An article, at times an adjective, and a noun."""
    noun, nomen, gender = NOUNS[rng.integers(len(NOUNS))]
    article = ("the", "a")[rng.integers(2)]
    forms, endings = ARTICLES[article, case]
    if rng.random() < 0.5:
        return f"{article} {noun}", f"{forms[gender]} {nomen}"
    adjective, adjektiv = ADJECTIVES[rng.integers(len(ADJECTIVES))]
    return f"{article} {adjective} {noun}", f"{forms[gender]} {adjektiv}{endings[gender]} {nomen}"
