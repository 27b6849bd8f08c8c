"""Pictures in logs: what CompletionLogger writes, prints and logs, the report's page, trajectories."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image, ImageDraw
from rich.console import Console

from lightrl.callbacks.completion_logger import CompletionLogger, sample_records, samples_table
from lightrl.callbacks.rollout_writer import RolloutWriter, load_rollouts
from lightrl.cli.report import report
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
    assert "thumbnail" not in records[1] and len({r["thumbnail"] for r in records if "thumbnail" in r}) == 2
    sheet = Image.open(tmp_path / records[0]["thumbnail"])
    assert sheet.size == (128 + 4 + 56, 96)  # shrunk to a tile, and in its own size
    assert sheet.getpixel((132, 0)) == (0, 0, 255, 255) and sheet.getpixel((50, 50)) == (255, 0, 0, 255)
    frames = Image.open(tmp_path / records[2]["thumbnail"])
    assert [frames.getpixel((44 * i, 0))[0] for i in range(4)] == [0, 30, 50, 80]  # frames 0, 3, 5, 8 of 9
    assert hashes(shown) == before

    out = io.StringIO()
    trainer_records = [{**r, "media": r["media"]} if "media" in r else r for r in records[:3]]
    Console(file=out, width=160).print(samples_table(trainer_records, "x", 100))
    assert "[2 images (640x480, 56x56)]" in out.getvalue()
    assert sample_records(seen, 3)[0]["media"] is shown[0]  # by reference, not a copy


def test_the_page_shows_pictures_and_pairs_rows_by_them(
    seen: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    sampling = CompletionLogger(1, num_samples=3, terminal=False)
    make_trainer(sampling, max_epochs=2).fit(LoggingModule(), Loader([seen]), Loader([seen]))
    text = report(tmp_path).read_text()
    assert not re.search(r'(src|href|srcset)="(?!data:image/png;base64,)', text)
    cards = text.split("<div class='card sample'>")[1:4]
    pictures = [re.findall(r'<img class=thumbnail src="data:image/png;base64,([^"]+)" alt="([^"]*)"', c) for c in cards]
    assert [len(found) for found in pictures] == [1, 0, 1]
    assert Image.open(io.BytesIO(base64.b64decode(pictures[0][0][0]))).size == (188, 96)
    assert pictures[0][0][1] == "2 images (640x480, 56x56)"
    for card, completion in zip(cards, "a2c", strict=True):  # equal prompts, told apart by their pictures
        assert card.count(f"<pre>{completion}</pre>") == 2
    for thumbnail in (tmp_path / "thumbnails").iterdir():
        thumbnail.unlink()
    assert "class=thumbnail" not in report(tmp_path).read_text()  # a page is made without them, too


def test_tensorboard_gets_the_pictures(seen: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="tb", version="0")
    fit(make_trainer, seen, CompletionLogger(1, num_samples=3, terminal=False), logger=logger)
    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0, "tensors": 0}).Reload()
    assert events.Tags()["images"] == [f"samples/{phase}/{i}" for phase in ("train", "eval") for i in (0, 2)]
    assert (events.Images("samples/train/0")[0].width, events.Images("samples/train/0")[0].height) == (188, 96)
    text = events.Tensors("samples/train/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "2 images (640x480, 56x56)" in text


@pytest.mark.filterwarnings("ignore")
def test_wandb_gets_the_pictures(
    seen: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    for place in ("CACHE", "DATA", "ARTIFACT", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{place}_DIR", str(tmp_path / place))
    logger = WandbLogger(project="pictures", save_dir=str(tmp_path), offline=True)
    csv = CSVLogger(tmp_path, name="csv", version="")
    fit(make_trainer, seen, CompletionLogger(1, num_samples=3, terminal=False), logger=[csv, logger])
    wandb.finish()
    files = next(tmp_path.glob("wandb/offline-run-*/files"))
    table = json.loads(next(files.rglob("train*.table.json")).read_text())
    assert table["columns"][-2:] == ["media", "pictures"]
    assert [row[-1] for row in table["data"]] == ["Image", None, "Image"]
    # the pictures themselves wait in the table's artifact until they can be sent
    sizes = {Image.open(path).size for path in tmp_path.rglob("*") if path.is_file() and is_png(path)}
    assert {(188, 96), (4 * 44 - 4, 30)} <= sizes


def is_png(path: Path) -> bool:
    return "thumbnails" not in path.parts and path.read_bytes()[:4] == b"\x89PNG"


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
