"""GNMT on WMT's English and German, and a small one on sentences of a grammar.

    multipod train gnmt --set data.train_files=wmt16/train.{en,de} --set data.test_files=wmt16/newstest2014.{en,de} \\
        --set data.vocabulary=wmt16/bpe.32000.codes --log mlperf
    multipod train gnmt-small

The published runs had batches of 4,096 or 8,192 sentences of like lengths, the same length on all hosts.
"""

from multipod.data.text.grammar import Grammar
from multipod.data.text.translation import TextPairs
from multipod.metrics.translation import Bleu
from multipod.models.gnmt import Gnmt, small_gnmt
from multipod.optim.adamw import AdamW
from multipod.optim.presets import find_preset
from multipod.optim.rates import Cosine, WarmUp
from multipod.optim.translators import WMT16_PAIRS
from multipod.recipe.recipe import Recipe

VOCAB = 32_320
"""The reference's 32,000 merges and single letters, as NVIDIA's log of v0.6 has it."""


def gnmt() -> Recipe:
    """GNMT on WMT16, batch 8,192, to BLEU 24 (MLPerf v0.7). Needs data.train_files and data.test_files."""
    run = find_preset("gnmt-adam").at(8192)
    every = WMT16_PAIRS // run.batch
    return Recipe(
        name="gnmt",
        model=Gnmt(VOCAB, dtype="bfloat16"),
        data=TextPairs(vocab=VOCAB, length=50, buckets=(10, 20, 30, 40, 50), test_length=160),
        # A token weighs the same in every sentence, and the mean is over sentences, as in the reference.
        objective=Bleu(tokens_per_example=1.0, label_smoothing=0.1, beam=5, extra=50, tokenize="intl", lowercase=True),
        optimizer=run.optimizer,
        batch=run.batch,
        updates=run.updates,
        evaluate_every=every,
        evaluation_batch=1024,
        checkpoint_every=every,
        preset="gnmt-adam",
        target="bleu >= 24",
    )


def gnmt_small() -> Recipe:
    """A small GNMT on English and German sentences of a grammar, to BLEU 90; minutes on two cores. Extra `bleu`."""
    data = Grammar()
    return Recipe(
        name="gnmt-small",
        model=small_gnmt(len(data.words)),
        data=data,
        objective=Bleu(tokens_per_example=data.buckets[-1], beam=5, extra=5),
        optimizer=AdamW(WarmUp(Cosine(5e-3), 0.1), clip=5.0),
        batch=64,
        updates=800,
        evaluate_every=200,
        evaluation_batch=250,
        checkpoint_every=200,
        target="bleu >= 90",
    )
