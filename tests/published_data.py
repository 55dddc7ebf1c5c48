"""Small made-up data in the formats in which users have those of the published recipes."""

import random
from pathlib import Path

import numpy as np

from multipod.data.files.tfrecord import write_tfrecord

WORDS = tuple(
    "the a of number and train test with model data is was red green blue house tree river".split()  # noqa: SIM905
)


def sentence(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 12))).capitalize() + "."


def documents(count: int = 30, seed: int = 0) -> list[list[str]]:
    draw = random.Random(seed)
    return [[sentence(draw) for _ in range(draw.randint(2, 9))] for _ in range(count)]


def pairs(count: int = 60, seed: int = 1) -> list[tuple[str, str]]:
    draw = random.Random(seed)
    found = [sentence(draw) for _ in range(count)]
    return [(one, " ".join(reversed(one.split()))) for one in found]


def packed_rows(count: int, length: int, most: int) -> list[dict]:
    """Records as BERT's own code and MLPerf write them."""
    rng, records = np.random.default_rng(0), []
    for k in range(count):
        used, told = int(rng.integers(10, length)), int(rng.integers(1, most + 1))
        places = np.arange(length)
        masked = np.sort(rng.choice(np.arange(1, used), told, replace=False))
        records.append(
            {
                "input_ids": np.where(places < used, rng.integers(5, 90, length), 0),
                "input_mask": (places < used).astype(int),
                "segment_ids": ((places > used // 2) & (places < used)).astype(int),
                "masked_lm_positions": np.pad(masked, (0, most - told)),
                "masked_lm_ids": np.pad(rng.integers(5, 90, told), (0, most - told)),
                "masked_lm_weights": (np.arange(most) < told).astype(np.float32),
                "next_sentence_labels": k % 2,
            }
        )
    return records


def write_packed(path: Path, count: int, length: int, most: int) -> Path:
    write_tfrecord(path, packed_rows(count, length, most))
    return path


def write_pairs(folder: Path, name: str, found: list[tuple[str, str]]) -> str:
    """Two files of lines; returns the pattern of both."""
    for language, side in zip(("en", "de"), zip(*found, strict=True), strict=True):
        (folder / f"{name}.{language}").write_text("\n".join(side) + "\n")
    return f"{folder}/{name}.{{en,de}}"
