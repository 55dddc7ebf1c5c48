"""The numbers of docs/verify.md: what naive ways make of ten test examples, and what ours make."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from sklearn.metrics import roc_auc_score

from multipod.metrics.objective import masked_sums, means
from multipod.metrics.ranking import auc

PAGE = Path(__file__).parents[1] / "docs" / "verify.md"
RIGHT = np.array([1, 1, 0, 1, 1, 1, 1, 0, 0, 0], bool)
LABELS = np.array([1, 0, 1, 0, 1, 1, 0, 0, 1, 0], np.int32)
SCORES = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.35, 0.1], np.float32)
BATCHES = (slice(0, 4), slice(4, 8), slice(8, 10))


def padded(values: np.ndarray) -> np.ndarray:
    """The last batch of two, with its last example repeated to four."""
    return np.concatenate([values, values[-1:], values[-1:]])


def test_the_page_has_the_numbers_of_every_way() -> None:
    counted = masked_sums(
        {"loss": jnp.zeros(12), "accuracy": jnp.asarray(padded(RIGHT))}, jnp.asarray(np.arange(12) < 10)
    )
    by_batch = [roc_auc_score(LABELS[rows], SCORES[rows]) for rows in BATCHES]
    rows = {
        "padding counted": padded(RIGHT).mean(),
        "mean of the batches' means": np.mean([RIGHT[rows].mean() for rows in BATCHES]),
        "last batch dropped": RIGHT[:8].mean(),
        "each example once (ours)": means(counted)["accuracy"],
        "mean of the batches' AUC": np.mean(by_batch),
        "AUC of all examples (ours)": auc(LABELS, SCORES),
    }
    assert np.isclose(rows["AUC of all examples (ours)"], roc_auc_score(LABELS, SCORES))
    assert int(counted["count"]) == 10
    told = dict(re.findall(r"^\| ([^|]+?) \| (\d\.\d{3}) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert told == {name: f"{value:.3f}" for name, value in rows.items()}
