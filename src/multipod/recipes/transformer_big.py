"""The Transformer "big" on WMT's English and German, from files of lines or from Hugging Face's Parquet files.

multipod train transformer-big --set data.train_files=wmt/train.{en,de} --set data.test_files=wmt/newstest2014.{en,de}
multipod train transformer-big --set data.train_files=wmt/train-*.parquet --set data.test_files=wmt/test-*.parquet
"""

from multipod.data.text.translation import TextPairs
from multipod.metrics.translation import Bleu
from multipod.models.transformer import Transformer
from multipod.optim.presets import find_preset
from multipod.recipe.recipe import Recipe

UPDATES_IN_AN_EPOCH = 277
"""Of 2,048 packed rows of WMT17, in the MLPerf v0.7 logs (arXiv:2011.03641)."""
EPOCHS = 10


def transformer_big() -> Recipe:
    """Transformer "big" on WMT, batch 2,048, to BLEU 25 (MLPerf v0.7). Needs data.train_files and data.test_files."""
    run = find_preset("transformer-adam-jax").at(2048)
    data = TextPairs()
    return Recipe(
        name="transformer-big",
        model=Transformer(data.vocab, dtype="bfloat16"),
        data=data,
        objective=Bleu(tokens_per_example=data.length, label_smoothing=0.1),
        optimizer=run.optimizer,
        batch=run.batch,
        updates=EPOCHS * UPDATES_IN_AN_EPOCH,
        evaluate_every=UPDATES_IN_AN_EPOCH,
        evaluation_batch=run.batch,
        checkpoint_every=UPDATES_IN_AN_EPOCH,
        preset="transformer-adam-jax",
        target="bleu >= 25",
    )
