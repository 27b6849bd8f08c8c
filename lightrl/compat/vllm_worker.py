"""The part of `VLLMEngine` that runs in vLLM's workers, in the engine's or the trainer's processes.

vLLM imports this module by name (`worker_extension_cls`) before it builds the model, and adds the methods of
`WorkerExtension` to its worker. Written for vLLM 0.32.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
import vllm.model_executor.layers.utils as layer_utils
from torch import Tensor, nn
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

_pack_gemm = layer_utils.dispatch_cpu_unquantized_gemm
_HAS_ONEDNN = torch.backends.mkldnn.is_available()  # a constant, which torch.compile can read
_setup_experts = UnquantizedFusedMoEMethod._setup_kernel


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.dtype == torch.float32 and _HAS_ONEDNN and not torch.compiler.is_compiling():
        # torch uses MKL for float32; oneDNN is up to 25% faster on the same unpacked weight, and more on AMD CPUs.
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return nn.functional.linear(x, weight, bias)


def _keep_weight(layer: nn.Module, remove_weight: bool) -> None:
    """Replaces vLLM's packing of CPU weights, which removes the parameter that a sync writes to and loses tied heads.

    Unpacked weights are updated at memcpy speed, and cost 10-15% per matrix product with 64 or more rows.
    """
    if layer.weight.ndim != 2 or layer.weight.is_meta:
        _pack_gemm(layer, remove_weight)
    else:
        layer.cpu_linear = _linear  # type: ignore[assignment]


def _pack_experts(method: Any, layer: nn.Module, w13: Tensor, w2: Tensor) -> None:
    """Also packs experts for vLLM's CPU kernel when they are reloaded. vLLM does so only when it first loads them."""
    reloads = method.moe_kernel is not None
    _setup_experts(method, layer, w13, w2)
    if reloads:
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _add_lora_logits(
    wrapper: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, *, buffer: Any = None, **_: Any
) -> None:
    """Adds the adapter's part of the (rows, vocabulary) logits in place: `y += scale * x @ a.T @ b.T`.

    vLLM looks up one adapter per sequence of the batch, but log-probs of a prompt have one row per token. All requests
    of an engine use the same adapter, so one index is enough.
    """
    index = int(wrapper.sampler_indices[0])
    a, b = a[index, 0], b[index, 0]
    if bool(a.any()):
        count = min(y.shape[1], len(b))  # vLLM pads them differently
        y[:, :count] += (scale * (x.to(a.dtype) @ a.T) @ b[:count].T).to(y.dtype)


def _bind_memory(nodes: list[int]) -> Any:
    """Replaces vLLM's memory binding, whose C++ code prints to stderr for each engine."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            return _bind(nodes)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            os.write(2, b"".join(line for line in said if b"NUMA binding: Using" not in line))


if current_platform.is_cpu():
    if hasattr(torch.ops._C, "init_cpu_memory_env"):
        _bind = torch.ops._C.init_cpu_memory_env
        torch.ops._C.init_cpu_memory_env = _bind_memory  # type: ignore[attr-defined]
    PunicaWrapperCPU.add_lora_logits = _add_lora_logits
    layer_utils.dispatch_cpu_unquantized_gemm = _keep_weight
    UnquantizedFusedMoEMethod._setup_kernel = _pack_experts


class WorkerExtension:
    """Weight loading inside a worker. Methods return error texts, since raising would kill the core."""

    def lightrl_rearranged(self) -> bool:
        """Whether vLLM rearranged weights after loading (experts, quantization), so that they can't be overwritten."""
        plain = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType")
        if not hasattr(self, "_lightrl_rearranged"):
            self._lightrl_rearranged = any(
                hasattr(m, "_cpu_unpacked_conv_weight") or type(getattr(m, "quant_method", None)).__name__ not in plain
                for m in self._lightrl_model().modules()
                if "Attention" not in type(m).__name__  # their method is for a quantized KV cache
            )
        return self._lightrl_rearranged

    def lightrl_begin(self, strict: bool) -> None:
        """Prepares a sync. With `strict`, sets every parameter to NaN so that `lightrl_finish` detects gaps."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self._lightrl_model()
        if self.device.type == "cuda":  # type: ignore[attr-defined] # another thread's steps use another stream
            torch.cuda.synchronize(self.device)  # type: ignore[attr-defined]
        self._lightrl_expected = {name for name, _ in model.named_parameters()}
        self._lightrl_loaded: set[str] = set()
        if self.lightrl_rearranged():
            initialize_layerwise_reload(model)
        elif strict:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dtype in (torch.float32, torch.float16, torch.bfloat16):
                        parameter.fill_(float("nan"))

    def lightrl_load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> str | None:
        """Copies tensors into the model; returns an error text."""
        model = self._lightrl_model()
        if self.lightrl_rearranged():  # keeps tensors until a layer is complete, when ours are no longer valid
            named_tensors = ((name, tensor.clone()) for name, tensor in named_tensors)
        try:
            with torch.no_grad():
                loaded: Any = model.load_weights(named_tensors)  # type: ignore[operator]
            self._lightrl_loaded |= set(loaded or ())
            if self.device.type == "cuda":  # type: ignore[attr-defined]
                torch.cuda.synchronize(self.device)  # type: ignore[attr-defined]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def lightrl_finish(self, strict: bool) -> list[str]:
        """Ends a sync. With `strict`, returns the names of parameters that were not fully covered."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self._lightrl_model()
        if self.lightrl_rearranged():
            finalize_layerwise_reload(model, self.model_config)  # type: ignore[attr-defined]
            return sorted(self._lightrl_expected - self._lightrl_loaded) if self._lightrl_loaded else []
        if not strict:
            return []
        return [name for name, p in model.named_parameters() if p.is_floating_point() and bool(p.sum().isnan())]

    def _lightrl_model(self) -> nn.Module:
        return self.model_runner.get_model()  # type: ignore[attr-defined]
