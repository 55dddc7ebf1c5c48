"""The table of all optimizers."""

from multipod.optim.adafactor import Adafactor
from multipod.optim.adagrad import Adagrad, RowwiseAdagrad
from multipod.optim.adamw import AdamW
from multipod.optim.lamb import Lamb
from multipod.optim.lars import Lars, LarsScaled
from multipod.optim.lion import Lion
from multipod.optim.optimizer import Optimizer
from multipod.optim.rmsprop import RmsProp
from multipod.optim.sgd import Sgd
from multipod.optim.sm3 import Sm3

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adafactor": Adafactor,
    "adagrad": Adagrad,
    "adamw": AdamW,
    "lamb": Lamb,
    "lars": Lars,
    "lars_scaled": LarsScaled,
    "lion": Lion,
    "rmsprop": RmsProp,
    "rowwise_adagrad": RowwiseAdagrad,
    "sgd": Sgd,
    "sm3": Sm3,
}
"""Every optimizer: its name, which `--set optimizer=` takes, and its dataclass."""
