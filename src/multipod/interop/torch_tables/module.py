"""`torch.nn.EmbeddingBag` with its table as a tensor train: a PyTorch module, on CPU by the C++ kernel.

bag = TTEmbeddingBag(10_000_000, 64, tt_ranks=16, mode="sum", sparse=True)
bag(ids, offsets)
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

from multipod.errors import DataError, NativeError, RecipeError
from multipod.interop.torch_tables import operator, plain
from multipod.interop.torch_tables.arguments import check_mode, refuse_absent
from multipod.interop.torch_tables.initial import check_distribution, initialize
from multipod.interop.torch_tables.plain import NO_PADDING, Bags
from multipod.nn.tables import tensor_train_library
from multipod.nn.tables.tensor_train import Cores, TensorTrain, decompose, tensor_train

Way = Literal["auto", "plain", "native"]


class _Cores(nn.ParameterList):
    """`nn.ParameterList`, with its tensors at once: to ask for each takes a tenth of a small batch's time."""

    def tensors(self) -> list[nn.Parameter]:
        """The parameters."""
        return list(self._parameters.values())


class TTEmbeddingBag(nn.Module):
    """Sums or means of rows of a table that is kept as a tensor train. A drop-in for `nn.EmbeddingBag`.

    The call, `mode`, `padding_idx`, `include_last_offset` and `sparse` are those of `nn.EmbeddingBag`; `tt_ranks`,
    `tt_p_shapes`, `tt_q_shapes` and `weight_dist` those of FBTT's TTEmbeddingBag, whose default is another: there bags
    are sums, and offsets have their end. Other arguments of the two are refused by name, with what to do in their
    place.

    The row of `padding_idx` is left out of bags, as in `nn.EmbeddingBag`; it is not zero, since its cores are those of
    other rows too. With `sparse=True` the gradient of a core is a sparse tensor of the slices that the batch has read,
    for `torch.optim.SparseAdam`, `SGD` and `Adagrad`.

    Args:
      num_embeddings: rows of the table.
      embedding_dim: features of a row.
      tt_ranks: R of every bond, cut to the largest that a bond can have; or one for each of the d - 1 bonds.
      tt_p_shapes: d factors that cover the rows; balanced ones by default.
      tt_q_shapes: d factors of the features; balanced ones by default.
      weight_dist: of the initial cores (`multipod.interop.torch_tables.initial.DISTRIBUTIONS`).
      mode: "sum" or "mean".
      sparse: whether gradients of the cores are sparse.
      include_last_offset: whether the last offset is where the last bag ends.
      padding_idx: an id that counts as not there; negative ones count from the end.
      way: "native" is the C++ kernel, for float32 on the CPU; "plain" PyTorch's operations, for all else, and for
        gradients of gradients; "auto" the kernel where it can be used.
      device: of the cores.
      dtype: of the cores.
      refused: arguments of the two other modules with values that change nothing.

    Attributes:
      tt: the shape.
      cores: the parameters, of shape [m_k, R_{k-1}, n_k, R_k], as in the JAX form (`from_jax`, `to_jax`).

    Raises:
      RecipeError: a shape that cannot be, or an argument that is not there.
      NativeError: way="native", and the kernel cannot be compiled here.

    Source: Yin et al., 2021, arXiv:2101.11714 (TT-Rec).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        tt_ranks: int | Sequence[int] = 16,
        tt_p_shapes: Sequence[int] | None = None,
        tt_q_shapes: Sequence[int] | None = None,
        *,
        weight_dist: str = "sampled-gaussian",
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        way: Way = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
        **refused: Any,
    ) -> None:
        super().__init__()
        refuse_absent(refused)
        check_mode(mode)
        check_distribution(weight_dist)
        count = 3 if isinstance(tt_ranks, int) else len(tt_ranks) + 1
        self.tt = tensor_train(
            num_embeddings,
            embedding_dim,
            tt_ranks,
            cores=count,
            row_factors=tt_p_shapes or (),
            column_factors=tt_q_shapes or (),
        )
        if way == "native":
            tensor_train_library.load()
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        self.sparse, self.include_last_offset, self.way = sparse, include_last_offset, way
        self.weight_dist = weight_dist
        self.padding_idx = None if padding_idx is None else _padding(padding_idx, num_embeddings)
        shapes = self.tt.shapes
        self.cores = _Cores([nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for shape in shapes])
        self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, tt_ranks: int | Sequence[int] = 16, *, freeze: bool = True, **options: Any
    ) -> "TTEmbeddingBag":
        """The bag whose cores come near the table `embeddings` [rows, features], by TT-SVD (`decompose`).

        Args:
          embeddings: the table; the work is done in float64, and takes several times its memory.
          tt_ranks: as of the class.
          freeze: whether the cores are not to be trained, as in `nn.EmbeddingBag.from_pretrained`.
          options: further arguments of the class.

        Raises:
          DataError: `embeddings` is not a table.
        """
        if embeddings.dim() != 2:
            raise DataError(
                f"TTEmbeddingBag.from_pretrained: embeddings have {embeddings.dim()} dims. Give [rows, features]."
            )
        made = cls(len(embeddings), embeddings.shape[1], tt_ranks, **options)
        cores, _ = decompose(embeddings.detach().cpu().double().numpy(), made.tt)
        made._take(cores)
        return made.requires_grad_(not freeze)

    def reset_parameters(self) -> None:
        """Draws the cores anew, from PyTorch's random numbers."""
        if all(core.device.type != "meta" for core in self.cores):
            initialize(self.tt, list(self.cores), self.weight_dist)

    def full_weight(self) -> Tensor:
        """The table [num_embeddings, embedding_dim] that the cores stand for; takes its memory."""
        return plain.materialize(list(self.cores))[: self.num_embeddings]

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """The bags, [bags, embedding_dim].

        Args:
          input: ids, int32 or int64: [ids] with `offsets`, or [bags, ids a bag] without.
          offsets: where bags begin; an empty bag gives zeros.
          per_sample_weights: numbers that rows are multiplied by, shaped like `input`; with mode="sum" alone.

        Raises:
          DataError: ids or offsets that do not fit, or arguments that do not go together; inside a program of
            `torch.compile` ids outside the table, when it runs.
        """
        bags = self._bags(input, offsets, per_sample_weights)
        cores = self.cores.tensors()
        if self._is_native(cores[0], input):
            return operator.bag(cores, self.num_embeddings, bags, sparse=self.sparse)
        if self.sparse and torch.is_grad_enabled():
            raise RecipeError(
                "TTEmbeddingBag: sparse=True needs the C++ kernel, which takes float32 cores and ids on the CPU, and "
                f"not way='plain'. These are {cores[0].dtype} on {cores[0].device}: say sparse=False."
            )
        if not torch.compiler.is_compiling():
            operator.check(self.num_embeddings, bags)
        return plain.bag(cores, bags)

    def extra_repr(self) -> str:
        """The arguments, and how much smaller the table has become."""
        said = f"{self.num_embeddings}, {self.embedding_dim}, tt_ranks={list(self.tt.ranks)}, mode={self.mode!r}"
        said += f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{said}, compression={self.tt.compression:.0f}"

    def _is_native(self, core: Tensor, ids: Tensor) -> bool:
        if self.way == "plain":
            return False
        fits = core.dtype == torch.float32 and core.device.type == ids.device.type == "cpu"
        if self.way == "native" and not fits:
            raise NativeError(
                f"TTEmbeddingBag: the C++ kernel takes float32 on the CPU, and the cores are {core.dtype} on "
                f"{core.device}, the ids on {ids.device}. Say way='auto'."
            )
        return fits and operator.is_available()

    def _bags(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Bags:
        wrong = list(_wrong_input(ids, offsets, weights, self.mode))
        if wrong:
            raise DataError(f"TTEmbeddingBag: {'; '.join(wrong)}. See torch.nn.EmbeddingBag for what goes together.")
        if offsets is not None and offsets.dtype != ids.dtype:
            offsets = offsets.to(ids.dtype)
        if weights is not None:
            weights = weights.to(self.cores[0].dtype)
        padding = NO_PADDING if self.padding_idx is None else self.padding_idx
        return Bags(ids, offsets, weights, padding, self.mode == "mean", self.include_last_offset)

    def _take(self, cores: Sequence[Any]) -> None:
        with torch.no_grad():
            for own, given in zip(self.cores, cores, strict=True):
                own.copy_(torch.from_numpy(np.array(given)))


def from_jax(tt: TensorTrain, cores: Cores, **options: Any) -> TTEmbeddingBag:
    """The bag with the cores of the JAX form (`TensorTrainBag.weights`), copied; `options` are its other arguments."""
    made = TTEmbeddingBag(tt.rows, tt.features, tt.ranks, tt.row_factors, tt.column_factors, **options)
    made._take(cores)
    return made


def to_jax(bag: TTEmbeddingBag) -> tuple[TensorTrain, Cores]:
    """The shape and the cores for the JAX form (`multipod.nn.tables.tensor_train_bag.bag`), copied."""
    return bag.tt, tuple(jnp.array(core.detach().cpu().numpy()) for core in bag.cores)


def _padding(padding_idx: int, rows: int) -> int:
    if not -rows <= padding_idx < rows:
        raise RecipeError(f"TTEmbeddingBag: padding_idx={padding_idx} is outside its {rows:,} rows. Give one of them.")
    return padding_idx % rows


def _wrong_input(ids: Tensor, offsets: Tensor | None, weights: Tensor | None, mode: str) -> list[str]:
    """What does not go together in a call."""
    wrong = []
    if ids.dtype not in (torch.int32, torch.int64):
        wrong.append(f"input is {ids.dtype}, not int32 or int64")
    if ids.dim() == 2 and offsets is not None:
        wrong.append("input has two dims, [bags, ids a bag], and there are offsets")
    elif ids.dim() == 1 and (offsets is None or offsets.dim() != 1):
        wrong.append("input has one dim, and there are no offsets [bags]")
    elif ids.dim() not in (1, 2):
        wrong.append(f"input has {ids.dim()} dims, not one or two")
    if weights is not None and mode != "sum":
        wrong.append(f"per_sample_weights are for mode='sum', and it is {mode!r}")
    if weights is not None and weights.shape != ids.shape:
        wrong.append(f"per_sample_weights are {list(weights.shape)}, not {list(ids.shape)} as the input")
    return wrong
