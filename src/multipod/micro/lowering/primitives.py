"""The table of primitives: what each becomes. A new one is a function in a file beside this and a line in its RULES."""

from multipod.micro.lowering import elementwise, linear, loops, shapes, windows
from multipod.micro.lowering.lower import Rule

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **shapes.RULES,
    **linear.RULES,
    **windows.RULES,
    **loops.RULES,
}
