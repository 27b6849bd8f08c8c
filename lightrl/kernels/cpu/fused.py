"""What stands between a transformer's matrix products, in few passes over memory: RMS norm, SwiGLU, rotary embedding.

transformers writes them as chains of elementwise operations, each of which reads and writes a whole matrix of (tokens,
features), and autograd keeps several of these. On a CPU small models spend more time there than in their products. Here
each is one autograd function with a gradient written by hand, which goes through the rows in blocks that stay in the
processor's cache and keeps only its inputs. The results are the same but for rounding.

`lightrl.kernels.fusing` puts them in place of a model's own. Outside float32 and float64 on a CPU, and under autocast,
the model's own code runs.

Sources: Zhang and Sennrich 2019 (RMS norm), https://arxiv.org/abs/1910.07467; Shazeer 2020 (SwiGLU),
https://arxiv.org/abs/2002.05202; Su et al. 2021 (rotary embedding), https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1 << 17  # elements of a block, for each thread: half a megabyte in float32

_silu = torch.ops.aten.silu.out


def fits(*tensors: Tensor) -> bool:
    """Whether these functions take them: float32 or float64 on a CPU, and nothing looks at single operations."""
    same = {(x.device.type, x.dtype) for x in tensors}
    plain = not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()
    return plain and (same <= {("cpu", torch.float32)} or same <= {("cpu", torch.float64)})


# ---- the functions -----------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Args:
        x: (..., D). weight: (D,).
        eps: added to the mean square.
    """
    result: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return result


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up, of two (..., D)."""
    result: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (-x2, x1) sin, x1 and x2 being the halves of x's last dimension; cos and sin have no gradient.

    Args:
        x: (B, H, T, D). cos, sin: (B or 1, T, D).
    """
    result: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return result


def _blocks(count: int, width: int) -> list[slice]:
    """Blocks of rows: large enough that each thread gets one of BLOCK elements, which stays in its cache."""
    rows = max(1, BLOCK * torch.get_num_threads() // width)
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        size = x.shape[-1]
        rows = x.reshape(-1, size)
        out, scale = torch.empty_like(rows), rows.new_empty(len(rows), 1)  # scale: 1 / root mean square
        for block in _blocks(*rows.shape):
            part = torch.mean(rows[block].square(), -1, keepdim=True, out=scale[block]).add_(eps).rsqrt_()
            torch.mul(rows[block], part, out=out[block]).mul_(weight)
        ctx.save_for_backward(rows, weight, scale)
        return out.view_as(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        size = x.shape[-1]
        rows = grad.reshape(-1, size)
        dx, dw = torch.empty_like(x), x.new_zeros(1, size)
        for block in _blocks(*x.shape):
            part, product = scale[block], rows[block] * x[block]
            dw.addmm_(part.t(), product)
            along = torch.mv(product, weight).unsqueeze(1).mul_(part.pow(3)).div_(-size)
            torch.mul(rows[block], weight, out=dx[block]).mul_(part).addcmul_(x[block], along)
        return dx.view_as(grad), dw[0], None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        gates, ups = (x.reshape(-1, x.shape[-1]) for x in (gate, up))
        out = torch.empty_like(gates)
        for block in _blocks(*gates.shape):
            _silu(gates[block], out=out[block]).mul_(ups[block])
        ctx.save_for_backward(gates, ups)
        return out.view_as(gate)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gates, ups = ctx.saved_tensors
        rows = grad.reshape(gates.shape)
        d_gate, d_up = torch.empty_like(gates), torch.empty_like(ups)
        for block in _blocks(*gates.shape):
            sigmoid = torch.sigmoid(gates[block])
            silu = gates[block] * sigmoid
            torch.mul(rows[block], silu, out=d_up[block])
            slope = silu.addcmul_(silu, sigmoid, value=-1).add_(sigmoid)
            torch.mul(rows[block], ups[block], out=d_gate[block]).mul_(slope)
        return d_gate.view_as(grad), d_up.view_as(grad)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        half = sin.shape[-1] // 2
        ctx.cos, ctx.sin = cos, sin
        return _rotated(x, cos, torch.cat([-sin[..., :half], sin[..., half:]], -1))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        half = ctx.sin.shape[-1] // 2
        return _rotated(grad, ctx.cos, torch.cat([ctx.sin[..., half:], -ctx.sin[..., :half]], -1)), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (x2, x1) sin; the result lies in memory as (B, T, H, D), as the projections' outputs do."""
    b, h, t, d = x.shape
    tokens = x.transpose(1, 2).reshape(b * t, h, d)
    cos, sin = (y.expand(b, t, d).reshape(b * t, 1, d) for y in (cos, sin))
    out = torch.empty(tokens.shape, dtype=x.dtype, device=x.device)
    for block in _blocks(b * t, h * d):
        turned = tokens[block].roll(d // 2, -1)
        torch.mul(tokens[block], cos[block], out=out[block]).addcmul_(turned, sin[block])
    return out.view(b, t, h, d).transpose(1, 2)
