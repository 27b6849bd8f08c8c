"""What models want to know of a video beside its frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def video_timing(times: Sequence[float]) -> dict[str, Any]:
    """What processors want to know of a video of which they get every frame that is to be used.

    Args:
        times: second of each frame, evenly spread.
    """
    step = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
    rate = 1 / step if step else 2.0
    frames = {"total_num_frames": len(times), "frames_indices": list(range(len(times))), "do_sample_frames": False}
    return {"fps": rate, "duration": len(times) / rate, "video_backend": "lightrl", **frames}
