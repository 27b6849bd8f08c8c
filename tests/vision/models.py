"""Tiny vision-language models by code: architecture, processor and character tokenizer in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*= ?.,<>'ABCDabcdefghijklmnopqrstuvwxyz\n"
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
IDEFICS_TOKENS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILIES = (*QWEN, "idefics3", "llava")

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "initializer_range": 0.2,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}IMAGE{% elif c.type == 'video' %}VIDEO"
    "{% elif c.type == 'audio' %}AUDIO{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(specials: list[str], image: str, video: str = "", audio: str = "") -> PreTrainedTokenizerFast:
    """One token per character and per special token; a chat template with the given placeholders."""
    specials = ["<|im_start|>", "<|im_end|>", *specials]
    names = ["<pad>", "<eos>", "<bos>", *CHARACTERS, *specials]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in ["<pad>", "<eos>", "<bos>", *specials]])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>",
        additional_special_tokens=specials, unk_token="<pad>",
    )  # fmt: skip
    fast.chat_template = TEMPLATE.replace("IMAGE", image).replace("VIDEO", video).replace("AUDIO", audio)
    return fast


def text_settings(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 80,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.2,
        **changes,
    }


def build(family: str, folder: Path, seed: int = 0) -> Path:
    """Writes a model with random weights, its tokenizer and its processor."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model, processor = _qwen(family) if family in QWEN else _OTHERS[family]()
    model.float().save_pretrained(folder)
    processor.save_pretrained(folder)
    if family in ("gemma3", "paligemma"):  # the names in published checkpoints, which vLLM reads
        file = folder / "model.safetensors"
        renamed = {n.replace("vision_tower.", "vision_tower.vision_model."): x for n, x in load_file(file).items()}
        save_file(renamed, file, metadata={"format": "pt"})
    return folder


def _qwen(family: str) -> tuple[Any, Any]:
    import transformers as t

    place = "<|vision_start|><|{}_pad|><|vision_end|>"
    tokenizer = make_tokenizer(QWEN_TOKENS, place.format("image"), place.format("video"))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64 if family == "qwen2_vl" else 32,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.2,
    }
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "mlp_ratio": 2}
        classes: tuple[Any, ...] = (t.Qwen2VLConfig, t.Qwen2VLForConditionalGeneration, t.Qwen2VLProcessor)
    elif family == "qwen2_5_vl":
        vision |= {"intermediate_size": 48, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}
        vision |= {"tokens_per_second": 2}
        classes = (t.Qwen2_5_VLConfig, t.Qwen2_5_VLForConditionalGeneration, t.Qwen2_5_VLProcessor)
    else:
        vision |= {"intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 64}
        vision |= {"deepstack_visual_indexes": [0]}
        rope["mrope_interleaved"] = True
        classes = (t.Qwen3VLConfig, t.Qwen3VLForConditionalGeneration, t.Qwen3VLProcessor)
    text = text_settings(rope_parameters=rope, head_dim=32)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in _QWEN_IDS.items()}
    shared = {name: text[name] for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")}
    model = classes[1](classes[0](text_config=text, vision_config=vision, **ids, **shared))
    sizes = {"shortest_edge": 8 * 8, "longest_edge": 8 * 8 * 16}
    common = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": sizes}
    if family == "qwen3_vl":
        common |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    video_class = t.Qwen3VLVideoProcessor if family == "qwen3_vl" else t.Qwen2VLVideoProcessor
    videos = video_class(**common | {"size": {"shortest_edge": 8 * 8, "longest_edge": 8 * 8 * 64}})
    images = t.Qwen2VLImageProcessor(**common)
    return model, classes[2](images, tokenizer, videos, chat_template=tokenizer.chat_template)


_QWEN_IDS = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}


def _idefics3() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = make_tokenizer(IDEFICS_TOKENS, "<image>")
    config = t.Idefics3Config(
        text_config=text_settings(model_type="llama"),
        vision_config={**VISION, "image_size": 16},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        **{"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "tie_word_embeddings": False},
    )
    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    images = t.Idefics3ImageProcessor(**sizes, do_image_splitting=False)
    processor = t.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)
    return t.Idefics3ForConditionalGeneration(config), processor


def _llava() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = make_tokenizer(["<image>"], "<image>")
    select = {"vision_feature_select_strategy": "default"}
    config = t.LlavaConfig(
        text_config=text_settings(model_type="llama"),
        vision_config={**VISION, "model_type": "clip_vision_model", "image_size": 12, "projection_dim": 32},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        image_seq_length=9,
        tie_word_embeddings=False,
        **select,
    )
    images = t.CLIPImageProcessor(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12})
    rest = {"patch_size": 4, "num_additional_image_tokens": 1, "image_token": "<image>", **select}
    processor = t.LlavaProcessor(images, tokenizer, chat_template=tokenizer.chat_template, **rest)
    return t.LlavaForConditionalGeneration(config), processor


def _qwen2_audio() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = make_tokenizer(
        ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"], "", "", "<|audio_bos|><|AUDIO|><|audio_eos|>"
    )
    encoder = {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "num_mel_bins": 16,
        "max_source_positions": 50,
        "init_std": 0.2,
    }
    config = t.Qwen2AudioConfig(
        text_config=text_settings(model_type="qwen2"),
        audio_config=encoder,
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    features = t.WhisperFeatureExtractor(feature_size=16, chunk_length=1, sampling_rate=16000, hop_length=160)
    processor = t.Qwen2AudioProcessor(features, tokenizer, chat_template=tokenizer.chat_template)
    return t.Qwen2AudioForConditionalGeneration(config), processor


def _gemma3() -> tuple[Any, Any]:
    import transformers as t

    tokens = ["<start_of_image>", "<end_of_image>", "<image_soft_token>", "\n\n", "\n\n\n", "\n\n\n\n"]  # for vLLM
    tokenizer = make_tokenizer(tokens, "<start_of_image>")
    for name in ("boi_token", "eoi_token", "image_token"):
        token = {"boi": "<start_of_image>", "eoi": "<end_of_image>"}.get(name[:3], "<image_soft_token>")
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    tokenizer.init_kwargs |= {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer.init_kwargs |= {"image_token": "<image_soft_token>"}
    layers = ["sliding_attention", "full_attention"]
    text = text_settings(head_dim=32, query_pre_attn_scalar=32, sliding_window=64, layer_types=layers)
    config = t.Gemma3Config(
        text_config=text,
        vision_config={**VISION, "model_type": "siglip_vision_model", "image_size": 16},
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        tie_word_embeddings=False,
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    images = t.Gemma3ImageProcessor(size={"height": 16, "width": 16})
    processor = t.Gemma3Processor(images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4)
    return t.Gemma3ForConditionalGeneration(config), processor


def _paligemma() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = make_tokenizer(["<image>"], "<image>")
    text = text_settings(model_type="gemma", head_dim=32)
    config = t.PaliGemmaConfig(
        text_config=text,
        vision_config={**VISION, "model_type": "siglip_vision_model", "image_size": 16, "projection_dim": 64},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        hidden_size=64,
        tie_word_embeddings=False,
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    images = t.SiglipImageProcessor(size={"height": 16, "width": 16})
    images.image_seq_length = 16
    processor = t.PaliGemmaProcessor(images, tokenizer, chat_template=tokenizer.chat_template)
    return t.PaliGemmaForConditionalGeneration(config), processor


_OTHERS = {
    "idefics3": _idefics3,
    "llava": _llava,
    "qwen2_audio": _qwen2_audio,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
}
