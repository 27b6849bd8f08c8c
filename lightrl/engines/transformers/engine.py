"""A plain PyTorch engine without compilation, for use without vLLM and as the numerical reference of other engines.

It prefills each prompt once for all its completions, removes finished completions from the batch immediately, and uses
separate random numbers for each completion.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from lightrl.compat.transformers import router_modules
from lightrl.engines.base import SteppingEngine
from lightrl.engines.transformers.cpu_decoder import CPUDecoder, CPUModel, copy_by_rows
from lightrl.engines.transformers.decoders import CacheDecoder, Decoder
from lightrl.engines.transformers.decoding import Generation
from lightrl.models.loading import CONFIG_KEYS, causal_class, fix_rope, longest_sequence
from lightrl.models.policy import keep_attention_caps
from lightrl.models.turns import require_known
from lightrl.records import CompletionGroup, EngineContext, GenerationRequest, Routes, SamplingParams

if TYPE_CHECKING:
    from lightrl.models.routing import Routers

log = logging.getLogger(__name__)


class TransformersEngine(SteppingEngine):
    """Samples with transformers models in the trainer's process.

    Results are deterministic and independent of the order and number of prompts, except for rounding in matrix
    products. The engine does not use the global random generators.

    Args:
        max_sequences: Maximum number of concurrent completions. Groups are not split, so a larger group runs alone.
        max_batch_tokens: Maximum number of tokens in the KV cache. A group that needs more runs alone.
        max_model_len: Maximum sequence length in tokens, including prompt and completion. Defaults to the model's
            limit.
        dtype: "float32", "bfloat16", "float16", or "float64". Defaults to the trainer's.
        cpu_kernels: Whether to decode float32 Llama-style models on a CPU with faster kernels.
        model_kwargs: Additional arguments of `from_pretrained` (trust_remote_code, revision, attn_implementation, ...).
    """

    records_support = True

    def __init__(
        self,
        max_sequences: int = 256,
        max_batch_tokens: int = 1 << 17,
        max_model_len: int | None = None,
        dtype: str | None = None,
        cpu_kernels: bool = True,
        model_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.max_sequences = max_sequences
        self.max_batch_tokens = max_batch_tokens
        self._max_model_len = max_model_len
        self.cpu_kernels = cpu_kernels
        self._dtype = dtype
        self._model_kwargs = dict(model_kwargs or {})
        self._model: Any = None
        self._tokenizer: Any = None
        self._cpu_model: CPUModel | None = None
        self._routers: Routers | None = None
        self._eos_ids: set[int] = set()
        self._longest = 0
        self._generation: Generation | None = None
        self._keep_cache = False

    def start(self, context: EngineContext) -> None:
        if self.started:
            return
        self.dtype = self._dtype or context.dtype
        dtype = getattr(torch, self.dtype)
        path, kwargs = context.model_path, self._model_kwargs
        # Initializing a module draws random numbers, which must not change the trainer's.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(context.seed)  # torch.manual_seed would also seed the accelerators
            config = AutoConfig.from_pretrained(path, **{k: v for k, v in kwargs.items() if k in CONFIG_KEYS})
            auto_class = causal_class(config)
            if context.random_init:
                model = auto_class.from_config(config, dtype=dtype)
            else:
                model = auto_class.from_pretrained(path, dtype=dtype, **kwargs)
        model = model.to(context.device).eval().requires_grad_(False)
        keep_attention_caps(model)
        rope_limit = fix_rope(model)
        self._tokenizer = AutoTokenizer.from_pretrained(path, **kwargs)
        self._eos_ids = _end_ids(model, self._tokenizer)
        fast = model.device.type == "cpu" and self.cpu_kernels and CPUModel.fits(model)
        self._cpu_model = CPUModel(model) if fast else None
        self._routers = _routers(model)
        self.replays_routes = self._routers is not None
        self.device, self._keep_cache = str(model.device), context.keep_cache
        limits = (longest_sequence(model.config), self._max_model_len, rope_limit)
        self._longest = min((limit for limit in limits if limit is not None), default=1 << 30)
        self._model = model

    def known_model_len(self, model_path: str) -> int | None:
        kwargs = {key: value for key, value in self._model_kwargs.items() if key in CONFIG_KEYS}
        own = longest_sequence(AutoConfig.from_pretrained(model_path, **kwargs))
        return min((limit for limit in (own, self._max_model_len) if limit is not None), default=None)

    @property
    def started(self) -> bool:
        return self._model is not None

    @property
    def max_model_len(self) -> int:
        self._require_started()
        return self._longest

    def close(self) -> None:
        if not self.end_driver():
            log.warning("TransformersEngine hangs in a step; its thread is leaked.")
        self._generation = None
        self._model = self._tokenizer = self._cpu_model = None
        self.policy_version = -1

    def _require_started(self) -> None:
        if not self.started:
            raise RuntimeError("TransformersEngine is not started. Call start(context) first.")

    # ------------------------------------------------------------------------------------------------- sampling

    def add(self, requests: list[GenerationRequest]) -> None:
        """See `SteppingEngine.add`. A request that doesn't fit the current decoder waits until all others finish."""
        self._generation = self._generation or self._new_generation()
        self._generation.add(requests)

    def _new_generation(self) -> Generation:
        return Generation(
            self._decoder,
            self.policy_version,
            tokenizer=self._tokenizer,
            eos_ids=self._eos_ids,
            device=self._model.device,
            max_sequences=self.max_sequences,
            max_tokens=self.max_batch_tokens,
        )

    def step(self) -> list[CompletionGroup]:
        assert self._generation is not None
        groups = self._generation.step()
        if not self._generation.jobs:
            self._generation = None
        return groups

    def abort(self, requests: list[GenerationRequest]) -> None:
        if self._generation is not None:
            self._generation.abort(requests)
            if not self._generation.jobs:
                self._generation = None

    def partials(self) -> list[CompletionGroup]:
        return [] if self._generation is None else self._generation.partials()

    def _decoder(self, requests: Sequence[GenerationRequest]) -> Decoder:
        """Returns an empty decoder for the waiting requests."""
        if self._cpu_model is None or any(request.inputs for request in requests):
            return CacheDecoder(self._model, self._routers)
        new_tokens = max(request.sampling.max_new_tokens for request in requests)
        longest = max(len(request.token_ids) for request in requests) + new_tokens
        return CPUDecoder(self._cpu_model, longest, new_tokens)

    def check_sampling(self, sampling: SamplingParams, name: str = "sampling", *, trained: bool) -> None:
        for field in ("regex", "json_schema", "extra"):
            if getattr(sampling, field):
                raise ValueError(
                    f"{name}.{field}={getattr(sampling, field)!r}: TransformersEngine does not support it. "
                    "Remove it, or use VLLMEngine."
                )
        super().check_sampling(sampling, name, trained=trained)

    def check_request(self, request: GenerationRequest) -> None:
        self.check_sampling(request.sampling, "SamplingParams", trained=False)
        self.check_length(request)
        require_known(self._model.config, max(request.token_ids))

    # -------------------------------------------------------------------------------------------------- weights

    def logprobs(self, sequences: Sequence[Sequence[int]], routes: Sequence[Routes | None] = ()) -> list[list[float]]:
        self._require_started()
        answers: list[list[float]] = []
        for number, sequence in enumerate(sequences):
            ids = torch.tensor([list(sequence)], device=self._model.device)
            experts = Routes.at(routes[number : number + 1], torch.arange(ids.numel(), device=ids.device), ids.numel())
            replay = nullcontext() if self._routers is None or experts is None else self._routers.replaying(experts)
            with self.lock, torch.inference_mode(), replay:
                logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            answers.append(logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist())
        return answers

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """See `Engine.load_weights`. Raises a ValueError that lists unknown and missing names."""
        self._require_started()
        with self.lock:
            self.policy_version = -1
            self._load(named_tensors)
            if self._generation is not None:
                self._generation.changed(policy_version, keep_cache=self._keep_cache)
            self.policy_version = policy_version

    def _load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self._model.named_parameters(remove_duplicate=False))
        buffers = dict(self._model.named_buffers())
        missing = {id(parameter): name for name, parameter in self._model.named_parameters()}
        unknown = []
        with torch.no_grad():
            for name, tensor in named_tensors:
                target = own.get(name, buffers.get(name))
                if target is None or target.shape != tensor.shape:
                    unknown.append(f"{name} {tuple(tensor.shape)}")
                else:
                    (copy_by_rows if target.ndim == 2 else Tensor.copy_)(target, tensor)
                    missing.pop(id(target), None)
        faults = {"missing": list(missing.values()), "unknown": unknown}
        if any(faults.values()):
            listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in faults.items() if names)
            raise ValueError(
                f"named_tensors do not match the engine's model. {listed}. Pass each parameter once, by name."
            )


def _routers(model: Any) -> Routers | None:
    """Returns the recorder of the model's routers, or None without experts or with unsupported routers."""
    if not router_modules(model):
        return None
    from lightrl.models.routing import Routers, RoutingPass

    try:
        routers = Routers(model)
        with torch.inference_mode(), RoutingPass() as forward:
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
        routers.recorded(forward)
        return routers
    except ValueError as error:
        log.warning("TransformersEngine can't record experts, so the trainer can't replay them: %s", error)
        return None


def _end_ids(model: Any, tokenizer: Any) -> set[int]:
    """Returns the end-of-sequence tokens of the generation config, the model's config, and the tokenizer."""
    ids: set[int] = set()
    for source in (model.generation_config, model.config, model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        values = value if isinstance(value, list | tuple) else [value]
        ids |= {int(v) for v in values if v is not None}
    return ids
