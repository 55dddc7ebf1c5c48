"""Attention that never writes its scores to memory: cuDNN's on GPUs, the splash kernel on TPUs; and which to take.

The choice follows the platform of the mesh that a program is traced for (`multipod.execute.target`). What the kernels
cannot do, and every other platform, takes the plain form (`multipod.nn.text.attention.attend`), which is what they are
compared with. docs/design/models.md says what was rejected.

Shapes: n examples, q queries, k keys, h heads, d features of a head.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import AxisType, PartitionSpec

from multipod.errors import RecipeError
from multipod.execute.target import target_device_kind, target_platform
from multipod.nn.logical_axes import axes_of_dim
from multipod.nn.text.segments import Segments

AttentionKernel = Literal["auto", "plain", "cudnn", "splash"]
"""`auto`: the platform's fused kernel where it can, else the plain form. `plain`: always the plain form. `cudnn`,
`splash`: that kernel on its platform, or an error that says why not; the plain form on others."""

FUSED: Mapping[str, Literal["cudnn", "splash"]] = {"gpu": "cudnn", "tpu": "splash"}
"""The fused kernel of a platform."""

CUDNN_HEAD = 128
"""The most features of a head on every GPU that cuDNN's flash attention runs on; Hopper takes 256."""

BLOCK = 128
"""Positions of the smallest block of the splash kernel, the lanes of a TPU."""

LONGEST_BLOCK = 512
"""Positions of a block where the sequence divides by it: arXiv:2205.14135's tiling, sized for a TPU's VMEM."""


@dataclass(frozen=True)
class AttentionCase:
    """What decides whether a kernel can compute an attention.

    Attributes:
      platform, device_kind: of the devices that the program is traced for.
      in_mesh: whether a mesh is around; without one nobody says how arrays are split.
      dtype: of queries, keys and values.
      queries, keys, head: q, k and d.
      heads_split: whether the devices that split heads each have the same number.
      bias: whether numbers are added to the scores.
      segments: whether the mask is `Segments`, or there is none.
      dropout: share of the weights that is dropped.
    """

    platform: str
    device_kind: str
    in_mesh: bool
    dtype: str
    queries: int
    keys: int
    head: int
    heads_split: bool = True
    bias: bool = False
    segments: bool = True
    dropout: float = 0.0


@dataclass(frozen=True)
class AttentionChoice:
    """Which attention was taken, and why, where it is the plain one."""

    kernel: Literal["plain", "cudnn", "splash"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason})" if self.reason else self.kernel


def choose(asked: AttentionKernel, case: AttentionCase) -> AttentionChoice:
    """The attention for a case.

    Raises:
      RecipeError: a kernel by name that cannot do this, on its own platform.
    """
    name = FUSED.get(case.platform)
    if name is None:
        return AttentionChoice("plain", f"{case.platform} has no fused kernel")
    if not case.segments:
        return AttentionChoice("plain", "the mask is not made of segments")  # while decoding: one query
    if asked == "plain" or asked not in ("auto", name):
        return AttentionChoice("plain", f"attention={asked}")
    reason = next(_refusals(name, case), "")
    if reason and asked != "auto":
        raise RecipeError(
            f"attention={asked}: {reason}. Say attention=auto, which takes the plain form there, or change that."
        )
    return AttentionChoice("plain", reason) if reason else AttentionChoice(name)


def _refusals(name: str, case: AttentionCase) -> Iterator[str]:
    """Why the kernel cannot compute a case, the first reason first."""
    if not case.in_mesh:
        yield "outside of a mesh nothing says how heads are split"
    if case.dropout:
        yield f"it cannot drop attention weights, and dropout is {case.dropout:g}"
    if case.bias:
        yield "it would write the positions' bias out for every example, as many numbers as the plain form's scores"
    if not case.heads_split:
        yield "the heads do not divide over the devices that split them"
    yield from (_cudnn_refusals if name == "cudnn" else _splash_refusals)(case)


def _cudnn_refusals(case: AttentionCase) -> Iterator[str]:
    # jax/_src/cudnn/fused_attention_stablehlo.py, check_layout and check_is_flash_attention, JAX 0.10.2.
    if not re.search("NVIDIA|Tesla|A100|H100|Quadro|GeForce", case.device_kind):
        yield f"cuDNN runs on NVIDIA's GPUs, and this is {case.device_kind or 'of no known kind'}"
    if re.search(r"V100|P100|P40|P4\b|T4\b|K80|M60|GTX|TITAN|RTX 20|Quadro RTX", case.device_kind):
        yield f"cuDNN's flash attention needs compute capability 8.0, which {case.device_kind} has not"
    if case.dtype != "bfloat16":
        yield f"cuDNN computes in bfloat16, and model.dtype is {case.dtype}"
    if case.head > CUDNN_HEAD or case.head % 8:
        yield f"cuDNN takes heads of up to {CUDNN_HEAD} features in eights, and these have {case.head}"
    if case.queries % 2 or case.keys % 2:
        yield f"cuDNN's gradient with a mask takes even lengths, and these are {case.queries} and {case.keys}"


def _splash_refusals(case: AttentionCase) -> Iterator[str]:
    if re.search("v2|v3", case.device_kind):
        yield f"its kernel is not compiled for {case.device_kind}"
    if case.queries % BLOCK or case.keys % BLOCK:
        yield f"splash takes lengths in blocks of {BLOCK}, and these are {case.queries} and {case.keys}"
    if case.head % 8 or (case.head > BLOCK and case.head % BLOCK):
        yield f"splash takes heads of 8 to {BLOCK} features in eights, or a multiple of {BLOCK}; these have {case.head}"


def case_of(
    queries: jax.Array, keys: jax.Array, *, bias: bool = False, segments: bool = True, dropout: float = 0.0
) -> AttentionCase:
    """The case of queries [n, q, h, d] and keys [n, k, h, d] where they are being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    heads = queries.shape[2]
    devices = math.prod(mesh.shape[axis] for axis in axes_of_dim("heads")) if not mesh.empty else 1
    return AttentionCase(
        target_platform(),
        target_device_kind(),
        not mesh.empty,
        str(queries.dtype),
        queries.shape[1],
        keys.shape[1],
        queries.shape[3],
        heads % devices == 0,
        bias,
        segments,
        dropout,
    )


def fused_attention(
    kernel: Literal["cudnn", "splash"],
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    segments: Segments | None,
) -> jax.Array:
    """softmax(queries keys^T / sqrt(d)) values by a kernel, each device for its own heads; [n, q, h, d] as queries.

    A kernel is opaque to XLA's partitioner, so the axes of the mesh that are automatic are made manual around it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    automatic = {axis for axis, kind in kinds.items() if kind is not AxisType.Manual}
    local = KERNELS[kernel]
    if not automatic:
        return local(queries, keys, values, segments)
    split = PartitionSpec(None, None, axes_of_dim("heads") or None, None)
    mapped = jax.shard_map(
        local,
        in_specs=(split, split, split, PartitionSpec()),
        out_specs=split,
        axis_names=automatic,
        check_vma=False,
    )
    return mapped(queries, keys, values, segments)


def by_cudnn(queries: jax.Array, keys: jax.Array, values: jax.Array, segments: Segments | None) -> jax.Array:
    """Attention by cuDNN, through `jax.nn.dot_product_attention`.

    The mask goes in as a bias of n q k numbers, not h times as many. Source: Dao, 2023, arXiv:2307.08691.
    """
    mask = None if segments is None else Segments(segments.queries, segments.keys).mask()
    causal = segments is not None and segments.causal
    return jax.nn.dot_product_attention(queries, keys, values, mask=mask, is_causal=causal, implementation="cudnn")


def by_splash(
    queries: jax.Array, keys: jax.Array, values: jax.Array, segments: Segments | None, *, interpret: bool = False
) -> jax.Array:
    """Attention by the splash kernel of Pallas, which skips the blocks that a causal mask hides.

    A padding query attends to padding: what comes of it is finite and means nothing, as for the plain form.
    `interpret` runs the kernel on any platform, slowly.
    """
    length, memory = queries.shape[1], keys.shape[1]
    shape = length, memory
    causal = segments is not None and segments.causal
    mask = splash_attention.CausalMask(shape) if causal else splash_attention.FullMask(shape)
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([mask] * queries.shape[2]),
        block_sizes=_block_sizes(length, memory),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    by_head = [jnp.swapaxes(x, 1, 2) for x in (queries * queries.shape[-1] ** -0.5, keys, values)]
    ids = None if segments is None else splash_attention.SegmentIds(segments.queries, segments.keys)
    return jnp.swapaxes(jax.vmap(kernel)(*by_head, ids), 1, 2).astype(queries.dtype)


def _block_sizes(length: int, memory: int) -> splash_attention.BlockSizes:
    q, kv = (math.gcd(size, LONGEST_BLOCK) for size in (length, memory))
    return splash_attention.BlockSizes(
        block_q=q,
        block_kv=kv,
        block_kv_compute=kv,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_kv_dkv_compute=kv,
        block_q_dq=q,
        block_kv_dq=kv,
    )


KERNELS: Mapping[
    Literal["cudnn", "splash"], Callable[[jax.Array, jax.Array, jax.Array, Segments | None], jax.Array]
] = {"cudnn": by_cudnn, "splash": by_splash}

_CHOICES: ContextVar[Counter[AttentionChoice] | None] = ContextVar("choices", default=None)


@contextmanager
def counted_choices() -> Iterator[Counter[AttentionChoice]]:
    """Counts which attentions are taken by what is traced while it lasts."""
    choices: Counter[AttentionChoice] = Counter()
    token = _CHOICES.set(choices)
    try:
        yield choices
    finally:
        _CHOICES.reset(token)


def count_choice(choice: AttentionChoice) -> None:
    """Counts a choice for `counted_choices`, if it is on."""
    choices = _CHOICES.get()
    if choices is not None:
        choices[choice] += 1
