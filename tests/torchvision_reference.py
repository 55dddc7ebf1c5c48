"""torchvision as a reference for tests, also where its operators do not load (linked against CUDA, which torch is not).

It comes with the extra `bench`, with the torch that fits. The operators that are needed are then declared through
`torch.library`: NMS is the plain greedy loop, RoIAlign torchvision's own form in Python, which can be differentiated.
Where its operators do load, they are used. Importing this skips the test where torch or torchvision is missing.
"""

import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

ROIS = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
BACK = "Tensor grad, Tensor rois, Tensor x, float s, SymInt a, SymInt b, SymInt c, SymInt d, SymInt e, SymInt f"
DEFORMED = (
    "Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt a, SymInt b, SymInt c, SymInt d, SymInt e, "
    "SymInt f, SymInt g, SymInt h, bool m"
)
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({ROIS}, int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward(Tensor grad, Tensor rois, float s, SymInt a, SymInt b, SymInt c, SymInt d, SymInt e, "
    "SymInt f, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({ROIS}) -> (Tensor, Tensor)",
    f"ps_roi_pool({ROIS}) -> (Tensor, Tensor)",
    f"ps_roi_align({ROIS}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_roi_pool_backward({BACK}) -> Tensor",
    f"_ps_roi_pool_backward({BACK}) -> Tensor",
    f"_ps_roi_align_backward({BACK}) -> Tensor",
    f"deform_conv2d(Tensor input, {DEFORMED}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, Tensor input, {DEFORMED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def greedy_nms(boxes, scores, threshold):
    """Indices of the boxes [n, 4] that stay, by falling score; of equal scores the first comes first."""
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    gone, stay = torch.zeros(len(boxes), dtype=torch.bool), []
    for i in scores.argsort(descending=True, stable=True).tolist():
        if not gone[i]:
            stay.append(i)
            size = (torch.minimum(boxes[i, 2:], boxes[:, 2:]) - torch.maximum(boxes[i, :2], boxes[:, :2])).clamp(min=0)
            shared = size[:, 0] * size[:, 1]
            gone |= shared / (area[i] + area - shared) > threshold
    return torch.tensor(stay, dtype=torch.int64)


def load():
    """torchvision, with operators that run."""
    try:
        import torchvision

        torchvision.extension._assert_has_ops()
        return torchvision
    except ModuleNotFoundError as error:
        pytest.skip(f"{error}: install the extra bench", allow_module_level=True)
    except (ImportError, RuntimeError, OSError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    library.impl("nms", greedy_nms, "CPU")
    load.library = library  # lives as long as the operators
    import torchvision
    import torchvision.extension
    import torchvision.models.detection.roi_heads
    import torchvision.ops.boxes
    import torchvision.ops.poolers
    from torchvision.ops._utils import convert_boxes_to_roi_format

    module = sys.modules["torchvision.ops.roi_align"]
    plain, interpolate = (
        module._roi_align.__wrapped__,
        module._bilinear_interpolate,
    )  # not compiled, which takes minutes

    def interpolate_inside(input, batch, y, x, ymask, xmask):
        """Points beyond one pixel outside the map are 0, as in the compiled operator; the Python form forgets them."""
        height, width = input.shape[2:]
        rows, columns = (y >= -1) & (y <= height), (x >= -1) & (x <= width)
        inside = rows[:, None, :, None, :, None] & columns[:, None, None, :, None, :]
        return interpolate(input, batch, y, x, ymask, xmask) * inside

    module._bilinear_interpolate = interpolate_inside

    def roi_align(input, boxes, output_size, spatial_scale=1.0, sampling_ratio=-1, aligned=False):
        rois = boxes if isinstance(boxes, torch.Tensor) else convert_boxes_to_roi_format(boxes)
        height, width = (output_size, output_size) if isinstance(output_size, int) else output_size
        return plain(input, rois, spatial_scale, height, width, sampling_ratio, aligned)

    torchvision.ops.poolers.roi_align = torchvision.ops.roi_align = roi_align
    torchvision.models.detection.roi_heads.roi_align = roi_align
    torchvision.ops.boxes._assert_has_ops = lambda: None
    torchvision.extension._has_ops = lambda: True
    return torchvision


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchvision uses what torch has deprecated
    torchvision = load()
