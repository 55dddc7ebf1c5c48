"""The numbers of an event, under the names by which TensorBoard and experiment trackers show them."""

from multipod.train.events import Evaluated, Event, Saved, Updated


def scalars(event: Event) -> dict[str, float]:
    """Returns train/*, test/*, time/* (seconds) and rate/examples_per_s; nothing for events without numbers."""
    match event:
        case Updated():
            return {f"train/{name}": value for name, value in event.values.items()} | {
                "time/step_s": event.step_s,
                "time/data_s": event.data_s,
                "rate/examples_per_s": event.rate,
            }
        case Evaluated():
            return {f"test/{name}": value for name, value in event.values.items()} | {
                "time/evaluation_s": event.seconds
            }
        case Saved():
            return {"time/save_s": event.seconds}
        case _:
            return {}
