"""What is read of compiled programs: groups, trips and bytes against XLA's own forms and closed forms."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from multipod import runtime
from multipod.errors import LayoutError
from multipod.layout import compiled
from multipod.layout.hlo import Collective, Text, expand_groups

pytestmark = pytest.mark.jax_version
needs_libtpu = pytest.mark.skipif(not compiled.has_libtpu(), reason="needs the extra tpu")

LAYERS, WIDTH, BATCH = 6, 256, 64
SIZES = {"data": 2, "model": 4}


def step(w, x):
    """One step of gradient descent on a stack of layers, in a loop."""

    def loss(w):
        h, _ = lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)
        return (h**2).mean()

    return w - jax.grad(loss)(w)


def shapes():
    return (
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
    )


def splits(mesh):
    return NamedSharding(mesh, PartitionSpec(None, None, "model")), NamedSharding(mesh, PartitionSpec("data"))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups={}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, x", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, x", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=8] {'a':(2)4}, x", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=8] {'a':(1)2}, x", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=what?", ()),
    ],
)
def test_groups_in_every_form(text, groups):
    assert expand_groups(text, 8) == groups


def test_axes_of_groups():
    """Groups are told as the axes they run over, and as none where they run over no axes."""
    rows = Collective("all-reduce", 4, ("f32",), ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert rows.axes(SIZES) == ("model",)
    assert Collective("all-reduce", 4, ("f32",), (tuple(range(8)),)).axes(SIZES) == ("data", "model")
    assert Collective("all-reduce", 4, ("f32",), ((0, 1), (2, 3), (4, 5), (6, 7))).axes(SIZES) is None
    ring = tuple((k, (k + 4) % 8) for k in range(8))
    assert Collective("collective-permute", 4, ("f32",), ring).axes(SIZES) == ("data",)


def test_a_loop_on_cpu_devices():
    """Collectives of a loop's body count by its trips, and FLOPs are those of the products: 3 for each layer."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    arguments = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p) for s, p in zip(shapes(), splits(mesh), strict=True)
    ]
    program = jax.jit(step).lower(*arguments).compile()
    facts = compiled.facts_of(program)
    products = 3 * LAYERS * 2 * (BATCH // 2) * WIDTH * (WIDTH // 4)
    assert products <= facts.flops <= 1.1 * products  # tanh and its like are the rest
    assert facts.unknown_loops == 0
    assert facts.devices == 8
    over = {(one.kind, one.axes(SIZES)): one for one in facts.collectives}
    summed = over["all-reduce", ("data",)]
    assert summed.nbytes * summed.times == LAYERS * WIDTH * WIDTH // 4 * 4  # every device's share of the gradients
    assert over["all-gather", ("model",)].nbytes == BATCH // 2 * WIDTH * 4
    assert facts.memory.peak >= facts.memory.arguments == (LAYERS * WIDTH * WIDTH // 4 + BATCH // 2 * WIDTH) * 4


def test_explicit_collectives_have_their_bytes():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def both(a):
        gathered = lax.all_gather(a, "x", tiled=True)
        return lax.ppermute(a, "x", [(k, (k + 1) % 8) for k in range(8)]) + lax.psum_scatter(gathered, "x", tiled=True)

    mapped = jax.shard_map(both, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"), check_vma=False)
    split = NamedSharding(mesh, PartitionSpec("x"))
    facts = compiled.facts_of(
        jax.jit(mapped).lower(jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=split)).compile()
    )
    found = {one.kind: (one.nbytes, one.peers) for one in facts.collectives}
    assert found == {"all-gather": (4096, 8), "collective-permute": (512, 2), "reduce-scatter": (4096, 8)}


def test_async_pairs_and_fused_scatters_count_once():
    """Forms that the CPU compiler does not write, cut down from a TPU program."""
    text = """HloModule m, num_partitions=4
%all-reduce-scatter.1 (a: f32[64]) -> f32[16] {
  %a = f32[64]{0} parameter(0)
  %all-reduce.1 = f32[64]{0} all-reduce(%a), replica_groups=[1,4]<=[4], to_apply=%add
}
ENTRY %main (p: f32[16]) -> f32[16] {
  %start = (f32[16]{0}, f32[64]{0}) all-gather-start(%p), replica_groups=[1,4]<=[4], dimensions={0}
  %done = f32[64]{0} all-gather-done(%start)
  %move = (f32[64], f32[64], u32[], u32[]) collective-permute-start(%done), source_target_pairs={{0,1}}
  ROOT %fusion = f32[16]{0} fusion(%done), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    found = [(one.kind, one.nbytes, one.peers, one.times) for one in Text(text).collectives]
    assert sorted(found) == [
        ("all-gather", 256, 4, 1),
        ("collective-permute", 256, 2, 1),
        ("reduce-scatter", 256, 4, 1),
    ]


@needs_libtpu
def test_a_tpu_that_is_not_here(tmp_path):
    """Compiles the step for 4 x 4 chips of TPU v3, and again from the cache."""
    runtime.absent_tpus()
    mesh = compiled.absent_mesh("v3:4x4", {"data": 8, "model": 4})
    assert [device.coords[:2] for device in mesh.devices[0]] == [[0, 0], [0, 0], [1, 0], [1, 0]]
    facts = compiled.compile_for("v3:4x4", step, shapes(), splits(mesh), cache=tmp_path)
    products = 3 * LAYERS * 2 * (BATCH // 8) * WIDTH * (WIDTH // 4)
    assert products <= facts.flops <= 1.2 * products
    assert facts.devices == 32
    assert {(one.axes({"data": 8, "model": 4}), one.times) for one in facts.collectives} >= {(("data",), LAYERS)}
    assert compiled.compile_for("v3:4x4", step, shapes(), splits(mesh), cache=tmp_path) == facts
    (file,) = tmp_path.iterdir()
    file.write_text("{}")
    assert compiled.compile_for("v3:4x4", step, shapes(), splits(mesh), cache=tmp_path) == facts


@needs_libtpu
def test_refusals():
    runtime.absent_tpus()
    with pytest.raises(LayoutError, match=r"libtpu knows no topology 'v33:2x2'.*Write a generation"):
        compiled.absent_devices("v33:2x2")
    with pytest.raises(LayoutError, match=r"v3:2x2 has 8 devices, and y=2 x x=2 is a mesh of 4"):
        compiled.absent_mesh("v3:2x2", {"y": 2, "x": 2})


@needs_libtpu
@pytest.mark.parametrize(("name", "devices"), [("v3:1x1", 2), ("v3:1x2", 4), ("v5e:1x1", 1), ("v3:4x2", 16)])
def test_machines_of_one_host_and_less(name, devices):
    """libtpu takes four chips a host for granted, and refuses a single chip by itself."""
    runtime.absent_tpus()
    assert len(compiled.absent_devices(name)) == devices


def test_without_libtpu_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(compiled, "has_libtpu", lambda: False)
    with pytest.raises(LayoutError, match=r"pip install 'multipod\[tpu\]'; without it the planner reckons"):
        compiled.absent_devices("v3:2x2")


def test_broken_cache_files_are_ignored(tmp_path):
    (tmp_path / "a.json").write_text("not json")
    assert compiled._read(tmp_path / "a.json") is None
    assert compiled._read(tmp_path / "missing.json") is None
