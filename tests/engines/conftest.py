"""Tiny Qwen2 models, and one vLLM engine in this process for the whole session."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.records import Prompts, SamplingParams
from tests.toys import build

torch.set_num_threads(1)

EOS = 1
SOON = 60.0
"""Seconds within which a death is told, even on a busy machine; without the means against it, after 300 or never."""
CHARACTERS = "0123456789+-*= ?abcdefghijklmnopqrstuvwxyz\n"


def save_tokenizer(folder: Path, characters: str) -> None:
    """Each character is a token, after `<pad>`, `<eos>`, and `<bos>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    names = [*special.values(), *characters]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def build_model(folder: Path, *, tied: bool, seed: int = 0, vocab_size: int = 50) -> torch.nn.Module:
    """A 0.1 M Qwen2 with wide weights (sharp distributions), saved with a character tokenizer.

    vLLM pads the vocabulary of 50 to a multiple of 64. The padding must not count as a missing weight.
    """
    sizes = {"vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "bos_token_id": 2, "eos_token_id": EOS}
    model: torch.nn.Module = build("qwen2", seed=seed, tie_word_embeddings=tied, **sizes).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder, CHARACTERS)
    return model


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    build_model(folder, tied=True)
    return folder


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    build_model(folder, tied=False)
    return folder


def load(folder: Path) -> torch.nn.Module:
    """The trainer's model: plain transformers, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def change(model: torch.nn.Module, seed: int = 1) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@torch.no_grad()
def reference_logprobs(model: torch.nn.Module, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(n - 1,) log-probs of tokens 1..n-1 given those before."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def engine(tied_folder: Path) -> Iterator[object]:
    """A file's engine: tied, float32, in this process. A test that needs certain weights pushes them itself.

    Not the session's: vLLM keeps state of its own per process, which another engine in it takes along when it closes.
    """
    pytest.importorskip("vllm")
    from lightrl.engines import EngineContext, VLLMEngine

    engine = VLLMEngine(engine_args={"kv_cache_memory_bytes": 32 << 20, "block_size": 32})
    engine.start(EngineContext(str(tied_folder), max_prompt_tokens=64, max_new_tokens=64, fire=True))
    yield engine
    engine.close()


def ask(engine: Any, prompts: Prompts, sampling: SamplingParams, *, num_completions: int, seeds: Any) -> list[Any]:
    """Groups of all prompts, each with the number of its prompt."""
    requests = [prompts.request(i, sampling, seed, num_completions) for i, seed in enumerate(seeds)]
    return list(enumerate(engine.generate_all(requests)))
