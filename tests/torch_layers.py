"""PyTorch's own Transformer layers with our parameters, as NumPy arrays by our paths."""

import numpy as np
import torch


def encoder_layer(params, path, heads, *, norm_first, activation, epsilon):
    """`nn.TransformerEncoderLayer` with the parameters below `path`."""
    features, hidden = params[f"{path}/mlp/inner/kernel"].shape
    layer = torch.nn.TransformerEncoderLayer(
        features, heads, hidden, 0.0, activation, epsilon, batch_first=True, norm_first=norm_first
    )
    _fill(layer, params, path, {"self_attn": "attention"}, ["attention", "mlp"])
    return layer.eval()


def decoder_layer(params, path, heads, *, norm_first, activation, epsilon):
    """`nn.TransformerDecoderLayer` with the parameters below `path`."""
    features, hidden = params[f"{path}/mlp/inner/kernel"].shape
    layer = torch.nn.TransformerDecoderLayer(
        features, heads, hidden, 0.0, activation, epsilon, batch_first=True, norm_first=norm_first
    )
    _fill(layer, params, path, {"self_attn": "attention", "multihead_attn": "cross"}, ["attention", "cross", "mlp"])
    return layer.eval()


def layer_norm(params, path, x, epsilon):
    return torch.nn.functional.layer_norm(
        x, x.shape[-1:], tensor(params[f"{path}/scale"]), tensor(params[f"{path}/bias"]), epsilon
    )


def linear(params, path, x):
    return x @ tensor(params[f"{path}/kernel"]) + tensor(params[f"{path}/bias"])


def tensor(array):
    return torch.tensor(np.asarray(array))


@torch.no_grad()
def _fill(layer, params, path, attentions, norms):
    for theirs, ours in attentions.items():
        _fill_attention(getattr(layer, theirs), params, f"{path}/{ours}")
    for theirs, ours in (("linear1", "inner"), ("linear2", "outer")):
        getattr(layer, theirs).weight.copy_(tensor(params[f"{path}/mlp/{ours}/kernel"]).T)
        getattr(layer, theirs).bias.copy_(tensor(params[f"{path}/mlp/{ours}/bias"]))
    for number, block in enumerate(norms, 1):
        norm = getattr(layer, f"norm{number}")
        norm.weight.copy_(tensor(params[f"{path}/{block}_residual/norm/scale"]))
        norm.bias.copy_(tensor(params[f"{path}/{block}_residual/norm/bias"]))


def _fill_attention(theirs, params, path):
    size = theirs.embed_dim
    kernels = [tensor(params[f"{path}/{name}/kernel"]).reshape(size, size).T for name in ("query", "key", "value")]
    theirs.in_proj_weight.copy_(torch.cat(kernels))
    theirs.out_proj.weight.copy_(tensor(params[f"{path}/out/kernel"]).reshape(size, size).T)
    biases = [params.get(f"{path}/{name}/bias", np.zeros(size)) for name in ("query", "key", "value", "out")]
    *three, out = [tensor(bias).reshape(size) for bias in biases]
    theirs.in_proj_bias.copy_(torch.cat(three))
    theirs.out_proj.bias.copy_(out)
