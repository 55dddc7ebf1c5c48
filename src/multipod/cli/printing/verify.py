"""What `multipod verify` says, as text."""

from multipod.verify.rounding import LIMIT
from multipod.verify.verify import LayoutResult, RecipeVerdict


def result_text(result: LayoutResult) -> str:
    """A line for a layout, and one more for each thing that is wrong."""
    told = "differs" if result.wrong else "same"
    line = f"{told:8} {result.ratio:7.1f} x  {result.layout}"
    return "\n".join([line, *(f"         {wrong}" for wrong in result.wrong)])


def verdict_text(verdict: RecipeVerdict) -> str:
    """What became of all layouts, in a few sentences."""
    count, wrong = len(verdict.results), sum(bool(result.wrong) for result in verdict.results)
    largest = max((result.ratio for result in verdict.results), default=0.0)
    curve = max((result.curve for result in verdict.results), default=0.0)
    refused = sum(verdict.refused.values())
    told = f"{wrong} of {count} layouts learn something else" if wrong else f"{count} of {count} layouts learn the same"
    return (
        f"\n{verdict.recipe}, {verdict.updates} updates: {told}.\n"
        f"The number is how far an update is from float64, in errors of float32 on one device: {largest:.1f} at most, "
        f"{LIMIT:.0f} is the limit.\n"
        f"Losses differ from one device's by {curve:.1e} of themselves at most. {refused} draws were no layouts of "
        "this recipe."
    )
