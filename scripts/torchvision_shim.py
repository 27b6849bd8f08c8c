"""Lets a torchvision built for CUDA be imported beside a torch built for CPU. Its transforms are plain Python.

torchvision registers shape rules for two operators of its C++ library, which cannot be loaded without CUDA; so the
operators' schemas are defined before its first import. `scripts/setup.sh` puts this file into the virtual environment,
with a `.pth` file that loads it in every process.
"""

import importlib.abc
import sys

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; defines the operators when torchvision is looked for."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                for schema in _SCHEMAS:
                    torch.library.define(f"torchvision::{schema.partition('(')[0]}", "(" + schema.partition("(")[2])
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
