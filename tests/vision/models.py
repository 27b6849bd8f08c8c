"""Tiny vision-language models by code: architecture, processor and character tokenizer in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*= ?.,<>'ABCDabcdefghijklmnopqrstuvwxyz\n"
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
IDEFICS_TOKENS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILIES = (*QWEN, "idefics3", "llava")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}IMAGE{% elif c.type == 'video' %}VIDEO{% elif c.type == 'audio' %}"
    "AUDIO{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
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


def text_settings(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> dict[str, Any]:
    """A language model of two layers with wide weights."""
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
    return folder


def _qwen(family: str) -> tuple[Any, Any]:
    import transformers as t

    place = "<|vision_start|><|{}_pad|><|vision_end|>"
    tokenizer = make_tokenizer(QWEN_TOKENS, place.format("image"), place.format("video"))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision: dict[str, Any] = {
        "depth": 2,
        "num_heads": 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.2,
    }  # noqa: E501
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "patch_size": 4, "in_chans": 3}
        config_class, model_class, processor_class = (
            t.Qwen2VLConfig,
            t.Qwen2VLForConditionalGeneration,
            t.Qwen2VLProcessor,
        )
    elif family == "qwen2_5_vl":
        vision |= {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "patch_size": 4,
            "in_channels": 3,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        }  # noqa: E501
        config_class, model_class, processor_class = (
            t.Qwen2_5_VLConfig,
            t.Qwen2_5_VLForConditionalGeneration,
            t.Qwen2_5_VLProcessor,
        )  # noqa: E501
    else:
        vision |= {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "patch_size": 4,
            "in_channels": 3,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        }  # noqa: E501
        rope["mrope_interleaved"] = True
        config_class, model_class, processor_class = (
            t.Qwen3VLConfig,
            t.Qwen3VLForConditionalGeneration,
            t.Qwen3VLProcessor,
        )
    text = text_settings(tokenizer, rope_parameters=rope, head_dim=32)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in _QWEN_IDS.items()}
    shared = {name: text[name] for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")}
    model = model_class(config_class(text_config=text, vision_config=vision, **ids, **shared))
    sizes = {"shortest_edge": 8 * 8, "longest_edge": 8 * 8 * 16}
    common = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": sizes}
    images = t.Qwen2VLImageProcessor(**common)
    video_class = t.Qwen3VLVideoProcessor if family == "qwen3_vl" else t.Qwen2VLVideoProcessor
    videos = video_class(**common | {"size": {"shortest_edge": 8 * 8, "longest_edge": 8 * 8 * 64}})
    return model, processor_class(images, tokenizer, videos, chat_template=tokenizer.chat_template)


_QWEN_IDS = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}


def _idefics3() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = make_tokenizer(IDEFICS_TOKENS, "<image>")
    text = text_settings(tokenizer, model_type="llama")
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "initializer_range": 0.2,
    }  # noqa: E501
    config = t.Idefics3Config(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0, bos_token_id=2, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    images = t.Idefics3ImageProcessor(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, do_image_splitting=False
    )
    processor = t.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)
    return t.Idefics3ForConditionalGeneration(config), processor


def _llava() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = make_tokenizer(["<image>"], "<image>")
    text = text_settings(tokenizer, model_type="llama")
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 12,
        "patch_size": 4,
        "projection_dim": 32,
        "initializer_range": 0.2,
    }  # noqa: E501
    config = t.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1, vision_feature_select_strategy="default", image_seq_length=9, tie_word_embeddings=False,
    )  # fmt: skip
    images = t.CLIPImageProcessor(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12})
    processor = t.LlavaProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        image_token="<image>", chat_template=tokenizer.chat_template,
    )  # fmt: skip
    return t.LlavaForConditionalGeneration(config), processor


_OTHERS = {"idefics3": _idefics3, "llava": _llava}
