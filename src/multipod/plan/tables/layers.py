"""Layers as operators with FLOPs and bytes: what tables of published models are made of. Training unless said
otherwise.

Bytes are those of tensors that must pass through the memory when element-wise arithmetic is fused into what comes
before or after it: each tensor is written once and read by each product, norm or reduction that needs it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from multipod.plan.work import Message, Operation, Work, together

LANES = 128
"""Of a TPU: the matrix unit is 128 x 128, and tensors lie in memory in tiles with rows of 128."""

HALF, WHOLE = 2, 4
"""Bytes of a bfloat16 and of a float32."""

LANES_A_ROW = 32
"""Lanes for each of the fewest rows that a tile of bfloat16 has: 4 rows of 128 lanes on a TPU, 1 on a GPU.

Read off XLA's own programs for TPU v3 (libtpu 0.0.52, 2026-11-22): two residual blocks of 64 channels on 76 x 76
pixels, forward and backward, move 0.32, 0.30, 0.31 and 0.60 GB with 1, 2, 4 and 8 images; on 40 x 40 the compiler
expects 0.50, 0.46, 0.50 and 0.71 million cycles."""


def fill(n: float, lanes: int = LANES) -> float:
    """The share of whole rows of `lanes` that `n` elements fill: 1 for 128, 1/2 for 64, 3/4 for 192."""
    return n / (math.ceil(n / lanes) * lanes) if n > 0 else 1.0


def product_fill(rows: float, inner: float, outer: float, lanes: int = LANES) -> float:
    """The share of the matrix unit that [rows, inner] x [inner, outer] fills.

    The unit holds a tile of [inner, outer] while rows stream through it; loading the next tile takes `lanes` rows'
    time.
    """
    return fill(inner, lanes) * fill(outer, lanes) * min(1.0, rows / lanes) if lanes > 1 else 1.0


JOIN = 2
"""Times that the bytes of a copy count which joins rows at an offset: see `Conv._joined`."""


@dataclass(frozen=True)
class Image:
    """Where a convolution works.

    Attributes:
      examples: on each group of devices that share an example.
      spatial: devices that an image's rows are split over.
      lanes: see `Machine.lanes`.
      across: devices that an image's columns are split over.
    """

    examples: float
    spatial: int = 1
    lanes: int = LANES
    across: int = 1

    def rows(self, height: int) -> int:
        """Rows of the device that has most."""
        return -(-height // self.spatial)

    def columns(self, width: int) -> int:
        """Columns of the device that has most."""
        return -(-width // self.across)

    @property
    def padded_examples(self) -> int:
        """Examples with those that only fill a tile's rows, where they lie in them."""
        rows = max(1, self.lanes // LANES_A_ROW)
        return math.ceil(self.examples / rows) * rows

    def elements(self, height: int, width: int, channels: int) -> float:
        """Elements of a tensor in memory, padded: either channels lie in the lanes and examples in the rows of a tile,
        or the other way round, whichever wastes less."""
        pixels = self.rows(height) * self.columns(width)
        if self.lanes == 1:
            return pixels * self.examples * channels
        by_channels = self.padded_examples * math.ceil(channels / self.lanes) * self.lanes
        by_examples = math.ceil(self.examples / self.lanes) * self.lanes * math.ceil(channels / 8) * 8
        return pixels * min(by_channels, by_examples)

    def product_fill(self, height: int, width: int, inner: int, outer: int, taps: int) -> float:
        """A product's fill; few input channels are packed with the taps of the window, whole lanes of examples make the
        outer size full, and examples that only fill a tile's rows are multiplied like all others."""
        if self.lanes == 1:
            return 1.0
        packed = inner * taps if inner < 16 else inner
        whole = fill(self.examples, self.lanes) == 1.0
        outer_fill = 1.0 if whole else fill(outer, self.lanes)
        streamed = min(1.0, self.examples * self.rows(height) * self.columns(width) / self.lanes)
        return fill(packed, self.lanes) * outer_fill * streamed * self.examples / self.padded_examples


@dataclass(frozen=True)
class Conv:
    """A convolution with what follows it (norm, activation, perhaps a sum), `count` times.

    Attributes:
      height, width: of its input.
      inputs, outputs: channels.
      window: its side.
      stride: in both directions.
      norm: whether batch norm follows; else a bias.
      count: equal ones in a row; only the first has the stride.
      first: its input needs no gradient.
      frozen: it is not trained: forward pass only.
    """

    name: str
    height: int
    width: int
    inputs: int
    outputs: int
    window: int = 3
    stride: int = 1
    norm: bool = True
    count: int = 1
    first: bool = False
    frozen: bool = False

    @property
    def parameters(self) -> int:
        """Weights, and scale and bias or bias alone."""
        one = self.window**2 * self.inputs * self.outputs + self.outputs * (2 if self.norm else 1)
        return one * self.count

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of its result."""
        return -(-self.height // self.stride), -(-self.width // self.stride)

    def work(self, at: Image, train: bool = True) -> Work:
        """The work on the device of `at` that has most rows; halos are among the messages, the sums of norms too."""
        height, width = self.out
        taps = self.window**2
        pixels = at.rows(height) * at.columns(width)
        flops = 2.0 * at.examples * pixels * self.inputs * self.outputs * taps
        x = HALF * at.elements(self.height, self.width, self.inputs)
        y = HALF * at.elements(height, width, self.outputs)
        weights = HALF * taps * self.inputs * self.outputs
        full = at.product_fill(height, width, self.inputs, self.outputs, taps)
        back = at.product_fill(height, width, self.outputs, self.inputs, taps)
        ops = [Operation(f"conv {self.name}", "convolution", flops, x + y + weights, full)]
        # Statistics are summed as the result is written; half of the normalised tensors are made by their only reader.
        # (XLA's own program for TPU v3 moves 5.3 GB for ResNet-50 at 16 examples a core, by libtpu 0.0.52; here it
        # is 5.4.)
        ops.append(Operation(f"norm {self.name}", "vector", 8 * y / HALF, y, count=0.5))
        if train and not self.frozen:
            # Two sums over the result and its gradient; both products then read the two tensors instead of one.
            ops.append(Operation(f"norm {self.name}", "vector", 16 * y / HALF, 4 * y, count=1))
            ops.append(Operation(f"conv {self.name}", "convolution", flops, x + y + 2 * weights, full))
            if not self.first:
                ops.append(Operation(f"conv {self.name}", "convolution", flops, x + y + weights, back))
        ops += self._joined(at, x, y, train and not self.frozen)
        once = Work(tuple(ops), self._halo(at, train and not self.frozen), y if train else 0.0)
        return once.times(self.count)

    def _joined(self, at: Image, x: float, y: float, train: bool) -> list[Operation]:
        """Rows from the neighbours are joined to the device's own by a copy: of the input, forward; of the result's
        gradient, backward, where the weights' gradient reads the joined input once more. Rows and columns are
        joined by the same copy.

        In XLA's programs for TPU v3 (libtpu 0.0.52; 64 and 128 channels, 4 and 128 images a replica of 4 devices) each
        such convolution moves 4.2 to 6.2 tensors more, here 5, and the compiler expects these copies to reach half of
        the memory's bandwidth or less: 0.33 ms for a convolution of tensors of 12.8 MB, 18 us of 0.4 MB. Split 2 x 2
        they move 1.04 times the bytes of a split by 4 of one dim.
        """
        if not any(self._shared_lines(at)):
            return []
        ops = [Operation("join halo", "memory", 0.0, JOIN * 2 * x)]
        return [*ops, Operation("join halo", "memory", 0.0, JOIN * (2 * y + x), count=2)] if train else ops

    def _shared_lines(self, at: Image) -> tuple[int, int]:
        """Rows and columns that a device needs from its neighbours: `window - stride` in all where a dim is split."""
        lines = max(0, self.window - self.stride)
        return lines * (at.spatial > 1 and self.height > 1), lines * (at.across > 1 and self.width > 1)

    def _halo(self, at: Image, train: bool) -> tuple[Message, ...]:
        """Rows from the neighbours above and below, forward and (of gradients) backward; then columns, as high as the
        rows are by then. Where both are split XLA sends columns once more, for the gradient of the weights."""
        rows, columns = self._shared_lines(at)
        sent = [(rows * at.columns(self.width), 2 if train else 1)]
        sent += [(columns * (at.rows(self.height) + rows), (3 if rows else 2) if train else 1)]
        return tuple(
            Message("halo", "neighbour", HALF * at.examples * self.inputs * pixels / 2, 2, 2 * times)
            for pixels, times in sent
            if pixels
        )


def dense(
    name: str,
    rows: float,
    inputs: float,
    outputs: float,
    *,
    train: bool = True,
    lanes: int = LANES,
    weights: bool = True,
) -> Work:
    """[rows, inputs] x [inputs, outputs]; with `weights` these are parameters, read and their gradients written as
    float32."""
    flops = 2.0 * rows * inputs * outputs
    x, y = HALF * rows * inputs, HALF * rows * outputs
    w = (WHOLE if weights else HALF) * inputs * outputs
    ops = [Operation(f"matmul {name}", "matmul", flops, x + y + w, product_fill(rows, inputs, outputs, lanes))]
    if train:
        ops.append(Operation(f"matmul {name}", "matmul", flops, x + y + w, product_fill(rows, outputs, inputs, lanes)))
        full = product_fill(inputs, rows, outputs, lanes)
        ops.append(Operation(f"matmul {name}", "matmul", flops, x + y + w, full))
    return Work(tuple(ops), (), y if train else 0.0)


def elementwise(name: str, elements: float, passes: float, nbytes: int = HALF, count: float = 1) -> Work:
    """Arithmetic on `elements`, which pass the memory `passes` times, in `count` operators."""
    return Work((Operation(name, "vector", 4 * elements * passes, elements * nbytes * passes, count=count),))


@dataclass(frozen=True)
class AttentionCost:
    """A Transformer layer: attention to `context` tokens a row (and to another sequence, if `cross`), then two
    products.

    Attributes:
      features, hidden, heads: as in `multipod.models.transformer.Transformer`.
      model: devices that heads and hidden features are split over.
      kept_hidden: arrays of hidden features that the backward pass needs: 2 of a GELU, 1 of a ReLU.
    """

    features: int
    hidden: int
    heads: int
    model: int = 1
    kept_hidden: int = 2

    def work(
        self, examples: float, length: int, context: Sequence[int], train: bool = True, lanes: int = LANES
    ) -> Work:
        """`context` has the length of what is attended to, once for each attention block.

        Source: (what is kept for the backward pass) Korthikanti et al., 2022, arXiv:2205.05198, section 4.1: dropout's
        masks take a byte, all else two.
        """
        tokens, d = examples * length, self.features
        share, hidden = d / self.model, self.hidden / self.model
        twice = 2 if train else 1
        parts = []
        for other in context:
            keys = examples * other
            parts.append(dense("query", tokens, d, share, train=train, lanes=lanes))
            parts.append(dense("key value", keys, d, 2 * share, train=train, lanes=lanes))
            parts.append(dense("attended", tokens, share, d, train=train, lanes=lanes))
            parts.append(self._scores(examples, length, other, train, lanes))
            # norm, dropout and sum around the block; their backward pass reads and writes twice as much
            parts.append(elementwise("norm", tokens * d, 6 * (1 + twice), count=2 * twice))
            parts.append(self._sum(tokens, twice))
        parts.append(dense("hidden", tokens, d, hidden, train=train, lanes=lanes))
        parts.append(dense("back", tokens, hidden, d, train=train, lanes=lanes))
        parts.append(elementwise("norm", tokens * d, 6 * (1 + twice), count=2 * twice))
        parts.append(elementwise("relu", tokens * hidden, twice, count=0))  # fused into the products around it
        parts.append(self._sum(tokens, twice))
        blocks = len(context)
        kept = tokens * d * 5 * (blocks + 1)  # inputs of norms and of the first products, dropout's masks
        kept += HALF * tokens * hidden * self.kept_hidden
        kept += sum(HALF * share * (2 * tokens + 2 * examples * other) for other in context)
        kept += sum(5 * examples * self.heads / self.model * length * other for other in context)
        return replace(together(parts), activation_bytes=kept if train else 0.0)

    def _scores(self, examples: float, length: int, other: int, train: bool, lanes: int) -> Work:
        """Scores and weighted sums of all heads: products of [length, head] and [head, other], and the softmax
        between."""
        heads, head = self.heads / self.model, self.features / self.heads
        flops = 2.0 * examples * heads * length * other * head
        scores = examples * heads * length * other
        side = HALF * examples * heads * head * (length + other)
        fills = product_fill(length, head, other, lanes), product_fill(length, other, head, lanes)
        back = 3 if train else 1
        ops = tuple(
            Operation("matmul scores", "matmul", back * flops, back * (side + HALF * scores), full, count=back)
            for full in fills
        )
        return Work(ops, (), HALF * scores) + elementwise("softmax", scores, 4 * back, count=1 + back)

    def _sum(self, tokens: float, twice: int) -> Work:
        """The sum of what the devices of a split layer found, forward, and of its gradients, backward."""
        if self.model == 1:
            return Work(())
        nbytes = HALF * tokens * self.features
        return Work((), (Message("model", "all-reduce", nbytes, self.model, twice),))


def vocabulary(tokens: float, looked: float, features: int, vocab: int, model: int = 1, lanes: int = LANES) -> Work:
    """The last layer over a vocabulary with its softmax (`tokens`), and `looked` look-ups in the same table."""
    return told_of(tokens, features, vocab, model, lanes) + looked_up(looked, features, vocab / model)


def told_of(
    tokens: float, features: int, vocab: int, model: int = 1, lanes: int = LANES, *, train: bool = True
) -> Work:
    """The last layer over a vocabulary, with its softmax and loss."""
    logits = tokens * vocab / model
    passes = 6 if train else 3
    work = dense("logits", tokens, features, vocab / model, train=train, lanes=lanes) + elementwise(
        "loss", logits, passes, WHOLE, count=passes
    )
    sums = (Message("model", "all-reduce", HALF * tokens * features, model, 2),) if model > 1 else ()
    return replace(work + Work((), sums), activation_bytes=WHOLE * logits if train else 0.0)


def looked_up(tokens: float, features: int, vocab: float, train: bool = True) -> Work:
    """A look-up gathers rows; its gradient is added row by row into a whole table."""
    rows, table = HALF * tokens * features, vocab * features
    nbytes = 3 * rows + 2 * WHOLE * table if train else rows
    return Work((Operation("look-up", "memory", 0.0, nbytes, count=4 if train else 1),))


def sort(name: str, length: float, rows: float, nbytes: int = 8, times: int = 1) -> Work:
    """`times` sorts of `rows` rows of `length` pairs of key and index: bitonic, each pass an operator over all of them.

    A machine without sorting hardware does log2(n) (log2(n) + 1) / 2 passes, n the next power of two.
    """
    steps = math.ceil(math.log2(max(2.0, length)))
    passes = times * steps * (steps + 1) / 2
    return Work((Operation(name, "memory", 0.0, 2 * passes * rows * 2**steps * nbytes, count=passes),))
