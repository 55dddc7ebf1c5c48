"""An update of GNMT: ours against the same model of PyTorch's LSTMs, on the same cores.

    python benchmarks/gnmt.py [--features 512] [--examples 64] [--places 24]
    taskset -c 0 python benchmarks/gnmt.py      # one core, where others use the machine too

Milliseconds of a forward and backward pass with Adam, float32, both on all cores and in turn: wall and processor time,
and the medians of the rounds' ratios. Both begin with the same weights; the losses of the first update are compared.
"""

import argparse
from collections.abc import Callable

from multipod import runtime

runtime.prepare(1)  # before JAX is imported

import jax  # noqa: E402
import machine  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import torch  # noqa: E402

from multipod.models.gnmt import Gnmt  # noqa: E402

Params = dict[str, np.ndarray]


class TorchGnmt(torch.nn.Module):
    """The reference's model, of `torch.nn.LSTM`: without dropout, all sentences of full length."""

    def __init__(self, params: Params, layers: int) -> None:
        super().__init__()
        features = params["embedding/table"].shape[1]
        self.embedding = torch.nn.Embedding(*params["embedding/table"].shape)
        self.both = torch.nn.LSTM(features, features, bidirectional=True, batch_first=True)
        widths = [2 * features, *[features] * (layers - 2)]
        self.encoder = torch.nn.ModuleList(torch.nn.LSTM(width, features, batch_first=True) for width in widths)
        self.query, self.key = (torch.nn.Linear(features, features, bias=False) for _ in range(2))
        self.vector = torch.nn.Parameter(torch.tensor(params["attention/vector"]))
        self.gain = torch.nn.Parameter(torch.tensor(params["attention/gain"]))
        self.bias = torch.nn.Parameter(torch.tensor(params["attention/bias"]))
        widths = [features, *[2 * features] * (layers - 1)]
        self.decoder = torch.nn.ModuleList(torch.nn.LSTM(width, features, batch_first=True) for width in widths)
        self.scores = torch.nn.Linear(features, len(params["embedding/table"]))
        self.take(params)

    @torch.no_grad()
    def take(self, params: Params) -> None:
        """Copies our weights."""
        self.embedding.weight.copy_(torch.tensor(params["embedding/table"]))
        self.query.weight.copy_(torch.tensor(params["attention/query/kernel"].T))
        self.key.weight.copy_(torch.tensor(params["attention/key/kernel"].T))
        self.scores.weight.copy_(torch.tensor(params["scores/kernel"].T))
        self.scores.bias.copy_(torch.tensor(params["scores/bias"]))
        named = [("encoder/0", self.both, ""), ("backward", self.both, "_reverse")]
        named += [(f"encoder/{n}", layer, "") for n, layer in enumerate(self.encoder, 1)]
        named += [(f"decoder/{n}", layer, "") for n, layer in enumerate(self.decoder)]
        for name, layer, suffix in named:
            for theirs, ours in (("weight_ih", "kernel"), ("weight_hh", "recurrent")):
                getattr(layer, f"{theirs}_l0{suffix}").copy_(torch.tensor(params[f"{name}/{ours}"].T))
            for bias in ("bias_ih", "bias_hh"):
                getattr(layer, f"{bias}_l0{suffix}").zero_()

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.both(self.embedding(source))[0]
        for number, layer in enumerate(self.encoder):
            x = layer(x)[0] + (x if number else 0)
        encoded, x = x, self.decoder[0](self.embedding(target))[0]
        vector = self.gain * self.vector / self.vector.norm()
        inside = torch.tanh(self.query(x)[:, :, None] + self.key(encoded)[:, None] + self.bias)
        context = torch.softmax(inside @ vector, -1) @ encoded
        for number, layer in enumerate(list(self.decoder)[1:]):
            x = layer(torch.cat([x, context], -1))[0] + (x if number else 0)
        return self.scores(x)


def our_update(model: Gnmt, params: Params, batch: dict[str, np.ndarray]) -> Callable[[], float]:
    """An update of ours; returns the loss."""
    optimizer = optax.adam(1e-3)

    def loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, {}, batch, train=True, key=jax.random.key(0))[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def step(params, state, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        change, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, change), state, value

    run = jax.jit(step, donate_argnums=(0, 1))
    held = [jax.device_put(params), optimizer.init(jax.device_put(params))]

    def update() -> float:
        held[0], held[1], value = run(*held, batch)
        return float(jax.block_until_ready((held, value))[1])

    return update


def torch_update(model: TorchGnmt, batch: dict[str, np.ndarray]) -> Callable[[], float]:
    """An update of PyTorch's; returns the loss."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    source, target, label = (torch.tensor(batch[name]) for name in ("source", "target", "label"))

    def update() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(source, target)
        value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten())
        value.backward()
        optimizer.step()
        return value.item()

    return update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--places", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(machine.headline(machine.facts()), flush=True)
    model = Gnmt(options.vocab, options.features, options.layers, dropout=0.0)
    params = jax.device_get(jax.jit(model.init)(jax.random.key(0))[0])
    rng = np.random.default_rng(0)
    shape = options.examples, options.places
    batch = {name: rng.integers(3, options.vocab, shape) for name in ("source", "target", "label")}
    ways = [our_update(model, params, batch), torch_update(TorchGnmt(params, options.layers), batch)]
    first = [way() for way in ways]
    assert abs(first[0] - first[1]) < 1e-4, f"not the same model: losses {first}"
    size = f"update, {options.layers} + {options.layers} layers of {options.features}, {shape[0]} x {shape[1]} tokens"
    print(machine.table(machine.PAIRED, [machine.paired_row(size, *ways, options.rounds)]))
    print(f"Load average at the end: {machine.facts()['load']}")


if __name__ == "__main__":
    main()
