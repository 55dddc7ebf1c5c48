"""The program of a recipe on a mesh, whatever its layout: whole, or in the stages of a pipeline."""

from jax.sharding import AbstractMesh, Mesh

from multipod.recipe.recipe import Recipe
from multipod.step.program import Program
from multipod.step.staged import StagedProgram

AnyProgram = Program | StagedProgram
"""What the loop trains."""


def program_of(recipe: Recipe, mesh: Mesh | AbstractMesh, faulty: bool = False) -> AnyProgram:
    """The programs of `recipe` on `mesh`, which is its layout's. Nothing is compiled or checked yet.

    `faulty` is as of `Program`; no bit is flipped in stages.
    """
    return StagedProgram(recipe, mesh) if recipe.layout.stages > 1 else Program(recipe, mesh, faulty)
