"""A small BERT that tells masked tokens of Python's own standard library; some minutes on two cores."""

from multipod.data.stdlib_text import Masking, StdlibText
from multipod.metrics.objective import TokenClassification
from multipod.models.bert import tiny_bert
from multipod.optim.adamw import AdamW
from multipod.optim.rates import Cosine, WarmUp
from multipod.recipe.recipe import Recipe


def stdlib_lm() -> Recipe:
    """Masked language model on the standard library's top-level modules. Needs the extra `text`."""
    vocab, length = 1024, 64
    masking = Masking(most=10)
    return Recipe(
        name="stdlib-lm",
        model=tiny_bert(vocab, length),
        data=StdlibText(length=length, vocab=vocab, masking=masking),
        objective=TokenClassification(tokens_per_example=masking.most),  # every token weighs the same
        optimizer=AdamW(WarmUp(Cosine(2e-3), 0.1), weight_decay=0.01),
        batch=64,
        updates=900,
        evaluate_every=300,
        evaluation_batch=256,
        checkpoint_every=300,
    )
