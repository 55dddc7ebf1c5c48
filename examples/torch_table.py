"""A table of ten million rows as a tensor train in a PyTorch program: python examples/torch_table.py"""

import torch

from multipod.interop.torch import TTEmbeddingBag

torch.manual_seed(0)
table = TTEmbeddingBag(10_000_000, 64, tt_ranks=16, mode="sum", sparse=True, weight_dist="approx-normal")
print(f"{table.tt.parameters:,} numbers in place of {table.num_embeddings * table.embedding_dim:,}")

ids = torch.tensor([3, 9_999_999, 1_234_567, 3])
offsets = torch.tensor([0, 1, 3])  # three bags: one id, two ids, one id
wanted = torch.randn(3, 64)
optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=3e-2)

losses = []
for _ in range(100):
    loss = (table(ids, offsets) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f}, after 100 updates {losses[-1]:.2f}")
