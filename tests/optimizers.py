"""An optimizer by its name, with those of the options that it has."""

from dataclasses import fields

from multipod.optim.optimizer import Optimizer
from multipod.optim.optimizers import OPTIMIZERS
from multipod.optim.rates import Rate


def make_optimizer(name: str, rate: Rate, **options) -> Optimizer:
    """`OPTIMIZERS[name]` at this rate, with those `options` that are among its fields."""
    kind = OPTIMIZERS[name]
    known = {field.name for field in fields(kind)}
    return kind(rate, **{option: value for option, value in options.items() if option in known})
