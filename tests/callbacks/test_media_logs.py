"""Pictures in logs: what CompletionLogger writes, prints and logs, the report's page, trajectories."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from rich.console import Console

from lightrl.callbacks.completion_logger import CompletionLogger, sample_records, samples_table
from lightrl.callbacks.rollout_writer import RolloutWriter, load_rollouts
from lightrl.records import Media, Rollouts
from tests.callbacks.toys import Loader, LoggingModule, make_rollouts


def large() -> Image.Image:
    picture = Image.new("RGB", (640, 480), "white")
    ImageDraw.Draw(picture).ellipse((100, 100, 400, 400), fill="red")
    return picture


def hashes(media: list[Media]) -> list[str]:
    parts = [image.mode.encode() + str(image.size).encode() + image.tobytes() for m in media for image in m.images]
    parts += [array.tobytes() for m in media for array in (*m.videos, *m.audios)]
    return [hashlib.sha1(part).hexdigest() for part in parts]


@pytest.fixture
def shown() -> list[Media]:
    """Two images, nothing, a video with a sound: one for each prompt."""
    video = np.zeros((9, 30, 40, 3), np.uint8) + np.arange(0, 90, 10, dtype=np.uint8)[:, None, None, None]
    sound = np.linspace(-1, 1, 8000, dtype=np.float32)
    return [
        Media(images=[large(), Image.new("RGB", (56, 56), "blue")]),
        Media(),
        Media(videos=[video], audios=[sound], sampling_rates=[16000]),
    ]


@pytest.fixture
def seen(shown: list[Media]) -> Rollouts:
    rollouts = make_rollouts(
        ["same?", "1+1=", "same?"], [["a", "b"], ["2", "3"], ["c", "d"]], [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    )
    rollouts.media = [media for media in shown for _ in range(2)]
    return rollouts


def fit(make_trainer: Callable[..., Any], rollouts: Rollouts, *callbacks: Any, **kwargs: Any) -> None:
    make_trainer(*callbacks, max_epochs=1, **kwargs).fit(LoggingModule(), Loader([rollouts] * 2), Loader([rollouts]))


def test_the_file_and_the_table_say_what_there_is(
    seen: Rollouts, shown: list[Media], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    before = hashes(shown)
    fit(make_trainer, seen, CompletionLogger(1, num_samples=3, terminal=False), RolloutWriter(1, evaluate=False))
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [r.get("media") for r in records[:3]] == [
        "2 images (640x480, 56x56)", None, "video (9 frames of 40x30), sound (0.5 s)",
    ]  # fmt: skip
    assert hashes(shown) == before

    out = io.StringIO()
    Console(file=out, width=160).print(samples_table(sample_records(seen, 3), "x", 100))
    assert "[2 images (640x480, 56x56)]" in out.getvalue()


def test_trajectories_keep_the_originals(
    seen: Rollouts, shown: list[Media], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    fit(make_trainer, seen, RolloutWriter(2, evaluate=False))
    folder = tmp_path / "rollouts" / "rollout=000002"
    _, texts = load_rollouts(folder)
    assert len(list((folder / "media").iterdir())) == 4  # once, not once for each completion
    assert texts[0]["media"] == texts[1]["media"] and texts[2]["media"] == {}
    images = [Image.open(path) for path in texts[0]["media"]["images"]]
    arrays = [np.load(path) for kind in ("videos", "audios") for path in texts[4]["media"][kind]]
    read_back = Media(images=images, videos=arrays[:1], audios=arrays[1:])
    assert hashes([read_back]) == hashes(
        [Media(images=shown[0].images, videos=shown[2].videos, audios=shown[2].audios)]
    )
    assert arrays[0].dtype == np.uint8 and arrays[1].dtype == np.float32
