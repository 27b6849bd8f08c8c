"""Writes the example's model directory: a Qwen2-VL config with tokenizer and processor, without weights.

    python -m examples.vlm.make_model [outputs/vlm/start]

The model has 0.7 M parameters: a vision tower of 2 layers and a language model of 3 layers. Patches have 14 pixels, and
2 x 2 patches are merged into one token, so an image of 56 x 56 pixels is four tokens. The SFT run initializes the
weights randomly (`random_init: true`). The output is deterministic.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Tokenizer, Qwen2VLConfig

from examples.vlm.task import SIZE, make_row

SPECIAL = (
    *("<pad>", "<|im_end|>", "<|im_start|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
VOCABULARY = 192
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def make_tokenizer() -> Qwen2Tokenizer:
    """Trains byte pairs on the task's questions. A word is a token; digits stay separate."""
    rng = random.Random(0)
    texts = [part["text"] for _ in range(2000) for part in make_row(rng)["prompt"][0]["content"] if part["text"]]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL), initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    words = [f"{role}:" for role in ("user", "assistant")] * 100 + ["red green blue yellow"] * 100
    learner.train_from_iterator([*texts, *words], trainer)
    learned = json.loads(learner.to_str())["model"]
    order = [*SPECIAL, *sorted(learned["vocab"], key=learned["vocab"].get)]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(order)},
        merges=[tuple(pair) for pair in learned["merges"]],
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<pad>",
        additional_special_tokens=list(SPECIAL[2:]),
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(tokenizer: Qwen2Tokenizer) -> Qwen2VLConfig:
    """Returns the config of the 0.7 M-parameter Qwen2-VL."""
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    ids |= {name: tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    return Qwen2VLConfig(
        architectures=["Qwen2VLForConditionalGeneration"],
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 1,
            "tie_word_embeddings": True,
        },
        vision_config={"depth": 2, "embed_dim": 64, "num_heads": 2, "hidden_size": 128, "mlp_ratio": 2},
        image_token_id=ids["image"],
        video_token_id=ids["video"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )


def main(folder: str = "outputs/vlm/start") -> None:
    """Writes config, tokenizer, and processor to `folder`."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(place)
    make_config(tokenizer).save_pretrained(place)
    GenerationConfig(pad_token_id=0, eos_token_id=1, bos_token_id=1).save_pretrained(place)
    white = {"image_mean": [1.0, 1.0, 1.0], "image_std": [0.5, 0.5, 0.5]}  # an empty patch is 0
    pixels = {**white, "min_pixels": SIZE * SIZE, "max_pixels": SIZE * SIZE, "patch_size": 14, "merge_size": 2}
    image = {"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 2, **pixels}
    video = {"video_processor_type": "Qwen2VLVideoProcessor", "temporal_patch_size": 2, **pixels}
    (place / "preprocessor_config.json").write_text(json.dumps(image, indent=2) + "\n")
    (place / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2) + "\n")
    processor = {"processor_class": "Qwen2VLProcessor"}
    (place / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
