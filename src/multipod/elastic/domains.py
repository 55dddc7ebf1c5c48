"""Which processes a failure takes away together, and so who keeps copies for whom."""

from collections import Counter
from collections.abc import Sequence


def place_of(host: str, rack: str = "") -> str:
    """A place as `World.places` has it: of a host, in a rack if that is known."""
    return f"{rack}/{host}" if rack else host


def failure_domains(places: Sequence[str]) -> tuple[int, ...]:
    """The failure domain of each process, as numbers: its rack where there are several, else its host, else itself.

    Processes that are all on one host are lost together whatever is kept where: then each is its own domain, for the
    loss of one of them.
    """
    racks = [place.rpartition("/")[0] or place for place in places]
    for names in (racks, places):
        if len(known := dict.fromkeys(names)) > 1:
            numbers = {name: number for number, name in enumerate(known)}
            return tuple(numbers[name] for name in names)
    return tuple(range(len(places)))


def choose_keepers(domains: Sequence[int], copies: int) -> list[list[int]]:
    """Who keeps the copies of each process: for each copy a process number for each process.

    The keepers of one process are in domains of their own, none of them its own; so there are as many copies as there
    are other domains, at most. Where domains are not much larger than others each process keeps for one other a copy;
    else some keep for several, as evenly as can be.
    """
    count = len(domains)
    copies = min(copies, len({*domains}) - 1)
    largest = max(Counter(domains).values(), default=0)
    if (copies + 1) * largest <= count:
        # In the order of domains, steps of the largest one's size lead out of every domain, and each into another.
        order = sorted(range(count), key=lambda process: domains[process])
        at = {process: index for index, process in enumerate(order)}
        return [
            [order[(at[process] + copy * largest) % count] for process in range(count)] for copy in range(1, copies + 1)
        ]
    taken = [{domain} for domain in domains]
    chosen = []
    for _ in range(copies):
        keepers: list[int] = []
        for process in range(count):
            free = [other for other in range(count) if domains[other] not in taken[process]]
            keeper = min(free, key=lambda other: (keepers.count(other), (other - process) % count))
            taken[process].add(domains[keeper])
            keepers.append(keeper)
        chosen.append(keepers)
    return chosen


def describe_exposure(places: Sequence[str], copies: int) -> str:
    """Which loss of hosts the copies in memory do not outlive, where that is less than was asked for; else empty."""
    hosts = len({*places})
    if not any(places) or hosts > copies:
        return ""
    if hosts == 1:
        return "all processes are on one host: if it is lost, the run goes on from its last checkpoint"
    return f"copies in memory are on {hosts - 1} other hosts and not on {copies}: there are only {hosts} hosts"


def into_rounds(keepers: Sequence[int]) -> list[dict[int, int]]:
    """Keepers as rounds, from sender to keeper: in each round nobody keeps for two."""
    rounds: list[dict[int, int]] = []
    for process, keeper in enumerate(keepers):
        number = sum(1 for earlier in keepers[:process] if earlier == keeper)
        rounds += [{}] if number == len(rounds) else []
        rounds[number][process] = keeper
    return rounds
