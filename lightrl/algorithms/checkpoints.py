"""What checkpoints of all modules say about themselves beside Lightning's own entries."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightrl.models.spec import ModelSpec

__all__ = ["FORMAT", "description", "refuse_foreign"]

FORMAT = 2
"""Number of the layout of checkpoints; raised when older ones can no longer be read."""


def description(module_class: str, models: dict[str, ModelSpec]) -> dict[str, Any]:
    """The format, the class that writes the checkpoint, and how its models are built, as plain data.

    Args:
        module_class: name of the class. models: role -> how it is built: all `lightrl export` needs beside the weights.
    """
    specs = {role: asdict(spec) for role, spec in models.items()}
    return {"format": FORMAT, "class": module_class, "models": specs}


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
            f"{module_class}: resume with the same class_path, or start anew from its exported model folder."
        )
    if stored.get("format") != FORMAT:
        raise ValueError(
            f"The checkpoint has format {stored.get('format', 1)}, and this version of LightRL reads format {FORMAT}: "
            "it was written by another alpha release. Resume with that release, or export its model there and start "
            "anew from the folder."
        )
