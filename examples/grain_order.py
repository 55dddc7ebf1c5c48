"""Grain reads in our order, on three processes and after a stop: python examples/grain_order.py"""

from grain.python import DataLoader, ShardOptions

from multipod.data.digits import Digits
from multipod.data.grain_pipelines import ExactlyOnce, SourceElements

examples = SourceElements(Digits().train())


def loader(process: int) -> DataLoader:
    """What one of three processes reads."""
    sampler = ExactlyOnce(len(examples), seed=0, epochs=1)
    return DataLoader(
        data_source=range(len(examples)), sampler=sampler, shard_options=ShardOptions(process, 3), worker_count=0
    )


read = [number for process in range(3) for number in loader(process)]
print(f"read {len(read):,} examples, {len(set(read)):,} of them different")

first = iter(loader(0))
begun = [next(first) for _ in range(100)]
again = iter(loader(0))
again.set_state(first.get_state())
print("after a stop the rest is the same:", begun + list(again) == list(loader(0)))
