"""What a shell offers behind TAB: recipes, machines, collectives, algorithms.

Each function is a `shell_complete` of Click, and imports what it lists when a shell asks.
"""

from collections.abc import Iterable

from click import Context, Parameter
from click.shell_completion import CompletionItem


def recipes(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of recipes; files where no name begins so."""
    from multipod.recipes.find import RECIPES

    return _beginning(RECIPES, incomplete) or [CompletionItem(incomplete, type="file")]


def planned(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of recipes and of published models; files where no name begins so."""
    from multipod.plan.tables.models import MODELS
    from multipod.recipes.find import RECIPES

    return _beginning({*RECIPES, *MODELS}, incomplete) or [CompletionItem(incomplete, type="file")]


def machines(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of machines and the kinds of topology whose size follows a colon."""
    from multipod.topology.machines import MACHINES, PLAIN

    return _beginning([*MACHINES, *(f"{kind}:" for kind in PLAIN)], incomplete)


def collectives(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of collectives."""
    from multipod.collectives.schedule import COLLECTIVES

    return _beginning(COLLECTIVES, incomplete)


def algorithms(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of algorithms that build schedules."""
    from multipod.collectives.build import ALGORITHMS

    return _beginning(ALGORITHMS, incomplete)


def gradient_sums(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of all that adds or combines gradients."""
    from multipod.collectives.build import ALGORITHMS
    from multipod.layout.sync import BUILT_IN_SUMS, COMBINATIONS

    return _beginning([*BUILT_IN_SUMS, *COMBINATIONS, *ALGORITHMS], incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
