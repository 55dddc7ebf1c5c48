"""ResNet-50 and BERT-large in PyTorch, as `accelerator.py` sets them beside ours: the peer of that benchmark."""

from collections.abc import Callable

import numpy as np
import torch

Updates = Callable[[int], float]


class TorchBert(torch.nn.Module):
    """BERT's encoder and its head for hidden tokens, of PyTorch's own layers: attention is its fused one."""

    def __init__(self, vocab: int, features: int, hidden: int, heads: int, layers: int, positions: int) -> None:
        super().__init__()
        self.tokens, self.positions = (torch.nn.Embedding(rows, features) for rows in (vocab, positions))
        layer = torch.nn.TransformerEncoderLayer(features, heads, hidden, 0.1, "gelu", batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.transform = torch.nn.Linear(features, features)
        self.norm, self.head_norm = torch.nn.LayerNorm(features), torch.nn.LayerNorm(features)

    def forward(self, token: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """Logits of the hidden places."""
        places = torch.arange(token.shape[1], device=token.device)
        x = self.encoder(self.norm(self.tokens(token) + self.positions(places)))
        x = torch.gather(x, 1, masked[..., None].expand(-1, -1, x.shape[-1]))
        x = self.head_norm(torch.nn.functional.gelu(self.transform(x)))
        return x @ self.tokens.weight.T


def torch_resnet(depth: int) -> torch.nn.Module | None:
    """torchvision's ResNet; None where torchvision is missing, or is a wheel for another PyTorch."""
    try:
        import torchvision
    except (ImportError, RuntimeError):
        return None
    return getattr(torchvision.models, f"resnet{depth}")()


def torch_updates(model: torch.nn.Module, batch: dict[str, np.ndarray], inputs: tuple[str, ...]) -> Updates:
    """Updates by AdamW in bfloat16 on a GPU, compiled; in float32 as they are on a CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).train()
    run = torch.compile(model) if device == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    placed = {name: torch.tensor(batch[name]).to(device) for name in (*inputs, "label")}
    for name in placed:
        if not placed[name].is_floating_point():
            placed[name] = placed[name].long()

    def updates(count: int) -> float:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = run(*(placed[name] for name in inputs))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), placed["label"].flatten())
            loss.backward()
            optimizer.step()
        return loss.item()  # waits for the device

    return updates
