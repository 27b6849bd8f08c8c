"""Makes a torchvision built for CUDA importable with a torch built for CPU. Its transforms are pure Python.

torchvision registers shape rules for two operators of its C++ library, which can't be loaded without CUDA. This module
defines the operators' schemas before torchvision is imported. `scripts/setup.sh` copies it to the virtual environment,
with a `.pth` file that loads it in every process.
"""

import importlib.abc
import sys

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Defines the operators when torchvision is imported. Finds no modules itself."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                for schema in _SCHEMAS:
                    torch.library.define(f"torchvision::{schema.partition('(')[0]}", "(" + schema.partition("(")[2])
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
