"""Checks of the numbers of optimizers and rates, under the names by which `--set` changes them."""

from multipod.errors import RecipeError


def positive(**numbers: float) -> list[str]:
    """What is wrong with numbers that must be positive; NaN always is."""
    return [f"optimizer.{name}={n} must be positive" for name, n in numbers.items() if not n > 0]


def not_negative(**numbers: float) -> list[str]:
    """What is wrong with numbers that must be at least 0."""
    return [f"optimizer.{name}={n} must be at least 0" for name, n in numbers.items() if not n >= 0]


def below_one(**numbers: float) -> list[str]:
    """What is wrong with factors of moving means."""
    return [f"optimizer.{name}={n} must be at least 0 and below 1" for name, n in numbers.items() if not 0 <= n < 1]


def refuse(wrong: list[str]) -> None:
    """Raises one `RecipeError` with everything that is wrong, if anything is."""
    if wrong:
        raise RecipeError(f"{'; '.join(wrong)}. Change it in the recipe or with --set.")
