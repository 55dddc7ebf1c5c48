"""A small encoder-decoder that writes the first line of a docstring for code of Python's own standard library."""

from multipod.data.docstrings import Docstrings
from multipod.metrics.objective import TokenClassification
from multipod.models.transformer import small_transformer
from multipod.optim.adamw import AdamW
from multipod.optim.rates import Cosine, WarmUp
from multipod.recipe.recipe import Recipe


def stdlib_docs() -> Recipe:
    """Translation from code to its docstring's first line, on the standard library. Needs the extra `text`."""
    data = Docstrings()
    return Recipe(
        name="stdlib-docs",
        model=small_transformer(data.vocab),
        data=data,
        objective=TokenClassification(tokens_per_example=data.target_length, label_smoothing=0.1),
        optimizer=AdamW(WarmUp(Cosine(1e-3), 0.1), weight_decay=0.01),
        batch=64,
        updates=600,
        evaluate_every=200,
        evaluation_batch=256,
        checkpoint_every=200,
    )
