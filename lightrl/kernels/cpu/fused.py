"""What stands between a transformer's matrix products, in few passes over memory: RMS norm, SwiGLU, rotary embedding.

transformers writes them as chains of elementwise operations, each of which reads and writes a whole matrix of (tokens,
features), and autograd keeps several of these. On a CPU small models spend more time there than in their products. Here
each is one autograd function with a gradient written by hand, which goes through the rows in blocks that stay in the
processor's cache and keeps only its inputs. The results are the same but for rounding.

`fuse` puts them in place of a model's own only in the classes listed here, which are those of transformers' Llama under
other names; tests/kernels checks each against its replacement. Linear layers are still called as modules, so adapters,
hooks and sharded parameters work as before. Outside float32 and float64 on a CPU, and under autocast, the model's own
code runs.

Sources: Zhang and Sennrich 2019 (RMS norm), https://arxiv.org/abs/1910.07467; Shazeer 2020 (SwiGLU),
https://arxiv.org/abs/2002.05202; Su et al. 2021 (rotary embedding), https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["fuse", "rms_norm", "rotate", "swiglu"]

BLOCK = 1 << 17  # elements of a block, for each thread: half a megabyte in float32

# Classes of transformers 5.19, as FOLDER.CLASS of transformers/models/FOLDER/modeling_FOLDER.py.
NORMS = """
    apertus.ApertusRMSNorm arcee.ArceeRMSNorm deepseek_v2.DeepseekV2RMSNorm deepseek_v3.DeepseekV3RMSNorm
    ernie4_5.Ernie4_5RMSNorm exaone4.Exaone4RMSNorm falcon_h1.FalconH1RMSNorm glm.GlmRMSNorm glm4.Glm4RMSNorm
    glm4_moe.Glm4MoeRMSNorm granite.GraniteRMSNorm granitemoe.GraniteMoeRMSNorm
    hunyuan_v1_dense.HunYuanDenseV1RMSNorm idefics3.Idefics3RMSNorm lfm2.Lfm2RMSNorm llama.LlamaRMSNorm
    minimax.MiniMaxRMSNorm minimax_m2.MiniMaxM2RMSNorm ministral.MinistralRMSNorm ministral3.Ministral3RMSNorm
    mistral.MistralRMSNorm mistral3.Mistral3RMSNorm mistral4.Mistral4RMSNorm mixtral.MixtralRMSNorm
    olmoe.OlmoeRMSNorm phi3.Phi3RMSNorm qwen2.Qwen2RMSNorm qwen2_5_vl.Qwen2_5_VLRMSNorm
    qwen2_moe.Qwen2MoeRMSNorm qwen2_vl.Qwen2VLRMSNorm qwen3.Qwen3RMSNorm qwen3_moe.Qwen3MoeRMSNorm
    qwen3_vl.Qwen3VLTextRMSNorm qwen3_vl_moe.Qwen3VLMoeTextRMSNorm seed_oss.SeedOssRMSNorm
    smollm3.SmolLM3RMSNorm
""".split()  # noqa: SIM905 - a list of one name a line is long
MLPS = """
    cohere.CohereMLP cohere2.Cohere2MLP deepseek_v2.DeepseekV2MLP deepseek_v3.DeepseekV3MLP ernie4_5.Ernie4_5MLP
    exaone4.Exaone4MLP gemma.GemmaMLP gemma2.Gemma2MLP gemma3.Gemma3MLP glm4_moe.Glm4MoeMLP granite.GraniteMLP
    hunyuan_v1_dense.HunYuanDenseV1MLP llama.LlamaMLP ministral.MinistralMLP ministral3.Ministral3MLP
    mistral.MistralMLP mistral4.Mistral4MLP olmo.OlmoMLP olmo2.Olmo2MLP olmo3.Olmo3MLP olmoe.OlmoeMLP
    qwen2.Qwen2MLP qwen2_vl.Qwen2MLP qwen2_5_vl.Qwen2MLP qwen2_moe.Qwen2MoeMLP qwen3.Qwen3MLP qwen3_5.Qwen3_5MLP
    qwen3_moe.Qwen3MoeMLP qwen3_next.Qwen3NextMLP qwen3_vl.Qwen3VLTextMLP qwen3_vl_moe.Qwen3VLMoeTextMLP
    smollm3.SmolLM3MLP stablelm.StableLmMLP
""".split()  # noqa: SIM905 - a list of one name a line is long
ATTENTIONS = """
    apertus.ApertusAttention arcee.ArceeAttention deepseek_v3.DeepseekV3Attention exaone4.Exaone4Attention
    falcon_h1.FalconH1Attention gemma.GemmaAttention gemma2.Gemma2Attention gemma3.Gemma3Attention
    granite.GraniteAttention granitemoe.GraniteMoeAttention hunyuan_v1_dense.HunYuanDenseV1Attention
    lfm2.Lfm2Attention llama.LlamaAttention minimax.MiniMaxAttention ministral.MinistralAttention
    ministral3.Ministral3Attention mistral.MistralAttention mistral4.Mistral4Attention mixtral.MixtralAttention
    olmoe.OlmoeAttention phi.PhiAttention phimoe.PhimoeAttention qwen2.Qwen2Attention
    qwen2_5_vl.Qwen2_5_VLAttention qwen2_moe.Qwen2MoeAttention qwen2_vl.Qwen2VLAttention qwen3.Qwen3Attention
    qwen3_moe.Qwen3MoeAttention qwen3_vl.Qwen3VLTextAttention qwen3_vl_moe.Qwen3VLMoeTextAttention
    seed_oss.SeedOssAttention smollm3.SmolLM3Attention stablelm.StableLmAttention starcoder2.Starcoder2Attention
""".split()  # noqa: SIM905 - a list of one name a line is long

_SILU = {"SiLU", "SiLUActivation"}  # torch's and transformers' classes
_silu = torch.ops.aten.silu.out


def fuse(model: nn.Module) -> None:
    """Replaces the `forward` of the modules of `model` whose classes are listed, in these instances alone."""
    for module in model.modules():
        make = _REPLACEMENTS.get(_listed_as(type(module)))
        if make is not None and "forward" not in vars(module):  # else somebody has replaced it
            replacement = make(module)
            if replacement is not None:
                vars(module)["forward"] = MethodType(replacement, module)


def _listed_as(kind: type) -> str:
    """FOLDER.CLASS of a class of transformers' models with its own `forward`, "" of any other."""
    package, _, folder = kind.__module__.rpartition(".")[0].rpartition(".")
    own = getattr(getattr(kind, "forward", None), "__module__", None) == kind.__module__
    return f"{folder}.{kind.__name__}" if package == "transformers.models" and own else ""


def _norm_replacement(module: nn.Module) -> Callable[..., Tensor]:
    return _norm_forward


def _mlp_replacement(module: Any) -> Callable[..., Tensor] | None:
    return _mlp_forward if type(module.act_fn).__name__ in _SILU else None


def _attention_replacement(module: nn.Module) -> Callable[..., Any]:
    """The module's own forward, in which the name `apply_rotary_pos_emb` means `rotate`."""
    own: Any = type(module).forward
    rotary = own.__globals__["apply_rotary_pos_emb"]
    names = {**own.__globals__, "apply_rotary_pos_emb": _rotary_or(rotary)}
    rebound = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    rebound.__kwdefaults__ = own.__kwdefaults__
    return rebound


_REPLACEMENTS: dict[str, Callable[[Any], Callable[..., Any] | None]] = {
    **dict.fromkeys(NORMS, _norm_replacement),
    **dict.fromkeys(MLPS, _mlp_replacement),
    **dict.fromkeys(ATTENTIONS, _attention_replacement),
}


def _fits(*tensors: Tensor) -> bool:
    same = {(x.device.type, x.dtype) for x in tensors}
    return same <= {("cpu", torch.float32)} or same <= {("cpu", torch.float64)}


def _plain() -> bool:
    """Whether nothing looks at the single operations: neither autocast nor a compiler."""
    return not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    if not _fits(hidden_states, self.weight) or not _plain():
        result: Tensor = type(self).forward(self, hidden_states)
        return result
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    both = swiglu(gate, up) if _fits(gate, up) and _plain() else self.act_fn(gate) * up
    result: Tensor = self.down_proj(both)
    return result


def _rotary_or(own: Callable[..., Any]) -> Callable[..., Any]:
    """`rotate` where it applies, else `own`."""

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if unsqueeze_dim != 1 or not _fits(q, k, cos, sin) or not _plain():
            return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return apply_rotary_pos_emb


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
