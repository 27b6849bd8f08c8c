"""What checkpoints of all modules say about themselves beside Lightning's own entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lightrl.models.spec import ModelSpec
from lightrl.redaction import redact

__all__ = ["FORMAT", "description", "refuse_foreign", "require_weights"]

FORMAT = 2
"""Number of the layout of checkpoints; raised when older ones can no longer be read."""


def description(module_class: str, models: dict[str, ModelSpec], tokenizer: str | None) -> dict[str, Any]:
    """The format, the class that writes the checkpoint, and how its models are built, as plain data.

    Args:
        module_class: name of the class. models: role -> how it is built. tokenizer: folder or hub name; None where it
            is the model's own. They are all that `lightrl export` needs beside the weights.
    """
    specs = {}
    for role, spec in models.items():
        specs[role] = {**asdict(replace(spec)), "path": spec.name}  # without a live model, which `replace` leaves out
        del specs[role]["live"]
    # Redacted here, too: Lightning's own sharding strategies write what they are given.
    return {"format": FORMAT, "class": module_class, "models": redact(specs), "tokenizer": tokenizer}


def refuse_foreign(stored: dict[str, Any], module_class: str) -> None:
    """Refuses a checkpoint that the module cannot continue from.

    Args:
        stored: the checkpoint's description, empty without one. module_class: name of the class that reads it.

    Raises:
        ValueError: it was written by another class, or in another format.
    """
    if stored.get("class") != module_class:
        raise ValueError(
            f"The checkpoint was written by {stored.get('class', 'something other than LightRL')}, not by "
            f"{module_class}: resume with the same class_path, or start over from its exported model folder."
        )
    if stored.get("format") != FORMAT:
        raise ValueError(
            f"The checkpoint has format {stored.get('format', 1)}, and this version of LightRL reads format {FORMAT}: "
            "it was written by another alpha release. Resume with that release, or export its model there and start "
            "over from the folder."
        )


def require_weights(own: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Refuses weights that are not those of the module.

    Args:
        own: name -> tensor of what is trained here. stored: the checkpoint's.

    Raises:
        ValueError: parameters are missing, not finite, or of another shape or kind.
    """
    way_out = "resume with the settings of the models (lora, freeze, critic.shared) that it was written with."
    missing = sorted(own.keys() - stored.keys())
    if missing:
        raise ValueError(
            f"The checkpoint lacks {len(missing)} trained parameters of this module, such as {missing[0]}: {way_out}"
        )
    for name, tensor in own.items():
        there = stored[name]
        shape = getattr(there, "shape", None)
        elsewhere = tensor.numel() == 0 and shape is not None  # ZeRO-3 keeps parts of it, in its own place
        if not elsewhere and (shape != tensor.shape or there.is_floating_point() != tensor.is_floating_point()):
            what = f"{getattr(there, 'dtype', type(there).__name__)} {list(getattr(there, 'shape', []))}"
            raise ValueError(f"The checkpoint's {name} is {what}, not {tensor.dtype} {list(tensor.shape)}: {way_out}")
        if there.is_floating_point() and not bool(there.isfinite().all()):
            raise ValueError(f"The checkpoint's {name} is not finite: go on from an earlier checkpoint.")
