"""Liger's Triton kernels (https://arxiv.org/abs/2410.10989), where the package `liger-kernel` is installed.

Written from its documented functions (`liger_kernel.transformers.functional`), and not run yet: there was no GPU.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor


def installed() -> bool:
    """Whether the package is there. It is imported by the first call of a kernel."""
    return find_spec("liger_kernel") is not None


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels take them: of one dtype on CUDA, outside of a compiler, which fuses by itself."""
    same = {(x.device.type, x.dtype) for x in tensors}
    taken = {("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    return len(same) == 1 and same <= taken and not torch.compiler.is_compiling()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm

    result: Tensor = liger_rms_norm(x, weight, eps, offset=0.0, casting_mode="llama", in_place=False)
    return result


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_swiglu

    result: Tensor = liger_swiglu(gate, up)
    return result


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.transformers.functional import liger_rope

    turned: tuple[Tensor, Tensor] = liger_rope(q, k, cos, sin)
    return turned
