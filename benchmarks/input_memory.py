"""Memory of a long run of host input: does it stay within the budget of the decoded cache, and does it grow?

Images are read as a run reads them, with a cache that holds a part of them, while the devices "work" for a given time
an update. What the process holds (RSS) is noted every second. After the cache is full it should not grow: the slope is
that of a line through the samples of the second half of the run, with the standard error of blocks of them, because
neighbouring samples are not independent.
"""

import argparse
import gc
import tempfile
import time
from pathlib import Path

import machine
import numpy as np
import psutil
from input import write_images

MIB = 2**20


def sampled(folder: Path, arguments: argparse.Namespace) -> tuple[np.ndarray, int, int]:
    """Seconds and bytes held above those before the run, [samples, 2]; bytes in the cache; images read."""
    from multipod.data.batches import TrainBatches
    from multipod.data.images.files import ImageFiles
    from multipod.data.reading import InputOptions
    from multipod.data.source import with_cache

    process = psutil.Process()
    source = with_cache(ImageFiles(str(folder / "jpg"), decode="whole").train(), int(arguments.cache_mib * MIB))
    feed = TrainBatches(source, 32, 0, np.arange(32)).start(0, InputOptions(threads=arguments.threads, ahead=2))
    next(feed)  # what is imported and compiled at first use is here now, and a few images are in the cache
    gc.collect()
    before = process.memory_info().rss - source.cache.held().nbytes
    samples, count, start = [], 0, time.perf_counter()
    while (now := time.perf_counter() - start) < arguments.seconds:
        next(feed)
        count += 32
        time.sleep(arguments.step_s)
        if now >= len(samples):
            samples.append((now, process.memory_info().rss - before))
    feed.close()
    return np.array(samples), source.cache.held().nbytes, count


def slope(samples: np.ndarray, blocks: int = 8) -> tuple[float, float]:
    """Bytes a second over the second half, and its standard error from means of blocks."""
    late = samples[len(samples) // 2 :]
    means = np.array([part.mean(0) for part in np.array_split(late, blocks)])
    x, y = (means - means.mean(0)).T
    best = (x @ y) / (x @ x)
    left = y - best * x
    return float(best), float(np.sqrt(left @ left / (blocks - 2) / (x @ x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--images", type=int, default=240)
    parser.add_argument("--cache-mib", type=float, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.1, help="what the devices take for an update")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder, arguments.images)
        before = machine.facts()
        samples, held, count = sampled(folder, arguments)
    marks = [0, *(int(share * (len(samples) - 1)) for share in (0.1, 0.25, 0.5, 0.75, 1))]
    rows = [(f"{samples[mark, 0]:.0f}", f"{samples[mark, 1] / MIB:.1f}") for mark in dict.fromkeys(marks)]
    best, error = (3600 * value / MIB for value in slope(samples))
    text = "\n".join(
        [
            machine.headline(before) + f", commit {machine.commit()}",
            "",
            f"{arguments.images} JPEGs of 500 x 375 (decoded: {arguments.images * 500 * 375 * 3 / MIB:.0f} MiB), a "
            f"cache of {arguments.cache_mib:g} MiB, {arguments.threads} threads, 2 batches of 32 ahead (4.6 MiB each), "
            f"{arguments.step_s * 1e3:.0f} ms an update: {count:,} images in {samples[-1, 0]:.0f} s.",
            "",
            machine.table(("s", "MiB above the start"), rows),
            "",
            f"The cache held {held / MIB:.1f} MiB. Most above the start: {samples[:, 1].max() / MIB:.1f} MiB. Slope of "
            f"the second half: {best:+.1f} ± {error:.1f} MiB an hour (standard error).",
        ]
    )
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(f"# Memory of host input\n\n`python benchmarks/input_memory.py`\n\n{text}\n")


if __name__ == "__main__":
    main()
