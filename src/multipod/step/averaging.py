"""The moving average of the weights (`multipod.optim.ema`) in the programs of a run: how it is kept and read."""

from multipod.optim.ema import Ema, EmaState
from multipod.step.guard import Learnt
from multipod.step.post_update import PostUpdate
from multipod.step.specs import keep, whole_tensors
from multipod.step.state import State
from multipod.step.sync.sync import GradientSync


def average_after(post_update: PostUpdate, sync: GradientSync) -> PostUpdate:
    """The hook after an update that also averages the statistics; `post_update` itself without `ema`."""
    ema = sync.placement.recipe.ema
    return post_update if ema is None else lambda learnt, update: _followed(ema, sync, post_update(learnt, update))


def _followed(ema: Ema, sync: GradientSync, learnt: Learnt) -> Learnt:
    params, statistics, optimizer = learnt
    before = whole_tensors(optimizer.statistics, sync.placement.mesh)
    averaged = ema.follow(before, statistics, optimizer.updates)
    kept = keep(averaged, sync.flat_update.state_shares.statistics)
    return params, statistics, optimizer._replace(statistics=kept)


def averaged_state(state: State) -> State:
    """`state` with the averages in place of parameters and statistics, where it has them; without the optimizer's."""
    average = state.optimizer
    if not isinstance(average, EmaState):
        return state._replace(optimizer=None)
    return state._replace(params=average.params, statistics=average.statistics, optimizer=None)
