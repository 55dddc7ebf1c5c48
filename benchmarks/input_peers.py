"""One way of reading JPEGs, as a process that `input.py` asks for an epoch at a time. See there."""

import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

PIXELS, BATCH = 224, 32
Epoch = Callable[[], tuple[int, int]]
"""Reads the data once; returns the images that were delivered, and those that were decoded."""


def boxes(rng: np.random.Generator, width: int, height: int) -> tuple[int, int, int, int]:
    """The crop that all peers take: 8 to 100 % of the area, ratios 3/4 to 4/3."""
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        wide, high = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            return int(rng.integers(width - wide + 1)), int(rng.integers(height - high + 1)), wide, high
    return 0, 0, width, height


def by_pillow(data: bytes, rng: np.random.Generator) -> np.ndarray:
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    x, y, w, h = boxes(rng, *image.size)
    out = np.asarray(image.resize((PIXELS, PIXELS), Image.Resampling.BILINEAR, box=(x, y, x + w, y + h)))
    return np.ascontiguousarray(out[:, ::-1] if rng.random() < 0.5 else out)


def by_simplejpeg(data: bytes, rng: np.random.Generator) -> np.ndarray:
    import cv2
    import simplejpeg

    cv2.setNumThreads(0)
    image = simplejpeg.decode_jpeg(data, "RGB")
    x, y, w, h = boxes(rng, image.shape[1], image.shape[0])
    out = cv2.resize(image[y : y + h, x : x + w], (PIXELS, PIXELS), interpolation=cv2.INTER_LINEAR)
    return cv2.flip(out, 1) if rng.random() < 0.5 else out


class Files:
    """The images of a folder, for PyTorch and Grain."""

    def __init__(self, folder: Path, load: Callable[[bytes, np.random.Generator], np.ndarray]) -> None:
        self.paths, self.load, self.rng = sorted(folder.glob("*/*.jpg")), load, None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> np.ndarray:
        self.rng = self.rng or np.random.default_rng(os.getpid())
        return self.load(self.paths[number].read_bytes(), self.rng)


def limit(folder: Path, workers: int) -> Epoch:
    """Bare decoding by simplejpeg of files in memory, one process a core: no crop, no batch."""
    import multiprocessing

    import simplejpeg

    files = [path.read_bytes() for path in sorted(folder.glob("*/*.jpg"))]
    context = multiprocessing.get_context("fork")

    def serve(pipe, own) -> None:
        while pipe.recv():
            for data in own:
                simplejpeg.decode_jpeg(data, "RGB")
            pipe.send(len(own))

    pipes = []
    for number in range(workers):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, files[number::workers]), daemon=True).start()
        pipes.append(ours)

    def epoch() -> tuple[int, int]:
        for pipe in pipes:
            pipe.send(True)
        count = sum(pipe.recv() for pipe in pipes)
        return count, count

    return epoch


def ours(decode: str, cached: bool) -> Callable[[Path, int], Epoch]:
    def build(folder: Path, workers: int) -> Epoch:
        from multipod.data.batches import TrainBatches
        from multipod.data.images.files import ImageFiles
        from multipod.data.reading import InputOptions
        from multipod.data.source import with_cache

        source = with_cache(ImageFiles(str(folder), decode=decode).train(), 4 * 10**9 if cached else 0)
        batches = TrainBatches(source, BATCH, 0, np.arange(BATCH))

        passes = 8 if cached else 1  # once takes 0.1 s, of which starting and stopping would be a tenth

        def made() -> int:
            return source.statistics.counts.get("decode", 0) + source.statistics.counts.get("crop", 0)

        def epoch() -> tuple[int, int]:
            before = made()
            feed = batches.start(0, InputOptions(threads=workers))
            for _ in range(passes * len(source) // BATCH):
                next(feed)
            feed.close()  # what was read ahead is paid for below
            return passes * len(source) // BATCH * BATCH, made() - before

        epoch()
        return epoch

    return build


def torch(load: Callable[[bytes, np.random.Generator], np.ndarray]) -> Callable[[Path, int], Epoch]:
    def build(folder: Path, workers: int) -> Epoch:
        import torch
        from torch.utils.data import DataLoader

        torch.set_num_threads(1)
        loader = DataLoader(Files(folder, load), BATCH, shuffle=True, num_workers=workers, persistent_workers=True)
        return lambda: (sum(len(batch) for batch in loader),) * 2

    return build


def webdataset(folder: Path, workers: int) -> Epoch:
    import webdataset as wds
    from torch.utils.data import default_collate

    rng = {}

    def load(sample: dict[str, bytes]) -> np.ndarray:
        return by_simplejpeg(sample["jpg"], rng.setdefault(0, np.random.default_rng(os.getpid())))

    shards = [str(path) for path in sorted(folder.parent.glob("tar/*.tar"))]
    made = wds.WebDataset(shards, shardshuffle=False).shuffle(200).map(load).batched(BATCH, default_collate)
    loader = wds.WebLoader(made, batch_size=None, num_workers=workers, persistent_workers=True)
    return lambda: (sum(len(batch) for batch in loader),) * 2


def grain(folder: Path, workers: int) -> Epoch:
    import grain as library

    files = Files(folder, by_simplejpeg)

    def epoch() -> tuple[int, int]:
        order = library.MapDataset.source(files).shuffle(seed=0)
        options = library.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * BATCH)
        count = sum(len(batch) for batch in order.to_iter_dataset(options).batch(BATCH))
        return count, count

    return epoch


def tf_data(folder: Path, workers: int) -> Epoch:
    import tensorflow as tf

    def load(path):
        data = tf.io.read_file(path)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(data),
            tf.zeros([1, 0, 4]),
            area_range=(0.08, 1),
            aspect_ratio_range=(3 / 4, 4 / 3),
            use_image_if_no_bounding_boxes=True,
        )
        image = tf.io.decode_and_crop_jpeg(data, tf.concat([begin[:2], size[:2]], 0), channels=3)
        return tf.image.random_flip_left_right(tf.cast(tf.image.resize(image, (PIXELS, PIXELS)), tf.uint8))

    paths = [str(path) for path in sorted(folder.glob("*/*.jpg"))]
    options = tf.data.Options()
    options.threading.private_threadpool_size = workers
    made = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
    made = made.map(load, num_parallel_calls=workers, deterministic=False).batch(BATCH).prefetch(2)
    made = made.with_options(options)
    return lambda: (sum(len(batch) for batch in made),) * 2


PEERS = {
    "bare decode": limit,
    "ours": ours("crop", False),
    "ours, whole images": ours("whole", False),
    "ours, decoded cache": ours("whole", True),
    "PyTorch + simplejpeg": torch(by_simplejpeg),
    "PyTorch + Pillow": torch(by_pillow),
    "Grain + simplejpeg": grain,
    "WebDataset + simplejpeg": webdataset,
    "tf.data, fused": tf_data,
}


def main() -> None:
    name, folder, workers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    epoch = PEERS[name](folder, workers)
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        delivered, decoded = epoch()
        print(json.dumps({"s": time.perf_counter() - start, "delivered": delivered, "decoded": decoded}), flush=True)


if __name__ == "__main__":
    main()
