"""Hides messages of dependencies in the terminal."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import warnings

DEPENDENCIES = (
    r"(accelerate|datasets|deepspeed|huggingface_hub|jsonargparse|lightning|numpy|peft|pydantic|ray|tensorboard|tokenizers"
    r"|torch|torchmetrics|transformers|triton|vllm)\b"
)
LOGGERS = {
    "lightning.pytorch.trainer.connectors.checkpoint_connector": ("`weights_only` was not set",),
    "lightning.pytorch.utilities.rank_zero": ("💡 Tip", "TPU available"),
    "DeepSpeed": ("Setting accelerator to CPU",),
    "transformers.tokenization_utils_base": ("Token indices sequence length is longer",),  # prompts are checked
    "vllm.triton_utils.importing": ("Triton is installed, but",),
    # A failed download raises an error.
    "huggingface_hub.utils._http": ("Retrying in ", "'", "HTTP Error "),
}
"""Logger -> prefixes of hidden messages."""
MESSAGES = (
    r"LightningCLI's args parameter is intended",  # `lightrl` passes its own arguments, with resolved files
    r"Total length of `list` across ranks is zero",  # a run without evaluation prompts
    r"It is recommended to use `self.log\('eval/",  # these are already means over all ranks
)


def quiet(resumes: bool) -> None:
    """Hides the tips, loading progress bars, and deprecation warnings of dependencies in this process.

    The checkpoint directory of a run that `resumes` is not empty.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=DEPENDENCIES)
    for message in (*MESSAGES, *["Checkpoint directory .* exists and is not empty"] * resumes):
        warnings.filterwarnings("ignore", message=message)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_shown)


def _shown(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(LOGGERS[record.name])


def die_with_parent(parent: int) -> None:
    """Makes Linux kill this process when its parent, by ID, exits; a rank would otherwise wait for a collective."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it exited before the call
        os.kill(os.getpid(), signal.SIGKILL)
