"""Which kernels stand in for a transformer's RMS norm, SwiGLU and rotary embedding, by the device that they run on.

`KERNELS` has them by type of device: LightRL's own on a CPU, Liger's on CUDA where the package `liger-kernel` is
installed. Another device gets kernels by an entry there. `fuse` puts the choice in place of a model's own code, in the
classes listed here alone, which are those of transformers' Llama under other names; tests/kernels checks each against
its replacement. Linear layers are still called as modules, so adapters, hooks and sharded parameters work as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from lightrl.kernels.cpu import fused
from lightrl.kernels.cuda import liger


@dataclass(frozen=True)
class Kernels:
    """What runs on one type of device.

    Attributes:
        fits: of the tensors of a call: whether the kernels take them; else the model's own code runs.
        rms_norm: (x (..., D), weight (D,), eps) -> x / sqrt(mean(x^2) + eps) * weight.
        swiglu: (gate, up) -> gate * sigmoid(gate) * up.
        rotate: (q, k (B, H, T, D), cos, sin (B or 1, T, D)) -> both turned. It may write to q and k.
    """

    fits: Callable[..., bool]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return fused.rotate(q, cos, sin), fused.rotate(k, cos, sin)


KERNELS: dict[str, Kernels] = {"cpu": Kernels(fused.fits, fused.rms_norm, fused.swiglu, _rotate_both)}
"""By type of device."""
if liger.installed():
    KERNELS["cuda"] = Kernels(liger.fits, liger.rms_norm, liger.swiglu, liger.rotate)

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


def fuse(model: nn.Module, *, cpu: bool = True) -> None:
    """Replaces the `forward` of the modules of `model` whose classes are listed, in these instances alone.

    Args:
        model: whose modules.
        cpu: whether on a CPU too.
    """
    kernels = {device: own for device, own in KERNELS.items() if cpu or device != "cpu"}
    for module in model.modules() if kernels else ():
        make = _REPLACEMENTS.get(_listed_as(type(module)))
        if make is not None and "forward" not in vars(module):  # else somebody has replaced it
            replacement = make(module, kernels)
            if replacement is not None:
                vars(module)["forward"] = MethodType(replacement, module)


def _chosen(kernels: dict[str, Kernels], *tensors: Tensor) -> Kernels | None:
    own = kernels.get(tensors[0].device.type)
    return own if own is not None and own.fits(*tensors) else None


def _listed_as(kind: type) -> str:
    """FOLDER.CLASS of a class of transformers' models with its own `forward`, "" of any other."""
    package, _, folder = kind.__module__.rpartition(".")[0].rpartition(".")
    own = getattr(getattr(kind, "forward", None), "__module__", None) == kind.__module__
    return f"{folder}.{kind.__name__}" if package == "transformers.models" and own else ""


def _norm_replacement(module: nn.Module, kernels: dict[str, Kernels]) -> Callable[..., Tensor]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        chosen = _chosen(kernels, hidden_states, self.weight)
        if chosen is None:
            result: Tensor = type(self).forward(self, hidden_states)
            return result
        return chosen.rms_norm(hidden_states, self.weight, self.variance_epsilon)

    return forward


def _mlp_replacement(module: Any, kernels: dict[str, Kernels]) -> Callable[..., Tensor] | None:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        chosen = _chosen(kernels, gate, up)
        both = self.act_fn(gate) * up if chosen is None else chosen.swiglu(gate, up)
        result: Tensor = self.down_proj(both)
        return result

    return forward if type(module.act_fn).__name__ in _SILU else None


def _attention_replacement(module: nn.Module, kernels: dict[str, Kernels]) -> Callable[..., Any]:
    """The module's own forward, in which the name `apply_rotary_pos_emb` means the kernels' where they apply."""
    own: Any = type(module).forward
    rotary = own.__globals__["apply_rotary_pos_emb"]

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        chosen = _chosen(kernels, q, k, cos, sin) if unsqueeze_dim == 1 else None
        return rotary(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim) if chosen is None else chosen.rotate(q, k, cos, sin)

    names = {**own.__globals__, "apply_rotary_pos_emb": apply_rotary_pos_emb}
    rebound = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    rebound.__kwdefaults__ = own.__kwdefaults__
    return rebound


_REPLACEMENTS: dict[str, Callable[[Any, dict[str, Kernels]], Callable[..., Any] | None]] = {
    **dict.fromkeys(NORMS, _norm_replacement),
    **dict.fromkeys(MLPS, _mlp_replacement),
    **dict.fromkeys(ATTENTIONS, _attention_replacement),
}
