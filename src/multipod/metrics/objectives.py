"""The objectives by the names that `--set objective=NAME` takes."""

from multipod.metrics.binary import BinaryClassification
from multipod.metrics.detection import Detection
from multipod.metrics.objective import Classification, TokenClassification
from multipod.metrics.pretraining import Pretraining
from multipod.metrics.sparse import SparseTokens
from multipod.metrics.text_to_text import TextToText
from multipod.metrics.translation import Bleu

OBJECTIVES: dict[str, type] = {
    "auc": BinaryClassification,
    "bleu": Bleu,
    "classification": Classification,
    "detection": Detection,
    "pretraining": Pretraining,
    "sparse-tokens": SparseTokens,
    "text-to-text": TextToText,
    "tokens": TokenClassification,
}
"""Every objective by its name."""
