"""What a shell offers behind TAB: recipes, machines, collectives, algorithms. Each function is a `shell_complete`."""

from collections.abc import Iterable

from click import Context, Parameter
from click.shell_completion import CompletionItem

from multipod.collectives.build import ALGORITHMS
from multipod.collectives.schedule import COLLECTIVES
from multipod.layout.sync import BUILT_IN_SUMS, COMBINATIONS
from multipod.plan.tables.models import MODELS
from multipod.topology.machines import MACHINES, PLAIN


def recipes(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of recipes; files where no name begins so."""
    return _recipes_and((), incomplete)


def planned(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of recipes and of published models; files where no name begins so."""
    return _recipes_and(MODELS, incomplete)


def machines(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of machines and the kinds of topology whose size follows a colon."""
    return _beginning([*MACHINES, *(f"{kind}:" for kind in PLAIN)], incomplete)


def collectives(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of collectives."""
    return _beginning(COLLECTIVES, incomplete)


def algorithms(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of algorithms that build schedules."""
    return _beginning(ALGORITHMS, incomplete)


def gradient_sums(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of all that adds or combines gradients."""
    return _beginning([*BUILT_IN_SUMS, *COMBINATIONS, *ALGORITHMS], incomplete)


def _recipes_and(others: Iterable[str], incomplete: str) -> list[CompletionItem]:
    from multipod.recipes.find import RECIPES  # which imports JAX: only when a shell asks

    return _beginning({*RECIPES, *others}, incomplete) or [CompletionItem(incomplete, type="file")]


def _beginning(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
