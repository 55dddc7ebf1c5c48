"""Arguments of other embedding bags that have no counterpart here: refused by name, with what to do in their place."""

from typing import Any

from multipod.errors import RecipeError

RATE = "the update is not done in backward: leave it out, and give parameters() to torch.optim.SGD or Adagrad"
CACHE = "there is no cache of rows, each id of a batch is looked up once: leave it out"
ABSENT: dict[str, tuple[tuple[Any, ...], str]] = {
    "optimizer": ((None,), RATE),
    "learning_rate": ((None,), RATE),
    "eps": ((None,), RATE),
    "use_cache": ((None, False), CACHE),
    "cache_size": ((None, 0), CACHE),
    "hashtbl_size": ((None, 0), CACHE),
    "enforce_embedding_dim": ((None, False, True), ""),
    "max_norm": ((None,), "a row has no numbers of its own to be scaled: leave it out, or clip the gradients"),
    "norm_type": ((None, 2, 2.0), "it is of max_norm, which is not there: leave it out"),
    "scale_grad_by_freq": (
        (None, False),
        "rows share their cores: leave it out, or give per_sample_weights of one over the counts",
    ),
    "_weight": ((None,), "a table becomes cores by TTEmbeddingBag.from_pretrained: call that"),
}
"""The values that change nothing, and for all others what to do."""


def refuse_absent(given: dict[str, Any]) -> None:
    """Refuses arguments of `nn.EmbeddingBag` and of FBTT's TTEmbeddingBag that are not there, all at once.

    Raises:
      RecipeError: for a value that would change something.
      TypeError: a name that neither has.
    """
    unknown = [name for name in given if name not in ABSENT]
    if unknown:
        raise TypeError(f"TTEmbeddingBag has no argument {', '.join(map(repr, unknown))}")
    wrong = [
        f"{name}={value!r}: {ABSENT[name][1]}"
        for name, value in given.items()
        if not any(value is harmless or value == harmless for harmless in ABSENT[name][0])
    ]
    if wrong:
        raise RecipeError(f"TTEmbeddingBag: {'; '.join(wrong)}.")


def check_mode(mode: str) -> None:
    """Refuses modes but "sum" and "mean"."""
    if mode == "max":
        raise RecipeError(
            "TTEmbeddingBag: mode='max' needs every row of a bag at once, and rows are added as they are made. "
            "Take mode='sum' or 'mean', or look rows up (input [ids, 1]) and take their maximum."
        )
    if mode not in ("sum", "mean"):
        raise RecipeError(f"TTEmbeddingBag: mode={mode!r} is none of 'sum', 'mean'. Give one of these.")
