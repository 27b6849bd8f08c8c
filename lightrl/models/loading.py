"""Loads Hugging Face models the way training needs them, and writes them back as folders."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from fnmatch import fnmatch
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification

from lightrl.checkpoints.files import require_written
from lightrl.compat.arguments import require_model_folder
from lightrl.compat.torch import persistent_buffers
from lightrl.compat.transformers import cached_path, model_class, with_from_config
from lightrl.models.lora import add_lora
from lightrl.models.media_tokens import placeholder_ids
from lightrl.models.rope import fix_rope
from lightrl.models.routing import recompute_contexts
from lightrl.models.shards import meta_parameters, weight_places
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.models.turns import end_of_turn

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
CONFIG_KEYS = ("trust_remote_code", "revision", "token", "cache_dir", "local_files_only", "subfolder", "code_revision")
UNUSED = re.compile("pad|reserved|unused", re.IGNORECASE)
WEIGHTS = {".safetensors", ".bin", ".gguf", ".pt", ".pth"}


def require_model(spec: ModelSpec) -> None:
    """As `require_model_folder`, and that a folder whose weights will be read has some, and is what was exported.

    Raises:
        ValueError: there is no model, or a configuration alone, or files are not those in the folder's `SHA256SUMS`.
    """
    require_model_folder(spec.path)
    folder = Path(spec.path).expanduser()
    read = not spec.random_init and spec.live is None and folder.is_dir()
    if read and not any(file.suffix in WEIGHTS for file in folder.rglob("*")):
        raise ValueError(
            f"Model folder {spec.path!r} has a config.json and no weights (such as model.safetensors): give a folder "
            "that `save_pretrained` wrote, or set random_init: true to begin with random ones."
        )
    if read:
        require_written(folder, f"Model folder {spec.path!r}")


def load_causal_lm(spec: ModelSpec, *, trainable: bool, in_shards: bool = False) -> PreTrainedModel:
    """Loads a causal language model (or a model that takes images and text and has a language head).

    Args:
        spec: what to load.
        trainable: False freezes every parameter and ignores `freeze`, `gradient_checkpointing` and a new `lora`.
        in_shards: leave parameters on the meta device, for `fill_shards` to read once they are sharded. Where that
            cannot be (adapters, random weights, arguments in `kwargs`, weights that transformers converts) they are
            loaded whole as ever.

    Returns:
        the model in training mode, which gradient checkpointing needs, with all dropout set to 0, so that log-probs
        are those of the engine. With LoRA only the adapter requires gradients.

    Raises:
        ValueError: there is no such folder, or it holds no model.
    """
    if trainable and spec.live is not None:
        return _prepared(spec.live, spec, trainable=True)
    require_model_folder(spec.path)
    return load_model(spec, causal_class(_config(spec)), trainable=trainable, in_shards=in_shards)


def return_router_logits(lm: PreTrainedModel) -> None:
    """Makes a mixture-of-experts model return the router logits, from which its load-balancing loss is computed.

    Raises:
        ValueError: the model has no routers, or no such loss (DeepSeek's balance themselves).
    """
    config: Any = lm.config.get_text_config()
    if not hasattr(config, "output_router_logits"):
        raise ValueError(
            f"aux_loss_coef needs a mixture of experts, and {config.model_type} has no routers: set it to 0."
        )
    if not hasattr(sys.modules[type(lm).__module__], "load_balancing_loss_func"):
        raise ValueError(f"aux_loss_coef: {config.model_type} defines no load-balancing loss: set it to 0.")
    config.output_router_logits = True


def load_backbone(spec: ModelSpec, *, trainable: bool, in_shards: bool = False) -> PreTrainedModel:
    """Loads the model without its language head, as a critic needs it. Arguments and result: `load_causal_lm`."""
    return load_model(spec, AutoModel, trainable=trainable, in_shards=in_shards)


def load_model(
    spec: ModelSpec,
    auto_class: Any,
    *,
    trainable: bool,
    in_shards: bool = False,
    new_head: bool = False,
    **overrides: Any,
) -> PreTrainedModel:
    """Loads a model of any auto class; `overrides` are set on the configuration. Otherwise as `load_causal_lm`.

    Raises:
        ValueError: also where the files lack weights, or hold some that are not finite; with `new_head` those of a head
            that is trained may be missing.
    """
    require_model(spec)
    config = _config(spec)
    for name, value in overrides.items():
        setattr(config, name, value)
    dtype = getattr(torch, spec.dtype or "float32")
    lora = _used_lora(spec, trainable)
    plain = in_shards and lora is None and not spec.random_init and not spec.kwargs
    with _readable(spec):
        model = _without_weights(auto_class, config, dtype) if plain else None
    if model is not None:
        pass
    elif spec.random_init:
        kwargs = {k: v for k, v in spec.kwargs.items() if k in ("trust_remote_code", "attn_implementation")}
        model = auto_class.from_config(config, dtype=dtype, **kwargs)
    else:
        kwargs = {**spec.kwargs, **(_quantization(dtype) if lora is not None and lora.quantize_4bit else {})}
        told: Any = {**kwargs, "output_loading_info": True}
        with _readable(spec), named_kwargs("kwargs", spec.path, spec.kwargs):
            model, info = auto_class.from_pretrained(spec.path, config=config, dtype=dtype, **told)
        _refuse_random(model, spec, info["missing_keys"], new_head=new_head and trainable)
        _refuse_nonfinite(model, spec)
    return _prepared(model, spec, trainable=trainable)


@contextmanager
def _readable(spec: ModelSpec) -> Iterator[None]:
    """One message where files of weights are cut off or damaged."""
    try:
        yield
    except (SafetensorError, EOFError, pickle.UnpicklingError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"Model {spec.path!r}: its weights cannot be read ({cause}): a file is cut off or damaged. Copy, download "
            "or export it again."
        ) from error


def _refuse_random(model: Any, spec: ModelSpec, missing: set[str], *, new_head: bool) -> None:
    """Refuses a model with weights that its files lack: transformers draws them, and tells of it in a log alone.

    `new_head` lets pass what is beside the backbone. An encoder's pooler belongs to a head; a critic reads none.
    """
    body = model.base_model
    prefix = next((f"{name}." for name, child in model.named_children() if child is body), "")
    lacking = sorted(name for name in missing if not name.removeprefix(prefix).startswith("pooler."))
    if new_head:
        lacking = [name for name in lacking if name.startswith(prefix)]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ValueError(
            f"Model {spec.path!r} has no weights for {', '.join(lacking[:3])}{more}, which would be random: give a "
            f"model that was trained with them, such as one that `save_pretrained` of {type(model).__name__} wrote."
        )


def _refuse_nonfinite(model: Any, spec: ModelSpec) -> None:
    """Refuses a model that computes nothing but NaN, which as a reference or teacher no update would tell of."""
    for name, parameter in model.named_parameters():
        looked_at = parameter.dtype in (torch.float32, torch.bfloat16, torch.float16) and parameter.numel() > 0
        if looked_at and not all(bool(bound.isfinite()) for bound in parameter.detach().aminmax()):
            raise ValueError(
                f"Model {spec.path!r}: its weights are not finite ({name}): give one that was saved before they grew "
                "beyond all bounds, or copy it again."
            )


def _used_lora(spec: ModelSpec, trainable: bool) -> LoraSpec | None:
    return spec.lora if spec.lora is not None and (trainable or spec.lora.adapter is not None) else None


def _prepared(model: Any, spec: ModelSpec, *, trainable: bool) -> PreTrainedModel:
    """A model as its spec wants it: no dropout, adapters, what is frozen."""
    _switch_dropout_off(model)
    fix_rope(model, long=spec.long_rope)
    lora = _used_lora(spec, trainable)
    if lora is not None:
        add_lora(model, lora)
    if not trainable:
        model.requires_grad_(False)
    if trainable:
        _freeze(model, spec.freeze)
        if spec.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_contexts})
    prepared: PreTrainedModel = model.train()
    return prepared


def _without_weights(auto_class: Any, config: Any, dtype: torch.dtype) -> PreTrainedModel | None:
    """The model with parameters on the meta device, if `fill_shards` will find all of them."""
    with meta_parameters():
        model: Any = auto_class.from_config(config, dtype=dtype)
    if not all(p.is_meta for p in model.parameters()) or weight_places(model) is None:
        return None
    if model.can_generate() and cached_path(config.name_or_path, "generation_config.json") is not None:
        model.generation_config = GenerationConfig.from_pretrained(config.name_or_path)
    return model


def _config(spec: ModelSpec) -> Any:
    with named_kwargs("kwargs", spec.path, spec.kwargs):
        return AutoConfig.from_pretrained(spec.path, **{k: v for k, v in spec.kwargs.items() if k in CONFIG_KEYS})


@contextmanager
def named_kwargs(name: str, path: str, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Names the arguments that the user handed on to `from_pretrained` where transformers takes them badly.

    Args:
        name: of the argument that holds them. path: the model's. kwargs: they; where there are none, errors stay.
    """
    try:
        yield
    except (TypeError, ValueError, OSError) as error:
        if not kwargs or (isinstance(error, OSError) and error.errno is not None):  # a disk's
            raise
        raise ValueError(f"{name} ({', '.join(kwargs)}) with model {path!r}: {error}") from error


def causal_class(config: Any) -> Any:
    """The auto class with a language head: that of images or sound and text where the configuration belongs to one."""
    from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM

    classes = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
    return next((c for c in classes if model_class(c, config)), AutoModelForCausalLM)


def load_scalar(spec: ModelSpec, *, trainable: bool) -> PreTrainedModel:
    """Loads a model with a head of one output. Otherwise as `load_causal_lm`.

    Raises:
        ValueError: also where the head has more outputs, or is not there and would not be trained.
    """
    require_model_folder(spec.path)
    try:
        return load_model(spec, scalar_class(_config(spec)), trainable=trainable, new_head=True, num_labels=1)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(f"Model {spec.path!r}: its head does not have one output (num_labels=1).") from error


def scalar_class(config: Any) -> Any:
    """The class with a classification head: transformers' own, or one like those for a model of images or sound.

    transformers has none for vision-language models. The one made here has the parts and names of those for text: the
    backbone as `model`, read at the last token, and the linear layer `score`.
    """
    auto = AutoModelForSequenceClassification
    body = model_class(AutoModel, config)
    if model_class(auto, config) or not placeholder_ids(config) or body is None:
        return auto
    base = next(c for c in body.__mro__[1:] if issubclass(c, PreTrainedModel))
    name = f"{body.__name__.removesuffix('Model')}ForSequenceClassification"
    return with_from_config(name, (GenericForSequenceClassification, base), model_class(causal_class(config), config))


def _quantization(dtype: torch.dtype) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise ValueError("lora.quantize_4bit=True needs a CUDA device: set it to false.")
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
        )
    }


def _switch_dropout_off(model: nn.Module) -> None:
    """Sets every dropout to 0, in modules and in the numbers that attention layers pass on.

    Not `eval()`: transformers recomputes activations in training mode only.
    """
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if any("jitter" in name and value for name, value in vars(module).items()):
            module.train = MethodType(_stay_in_eval, module)  # type: ignore[method-assign]


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    """`train` of a part that chooses experts at random in training (Phi-MoE, or Mixtral's and DBRX's jitter)."""
    return nn.Module.train(module, False)


def _freeze(model: nn.Module, patterns: list[str]) -> None:
    unused = set(patterns)
    for name, parameter in model.named_parameters():
        for pattern in patterns:
            if fnmatch(name, pattern) or f".{pattern}." in f".{name}.":
                parameter.requires_grad_(False)
                unused.discard(pattern)
    if unused:
        raise ValueError(f"freeze={sorted(unused)}: no parameter or part has such a name; `*` is anything.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"freeze={patterns}: nothing is left to train; freeze less.")


def save_hf_folder(
    actor: Any,
    state: Mapping[str, Tensor],
    folder: str | Path,
    *,
    tokenizer_path: str,
    processor_path: str | None = None,
    chat_template: str | None = None,
) -> None:
    """Writes a folder that transformers and vLLM load: weights, configuration, tokenizer, generation settings.

    Args:
        actor: the `PolicyModel` or `RewardModel`; only its configuration and buffers are read, so it may be sharded.
        state: Hugging Face name -> full tensor, LoRA merged, as `named_hf_weights` gives them.
        folder: where to; created if missing.
        tokenizer_path: folder or hub name whose tokenizer is copied beside the weights.
        processor_path: the same of a model with media's processor; None takes `tokenizer_path`.
        chat_template: Jinja text in place of the tokenizer's own; None leaves that.
    """
    lm = actor.lm
    buffers = {n: b.detach().cpu() for n, b in lm.named_buffers() if n in persistent_buffers(lm)}
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    config = lm.config
    try:
        if isinstance(getattr(lm, "score", None), nn.Linear):
            lm.config, state = _with_padding(lm, state, tokenizer)
        lm.save_pretrained(folder, state_dict={**state, **buffers})
    finally:
        lm.config = config
    tokenizer.save_pretrained(folder)
    if getattr(tokenizer, "eos_token_id", None) is not None:
        _stop_at(Path(folder, "generation_config.json"), end_of_turn(tokenizer))
    if placeholder_ids(lm.config):
        _copy_processor(processor_path or tokenizer_path, Path(folder))


def _with_padding(lm: Any, state: Mapping[str, Tensor], tokenizer: Any) -> tuple[Any, Mapping[str, Tensor]]:
    """Configuration and weights of a reward model that transformers reads at the same tokens as LightRL.

    transformers reads a row at its last token that isn't padding, and tells padding by its ID. So the tokenizer gets a
    pad token that ends no row: its own, a reserved one, or another one, for which the embedding may get a row of 0.
    """
    ends, special = {tokenizer.eos_token_id, end_of_turn(tokenizer)}, tokenizer.added_tokens_decoder
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends:
        taken = ends | {*placeholder_ids(lm.config).values()}
        unused = (t.content for i, t in special.items() if t.special and i not in taken and UNUSED.search(t.content))
        tokenizer.add_special_tokens({"pad_token": next(unused, "<|pad|>")})
    config, state = deepcopy(lm.config), dict(state)
    text = config.get_text_config()
    config.pad_token_id = text.pad_token_id = tokenizer.pad_token_id
    embedding = lm.get_input_embeddings().weight
    name = next(name.replace("base_layer.", "") for name, p in lm.named_parameters() if p is embedding)
    lacking = tokenizer.pad_token_id + 1 - len(state[name])
    if lacking > 0:
        state[name] = nn.functional.pad(state[name], (0, 0, 0, lacking))
        text.vocab_size = len(state[name])
    return config, state


def _stop_at(file: Path, end: int) -> None:
    """Adds the end of a turn to the tokens at which an exported model stops generating."""
    if not file.is_file():
        return
    config = json.loads(file.read_text())
    eos = config.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if end not in ends:
        file.write_text(json.dumps({**config, "eos_token_id": [*ends, end]}, indent=2) + "\n")


def _copy_processor(path: str, folder: Path) -> None:
    """Copies the settings of a processor. As files, since building it may need packages that training does not."""
    for name in PROCESSOR_FILES:
        file = cached_path(path, name)
        if file is not None and Path(file).resolve() != (folder / name).resolve():
            shutil.copyfile(file, folder / name)


def require_vocabulary(tokenizer: Any, path: str, argument: str = "tokenizer") -> None:
    """Refuses a tokenizer with tokens that a model has no embedding for.

    Args:
        tokenizer: whose tokens the model reads.
        path: the model's folder or hub name; one whose configuration can't be read is left to what loads it.
        argument: the name that the error begins with.

    Raises:
        ValueError: there is such a token; placeholders of images, and special tokens other than BOS and EOS, don't
            count.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        return
    size, shown = getattr(config.get_text_config(), "vocab_size", None), {*placeholder_ids(config).values()}
    known = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    idle = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} - known  # what its class adds
    vocabulary = tokenizer.get_vocab().items()
    beyond = sorted((i, text) for text, i in vocabulary if i >= (size or i + 1) and i not in shown | idle)
    if beyond:
        raise ValueError(
            f"{argument}={tokenizer.name_or_path!r}: {len(beyond)} of its tokens, such as {beyond[0][1]!r} "
            f"({beyond[0][0]}), have no embedding in the model {path!r} of vocab_size={size}. Use the model's own "
            "tokenizer, or call `resize_token_embeddings` on the model and save both in one folder."
        )


def longest_sequence(config: Any) -> int | None:
    """Tokens of the longest sequence that a model was made for; None where its configuration does not say."""
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest


def positions_of(path: str) -> tuple[int, bool] | None:
    """Tokens of the longest sequence that a model was made for, and whether a longer one is an error.

    It is where the model has a table of positions, which ends; where it rotates, its answers only get worse.

    Args:
        path: folder or hub name.

    Returns:
        None where the configuration cannot be read, or does not say.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        return None
    longest = longest_sequence(config)
    tables = ("biogpt", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "opt")
    return None if longest is None else (longest, config.get_text_config().model_type in tables)
