"""What a run says in the terminal: its own words, and not its dependencies' advice, unless it is asked for them."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import warnings

DEPENDENCIES = r"(datasets|deepspeed|jsonargparse|lightning|peft|tensorboard|torch|torchmetrics|transformers|vllm)\b"
LOGGERS = {
    "lightning.pytorch.utilities.rank_zero": ("💡 Tip", "TPU available"),
    "DeepSpeed": ("Setting accelerator to CPU",),
    "vllm.triton_utils.importing": ("Triton is installed, but",),
}
"""Logger -> beginnings of what it says to everybody."""
MESSAGES = (
    r"LightningCLI's args parameter is intended",  # `lightrl` hands over its own arguments, with files looked up
    r"Total length of `list` across ranks is zero",  # a run without evaluation prompts
    r"It is recommended to use `self.log\('eval/",  # those are means over all ranks already
)


class _Without(logging.Filter):
    """Drops records that begin in one of these ways."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is shown."""
        return not record.getMessage().startswith(self.beginnings)


def quiet() -> None:
    """For this process: no tips of dependencies, no bars for loaded weights and rows, no notes on what they deprecate.

    Warnings of LightRL and of the user's own code are shown as before, and so are the dependencies' other ones.
    """
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    else:  # it asks when it is loaded, which a command that is refused does not wait for
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "datasets" in sys.modules:
        from datasets.utils import disable_progress_bars

        disable_progress_bars()
    else:
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=DEPENDENCIES)
    for message in MESSAGES:
        warnings.filterwarnings("ignore", message=message)
    for name, beginnings in LOGGERS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, _Without) for each in logger.filters):
            logger.addFilter(_Without(beginnings))


def die_with_parent(parent: int) -> None:
    """Has Linux kill this process when the thread that started it ends, whatever it hangs in.

    A rank that outlives a killed launcher waits for the missing rank until the collective's timeout.

    Args:
        parent: ID of the process that started this one.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
