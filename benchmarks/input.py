"""JPEGs of 500 x 375 to batches of 32 crops of 224 x 224: ours and what one would take instead, interleaved.

Every case is a process of its own with two workers (threads or processes, as it has them), asked for an epoch at a time
while the others sleep. The limit is bare decoding of every file by libjpeg-turbo, one process a core, without crop,
resizing or batches; who decodes only what a crop shows may beat it. Also: batches of recommendation data from a memory
map against a copy in memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import machine
import numpy as np
import psutil
from input_peers import PEERS
from PIL import Image

HERE = Path(__file__).parent
LIMIT, CACHED = "bare decode", "ours, decoded cache"
BEGAN = time.perf_counter()


def picture(rng: np.random.Generator, width: int = 500, height: int = 375) -> Image.Image:
    """Waves, boxes, coarse and fine noise: about 100 kB at quality 93, as ImageNet's mean."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = [np.sin(x / rng.uniform(8, 60) + rng.uniform(0, 6)) * np.cos(y / rng.uniform(8, 60)) for _ in range(3)]
    image = np.stack(waves, -1) * 60 + 128
    for _ in range(12):
        left, top = rng.integers(0, width - 40), rng.integers(0, height - 40)
        image[top : top + rng.integers(20, 160), left : left + rng.integers(20, 160)] += rng.uniform(-60, 60, 3)
    coarse = rng.standard_normal((height // 4 + 1, width // 4 + 1, 3)).repeat(4, 0).repeat(4, 1)
    image += coarse[:height, :width] * 14 + rng.standard_normal((height, width, 3)) * 10
    return Image.fromarray(image.clip(0, 255).astype(np.uint8))


def write_images(folder: Path, count: int) -> float:
    """`count` JPEGs in folders of classes, and the same in two tar files; returns their mean size in bytes."""
    rng, total = np.random.default_rng(0), 0
    (folder / "tar").mkdir()
    for number in range(count):
        path = folder / "jpg" / f"{number % 10}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(rng).save(path, "JPEG", quality=93)
        total += path.stat().st_size
        with tarfile.open(folder / "tar" / f"{number % 2}.tar", "a") as archive:
            archive.add(path, f"{number:05d}.jpg")
    return total / count


FFCV = (
    "Not run: FFCV (its last release, 1.0.2 of March 2023, is built against OpenCV's and libturbojpeg's headers, which "
    "are not here; it reads files of its own format, in which images are encoded anew)."
)


class Peer:
    """A case in its own process."""

    def __init__(self, name: str, folder: Path, workers: int, python: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [python, str(HERE / "input_peers.py"), name, str(folder / "jpg"), str(workers)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        if self.process.stdout.readline().strip() != "ready":
            raise RuntimeError((self.process.stderr.read().strip().splitlines() or ["ended"])[-1])
        self.epoch()

    def epoch(self) -> tuple[float, float]:
        """Wall seconds of an image that is delivered, and CPU seconds of one that is decoded."""
        before = self.cpu_s()
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        done = json.loads(self.process.stdout.readline())
        return done["s"] / done["delivered"], (self.cpu_s() - before) / done["decoded"]

    def cpu_s(self) -> float:
        """User and system time of the process and its children so far."""
        main = psutil.Process(self.process.pid)
        return sum(sum(one.cpu_times()[:2]) for one in (main, *main.children(recursive=True)))

    def close(self) -> None:
        """Ends the process and its children."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.kill()
        self.process.kill()
        self.process.wait()


def measure(folder: Path, arguments: argparse.Namespace) -> tuple[dict[str, list[tuple[float, float]]], dict[str, str]]:
    """Wall and CPU seconds of an image for each case in each round; and why a case cannot run here."""
    peers, missing = {}, {}
    for name in PEERS:
        python = arguments.python_tf if name.startswith("tf.data") else sys.executable
        try:
            if not python:
                raise RuntimeError("no Python with TensorFlow was named")
            peers[name] = Peer(name, folder, arguments.workers, python)
        except RuntimeError as error:
            missing[name] = str(error)
    rounds = {name: [] for name in peers}
    for number in range(arguments.rounds):
        if number > 2 and time.perf_counter() - BEGAN > arguments.seconds:
            break
        names = list(peers)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            rounds[name].append(peers[name].epoch())
    for peer in peers.values():
        peer.close()
    return rounds, missing


def table(rounds: dict[str, list[tuple[float, float]]]) -> str:
    rows = []
    for name, own in rounds.items():
        wall = [limit[0] / mine[0] for limit, mine in zip(rounds[LIMIT], own, strict=True)]
        cpu = [limit[1] / mine[1] for limit, mine in zip(rounds[LIMIT], own, strict=True)]
        rows.append(
            (
                name,
                f"{1 / statistics.median(mine[0] for mine in own):,.0f}",
                f"{statistics.median(wall):.2f}",
                f"{statistics.median(mine[1] for mine in own) * 1e3:.2f}",
                f"{statistics.median(cpu):.2f}",
            )
        )
    return machine.table(("case", "images/s", "of the limit", "CPU ms/image", "of the limit"), rows)


def batches_from_a_map(folder: Path, rounds: int) -> tuple[str, float]:
    """Batches of 8,192 examples of 1 + 13 + 26 numbers, in random order, against copies in memory.

    As records that are batches, and as blocks of 8,192 rows out of arrays of single examples. Returns the sentences,
    and the share of a copy's speed that records reach.
    """
    from multipod.data.files.formats import open_records
    from multipod.data.tables import Tables

    shapes = {"label": (), "dense": (13,), "ids": (26,)}
    records, batch, rng = 128, 8192, np.random.default_rng(0)
    kept = {name: rng.integers(0, 1000, (records, batch, *shape), dtype=np.int32) for name, shape in shapes.items()}
    for form in ("records", "rows"):
        (folder / form).mkdir()
        for name, array in kept.items():
            np.save(folder / form / f"{name}.npy", array if form == "records" else array.reshape(-1, *array.shape[2:]))
    whole, rows = open_records(str(folder / "records")), Tables(str(folder / "rows"), block=batch).train()
    ways = {
        "records": lambda number: whole.read(np.array([number])),
        "rows": lambda number: rows.read(np.arange(number * batch, (number + 1) * batch)),
        "copy": lambda number: {name: array[number : number + 1].copy() for name, array in kept.items()},
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3 * rounds):
        order = rng.permutation(records)
        for name, read in ways.items():
            start = time.perf_counter()
            for number in order:
                read(number)
            taken[name].append(time.perf_counter() - start)
    share = {name: statistics.median(c / t for c, t in zip(taken["copy"], taken[name], strict=True)) for name in ways}
    speed = sum(array.nbytes for array in kept.values()) / statistics.median(taken["records"]) / 1e9
    return (
        f"Recommendation data from a memory map in batches of 8,192 examples: {speed:.1f} GB/s and "
        f"{share['records']:.2f} of copying them in memory where a record is a batch, {share['rows']:.2f} where a "
        "batch is a block of rows.",
        share["records"],
    )


def against_the_goals(rounds: dict[str, list[tuple[float, float]]], map_share: float) -> str:
    """One line a goal, reached or not."""

    def median(name: str, which: int) -> float:
        return statistics.median(own[which] for own in rounds[name])

    def ratio(name: str, which: int) -> float:
        pairs = zip(rounds[LIMIT], rounds[name], strict=True)
        return statistics.median(limit[which] / own[which] for limit, own in pairs)

    goals = [
        ("CPU ms an image", 1e3 * median("ours", 1), "at most 1.3", 1e3 * median("ours", 1) <= 1.3),
        ("CPU, of bare decoding", ratio("ours", 1), "at least 0.95", ratio("ours", 1) >= 0.95),
        ("time, of the limit", ratio("ours", 0), "at least 0.9", ratio("ours", 0) >= 0.9),
        ("from the decoded cache, CPU, of bare decoding", ratio(CACHED, 1), "at least 5", ratio(CACHED, 1) >= 5),
        ("from the decoded cache, time, of the limit", ratio(CACHED, 0), "at least 5", ratio(CACHED, 0) >= 5),
        ("batches from a memory map, of copying", map_share, "at least 0.8", map_share >= 0.8),
    ]
    rows = [(what, f"{value:.2f}", goal, "yes" if reached else "**no**") for what, value, goal, reached in goals]
    return machine.table(("goal", "measured", "threshold", "reached"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=480)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further round after so many")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--python-tf", help="a Python that has TensorFlow, for tf.data")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_images(folder, arguments.images)
        before = machine.facts()
        rounds, missing = measure(folder, arguments)
        sentence, share = batches_from_a_map(folder, arguments.rounds)
        lines = [
            machine.headline(before) + f", commit {machine.commit()}",
            "",
            f"{arguments.images} JPEGs of 500 x 375, {size / 1e3:.0f} kB on average, to random crops of 224 x 224 "
            f"in batches of 32; {arguments.workers} workers; medians of {len(rounds[LIMIT])} epochs, interleaved. "
            "Ratios above 1 are better than the limit.",
            "",
            table(rounds),
            "",
            *(f"Not run: {name} ({why})." for name, why in missing.items()),
            FFCV,
            "",
            sentence,
            "",
            against_the_goals(rounds, share),
        ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(f"# Host input\n\n`python benchmarks/input.py`\n\n{text}")


if __name__ == "__main__":
    main()
