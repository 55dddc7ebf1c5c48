"""Networks of recipes as PyTorch modules, with our names for their parameters; needs torch and torchvision."""

import torch
import torchvision_reference  # noqa: F401  (before torchvision)
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.resnet import BasicBlock
from torchvision.ops import box_iou


class SmallBlock(nn.Module):
    """Two 3x3 convolutions beside the identity or a 1x1 convolution; strides pad behind the image alone."""

    def __init__(self, inside: int, features: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv1 = nn.Conv2d(inside, features, 3, stride, padding=0, bias=False)
        self.norm1 = nn.BatchNorm2d(features)
        self.conv2 = nn.Conv2d(features, features, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(features)
        same = stride == 1 and inside == features
        self.shortcut = None if same else nn.Conv2d(inside, features, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (1, 1, 1, 1) if self.stride == 1 else (0, 1, 0, 1))
        y = self.norm2(self.conv2(F.silu(self.norm1(self.conv1(padded)))))
        return F.silu(y + (x if self.shortcut is None else self.shortcut(x)))


class SmallResNet(nn.Module):
    """The network of `digits`: stages of one block, of 16, 32 and 64 features."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(SmallBlock(16, 16, 1), SmallBlock(16, 32, 2), SmallBlock(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean cross-entropy of smoothed labels."""
        x = self.blocks(F.silu(self.norm(self.stem(as_torch(batch["image"])))))
        return F.cross_entropy(self.head(x.mean((2, 3))), batch["label"].long(), label_smoothing=0.1)


class Ssd(nn.Module):
    """The detector of `ssd-shapes`: torchvision's blocks, default boxes as an array, losses as in arXiv:1512.02325."""

    def __init__(self, defaults: Tensor, classes: int, shapes: int) -> None:
        super().__init__()
        self.register_buffer("defaults", defaults)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16))
        sizes = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 1), (64, 64, 1)]
        self.blocks = nn.Sequential(*(basic_block(*size) for size in sizes))
        self.extra = nn.ModuleList(
            nn.Sequential(nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU()) for _ in range(2)
        )
        self.logits = nn.ModuleList(nn.Conv2d(64, shapes * classes, 3, padding=1) for _ in range(3))
        self.offsets = nn.ModuleList(nn.Conv2d(64, shapes * 4, 3, padding=1) for _ in range(3))
        self.shapes = shapes

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean over images of the loss of classes and boxes over the image's positives."""
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        image = as_torch((batch["image"].to(self.defaults.dtype) / 255 - mean) / std)
        x = self.blocks(F.max_pool2d(F.relu(self.stem(image)), 3, 2, 1))
        maps = [x]
        for layer in self.extra:
            maps.append(layer(maps[-1]))
        logits, offsets = (
            torch.cat([self.by_shape(head(x)) for head, x in zip(heads, maps, strict=True)], 1)
            for heads in (self.logits, self.offsets)
        )
        losses = [self.of_image(*each) for each in zip(logits, offsets, batch["box"], batch["label"], strict=True)]
        return torch.stack(losses).mean()

    def by_shape(self, x: Tensor) -> Tensor:
        """[n, shapes * k, h, w] to [n, shapes * h * w, k]."""
        n, _, h, w = x.shape
        return x.reshape(n, self.shapes, -1, h, w).permute(0, 1, 3, 4, 2).reshape(n, self.shapes * h * w, -1)

    def of_image(self, logits: Tensor, offsets: Tensor, truth: Tensor, label: Tensor) -> Tensor:
        """One image's loss; labels of 0 are padding."""
        truth, label = truth[label > 0].to(offsets.dtype), label[label > 0].long()
        if not len(truth):
            return logits.sum() * 0
        overlap = box_iou(truth, self.defaults)
        best, match = overlap.max(0)
        match[best <= 0.5] = -1
        for number, box in enumerate(overlap.argmax(1)):  # the last of several has it
            match[box] = number
        positive = match >= 0
        costs = F.cross_entropy(logits, torch.where(positive, label[match], 0), reduction="none")
        hardest = torch.where(positive, -1.0, costs.detach()).argsort(descending=True, stable=True)
        negative = hardest[: 3 * int(positive.sum())]
        counted = positive.clone()
        counted[negative] = True
        coder = BoxCoder((10.0, 10.0, 5.0, 5.0))
        wanted = coder.encode_single(truth[match[positive]], self.defaults[positive])
        boxes = F.smooth_l1_loss(offsets[positive], wanted, reduction="sum")
        return (costs[counted].sum() + boxes) / positive.sum()


def basic_block(inside: int, features: int, stride: int) -> BasicBlock:
    """torchvision's block, with a projection where the shape changes."""
    shortcut = nn.Sequential(nn.Conv2d(inside, features, 1, stride, bias=False), nn.BatchNorm2d(features))
    return BasicBlock(inside, features, stride, None if inside == features and stride == 1 else shortcut)


def as_torch(image: Tensor) -> Tensor:
    """[n, h, w, c] to [n, c, h, w]."""
    return image.permute(0, 3, 1, 2)
