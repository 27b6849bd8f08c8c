"""Writes the student's model directory: the quickstart's tokenizer and a smaller Qwen2, without weights.

    python -m examples.distill.make_student [outputs/distill/start]

The student has 0.1 M parameters (hidden size 64, 2 layers), the teacher 0.45 M. The SFT run initializes the weights
randomly (`random_init: true`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

TEACHER = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "model"
SMALLER = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}


def make(folder: str) -> str:
    """Writes the model directory and returns its path."""
    AutoConfig.from_pretrained(TEACHER, **SMALLER).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TEACHER).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print("Wrote", make(sys.argv[1] if len(sys.argv) > 1 else "outputs/distill/start"))
