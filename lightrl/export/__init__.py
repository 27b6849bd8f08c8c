"""`lightrl export`: any checkpoint as a Hugging Face folder, an adapter, or a plain checkpoint; one CPU process.

What is wrong with the command is said here, before `models`, which builds them, loads anything heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lightrl.checkpoints.files import atomic_folder, atomic_write
from lightrl.records.arguments import require_model_folder

__all__ = ["export"]

What = Literal["model", "adapter", "critic", "checkpoint"]


def export(checkpoint: str = "", output: str = "", what: What = "model", model: str | None = None) -> None:
    """Turns a checkpoint of any strategy into something that can be used without it, whatever the number of its ranks.

    Reads plain checkpoints, folders of FSDP2 and folders of DeepSpeed ZeRO (these hold pickled objects: only read what
    you trust). The models are built in the host's memory.

    Args:
        checkpoint: the file or folder that a run saved.
        output: where to write: a folder, or with `what: checkpoint` a file.
        what: `model` is the policy (or the reward model of a reward run) as transformers and vLLM load it, LoRA merged;
            `adapter` the LoRA adapter alone, as peft and vLLM load it; `critic` the value model as a token
            classification model with one label, whose output at token t is the value of the state after it;
            `checkpoint` a plain checkpoint that any strategy goes on from, on any number of ranks.
        model: folder or hub name of the model that training began with; where the run found it if left out.

    Raises:
        ValueError: there is no checkpoint, it was not finished, it does not hold what is asked for, or its weights
            are not finite.
    """
    if not checkpoint or not output:
        raise ValueError("lightrl export needs --checkpoint (what a run saved) and --output (where to write).")
    for name, given in (("checkpoint", checkpoint), ("output", output)):
        if "\0" in given:
            raise ValueError(f"{name}={given!r}: nothing can be called that (NUL): give another path.")
    if not Path(checkpoint).exists():
        raise ValueError(f"checkpoint={checkpoint!r}: it does not exist. Pass what a run wrote.")
    target = Path(output)
    if target.is_dir() if what == "checkpoint" else target.is_file():
        kind = "a file" if what == "checkpoint" else "a folder"
        raise ValueError(f"output={output!r} exists and is not {kind}, which what={what} writes: give another path.")
    if target.resolve() == Path(checkpoint).resolve():
        raise ValueError(f"output={output!r} is the checkpoint itself: give another path.")
    if model is not None:
        require_model_folder(model)
    import torch

    from lightrl.checkpoints.plugin import first_nonfinite, require_finite, without_secrets
    from lightrl.checkpoints.reading import read_checkpoint
    from lightrl.export.models import export_model

    loaded = read_checkpoint(checkpoint)
    require_finite(first_nonfinite(loaded["state_dict"]), target)
    if what == "checkpoint":
        with atomic_write(target, checksum=True) as file:
            torch.save(without_secrets(loaded), file)  # an earlier version's may hold some
    else:
        with atomic_folder(target) as folder:
            export_model(loaded, folder, what, model)
    print(f"Wrote {target}")
