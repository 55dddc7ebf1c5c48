"""BERT-large's pre-training in its two phases, on text or on rows that were packed before.

    multipod train bert-large-phase1 --set data.train_files=wiki-128/part-* --set data.test_files=eval-128
    multipod train bert-large --from runs/bert-large-phase1-001 --set data.train_files=wiki/part-* \\
        --set data.test_files=eval/eval_10k

The files are packed TFRecords, as MLPerf's, or text (`multipod.data.text.pretraining`); for text name BERT's list of
word pieces, `--set data.vocabulary=vocab.txt`, or leave it out, and tokens are trained on the text.
"""

from multipod.data.stdlib_text import Masking
from multipod.data.text.pretraining import PretrainingText
from multipod.metrics.pretraining import Pretraining
from multipod.models.bert import Bert
from multipod.optim.lamb import Lamb
from multipod.optim.presets import find_preset
from multipod.optim.rates import Polynomial, WarmUp
from multipod.recipe.recipe import Recipe

ROWS_BETWEEN_EVALUATIONS = 62 * 8192
"""As in the MLPerf v0.7 submission of arXiv:2011.03641."""


def bert_large_phase1() -> Recipe:
    """BERT-large, rows of 128 tokens, batch 65,536, LAMB, 7,038 updates. Needs data.train_files, data.test_files.

    Batch, rate, warm-up and length are those of NVIDIA's public BERT code for LAMB (arXiv:1904.00962), which follows
    the paper's phases; the fall of the rate by its root, the weight decay and the clipping were noted second-hand.
    """
    rate = WarmUp(Polynomial(6e-3, end=0.0, power=0.5), 0.2843)
    return Recipe(
        name="bert-large-phase1",
        model=Bert(dtype="bfloat16"),
        data=PretrainingText(length=128, masking=Masking(most=20)),
        objective=Pretraining(),
        optimizer=Lamb(rate, weight_decay=0.01, clip=1.0),
        batch=65_536,
        updates=7038,
        evaluate_every=500,
        evaluation_batch=8192,
        checkpoint_every=500,
    )


def bert_large() -> Recipe:
    """BERT-large, rows of 512 tokens, batch 8,192, LAMB, to accuracy 0.712 (MLPerf v0.7). Needs data files."""
    run = find_preset("bert-lamb").at(8192)
    every = ROWS_BETWEEN_EVALUATIONS // run.batch
    return Recipe(
        name="bert-large",
        model=Bert(dtype="bfloat16"),
        data=PretrainingText(length=512, masking=Masking(most=76)),
        objective=Pretraining(),
        optimizer=run.optimizer,
        batch=run.batch,
        updates=run.updates,
        evaluate_every=every,
        evaluation_batch=run.batch,
        checkpoint_every=every,
        preset="bert-lamb",
        target="accuracy >= 0.712",
    )
