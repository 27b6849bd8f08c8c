"""What the scoring server serves in the tests; loaded by path, in a process of its own."""

from __future__ import annotations

import os


def length(completions):
    return [float(len(text)) for text in completions]


def length_or_none(completions, log_metric):
    """Fails, or ends the server in the middle of the request, where a completion says so."""
    log_metric("x", 1.0)
    if "raise" in completions:
        raise KeyError("inside")
    if "kill" in completions:
        os.kill(os.getpid(), 9)
    return [None if text == "skip" else float(len(text)) for text in completions]


def uses_all(prompts, completions, group_ids, references, labels, level):
    assert len(set(group_ids)) * 2 == len(group_ids)  # whole groups of two
    return [
        float(len(p) + len(c) + r + k + v)
        for p, c, r, k, v in zip(prompts, completions, references, labels, level, strict=True)
    ]


async def async_length(completions):
    return length(completions)


def pixels(completions, images, videos):
    """Red of the first pixels, summed over images, and the number of frames."""
    red = [float(sum(image.getpixel((0, 0))[0] for image in row)) for row in images]
    return [r + sum(len(video) for video in row) for r, row in zip(red, videos, strict=True)]
