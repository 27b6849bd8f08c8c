"""Rows with media: every form, every place, caps, order, and what is refused with the row's number."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Value
from datasets import Image as DatasetsImage
from PIL import Image

from lightrl.data.media import decode, shown
from lightrl.data.preferences import PreferenceSource
from lightrl.data.prompts import PromptSource
from lightrl.data.rows import MediaError, MediaSource
from lightrl.data.sft import SFTSource
from lightrl.data.templates import load_tokenizer
from lightrl.rewards.encoding import decode_image
from tests.rows import prompt_and_completion
from tests.toys import QUICKSTART_MODEL
from tests.vision.conftest import film, mixed_rows, picture


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def source(**arguments: Any) -> MediaSource:
    return MediaSource(rows=[{"prompt": ""}], **arguments)


def test_every_form_of_an_image_is_the_same_picture(tmp_path: Path) -> None:
    image = picture(9, 7)
    image.save(tmp_path / "a b.png")
    text, pixels = base64.b64encode(png(image)).decode(), np.asarray(image)
    forms = [
        image,
        tmp_path / "a b.png",
        str(tmp_path / "a b.png"),
        "a b.png",
        (tmp_path / "a b.png").as_uri(),
        png(image),
        text,
        f"data:image/png;base64,{text}",
        {"bytes": png(image), "path": None},
        {"bytes": None, "path": "a b.png"},
        pixels,
        pixels.tolist(),
        pixels.transpose(2, 0, 1),
        pixels / 255.0,
    ]
    media = decode([("image", form) for form in forms], source(media_folder=str(tmp_path)))
    assert all(i.mode == "RGB" and np.array_equal(np.asarray(i), pixels) for i in media.images)


def test_transparency_is_white_and_originals_are_never_altered() -> None:
    original = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    before = original.tobytes()
    media = decode([("image", original), ("image", picture(100, 50))], source(max_pixels=1250))
    assert media.images[0].getpixel((3, 3)) == (255, 255, 255)
    assert media.images[1].size == (50, 25)
    assert original.tobytes() == before and original.mode == "RGBA"


def test_videos_from_frames_arrays_and_files_are_capped(tmp_path: Path) -> None:
    frames = film(10)
    pictures = [Image.fromarray(frame) for frame in frames]
    pictures[0].save(tmp_path / "v.gif", save_all=True, append_images=pictures[1:], duration=500)
    values = [frames, pictures, [png(p) for p in pictures], tmp_path / "v.gif"]
    media = decode([("video", value) for value in values], source(max_frames=4, max_pixels=96))
    assert [video.shape for video in media.videos] == [(4, 8, 12, 3)] * 4
    assert media.video_times[0] == [0.0, 1.5, 3.0, 4.5] == media.video_times[3]
    assert np.array_equal(media.videos[0], media.videos[1]) and np.array_equal(media.videos[0], media.videos[2])


@pytest.fixture
def video(tmp_path: Path) -> str:
    """A file of two seconds, ten frames each, that becomes lighter."""
    cv2 = pytest.importorskip("cv2")
    path = str(tmp_path / "v.avi")
    writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*"MJPG"), 10.0, (32, 16))
    for level in np.linspace(0, 250, 20):
        writer.write(np.full((16, 32, 3), level, np.uint8))
    writer.release()
    return path


def test_a_video_file_is_read_with_opencv(video: str) -> None:
    media = decode([("video", video), ("video", Path(video).read_bytes())], source(frame_rate=2.0))
    assert media.videos[0].shape == (4, 16, 32, 3) and np.array_equal(media.videos[0], media.videos[1])
    assert media.videos[0].mean((1, 2, 3)).tolist() == pytest.approx([0, 79, 171, 250], abs=12)


def test_a_video_may_end_before_its_estimated_length(video: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cv2

    expected = decode([("video", video)], source())
    counted = {cv2.CAP_PROP_FRAME_COUNT: 21, cv2.CAP_PROP_FPS: 10.0}
    opened = cv2.VideoCapture(video)
    reader = SimpleNamespace(get=counted.get, grab=opened.grab, retrieve=opened.retrieve, release=opened.release)
    readers = iter([reader, cv2.VideoCapture(video)])
    monkeypatch.setattr(cv2, "VideoCapture", lambda name: next(readers))
    found = decode([("video", video)], source())
    assert np.array_equal(found.videos[0], expected.videos[0]) and found.video_times == expected.video_times
    counted[cv2.CAP_PROP_FRAME_COUNT] = 40  # half of it is missing
    opened.set(cv2.CAP_PROP_POS_FRAMES, 0)
    readers = iter([reader])
    with pytest.raises(MediaError, match="truncated"):
        decode([("video", video)], source())


def test_places_are_blocks_marks_or_the_front() -> None:
    columns = {"images": "image", "videos": "video"}

    def places(prompt: Any, **row: Any) -> tuple[list[str], list[Any]]:
        messages, found = shown(prompt, row, columns)
        return [b.get("text", b["type"].upper()) for m in messages for b in m["content"]], [v for _, v in found]

    assert places("which?", images=["a", "b"], videos=["v"]) == (["IMAGE", "IMAGE", "VIDEO", "which?"], ["a", "b", "v"])
    assert places("is <image> in <video>?", images=["a"], videos=["v"])[0] == ["is ", "IMAGE", " in ", "VIDEO", "?"]
    blocks = [{"type": "image", "image": "x", "text": None}, {"type": "text", "text": "or"}, {"type": "image"}]
    assert places([{"role": "user", "content": blocks}], images=["a"]) == (["IMAGE", "or", "IMAGE"], ["x", "a"])
    url = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}}]
    assert places([{"role": "user", "content": url}])[1] == [{"url": "data:image/png;base64,xx"}]
    assert shown("plain", {"images": None}, columns) == ("plain", [])


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("<image> or <image>?", 1, "2 place"),
        ("<image>?", 2, "1 place"),
        ("a<image>", None, "1"),
    ],
)
def test_places_and_images_must_be_equally_many(folder_of: Any, prompt: str, images: int | None, message: str) -> None:
    folder = folder_of("idefics3")
    rows = [{"prompt": "fine", "images": []}]
    rows += [{"prompt": prompt, "images": None if images is None else [picture(16, 16)] * images}]
    with pytest.raises(MediaError, match=f"row 1: .*{message}"):
        folder.prompts(rows)


def test_placeholders_in_the_text_itself_are_refused(folder_of: Any) -> None:
    folder = folder_of("qwen2_vl")
    rows = [{"prompt": "a"}, {"prompt": "a<|image_pad|>"}]
    with pytest.raises(MediaError, match="row 1: .*placeholder"):
        folder.prompts(rows)
    with pytest.raises(MediaError, match=r"row 0: .*2 placeholder\(s\).* 1 image"):
        folder.prompts([{"prompt": "a<|image_pad|>", "image": picture(16, 16)}])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "idefics3", "llava"])
def test_prompts_hold_inputs_media_and_tokens_in_the_rows_order(folder_of: Any, family: str) -> None:
    folder = folder_of(family)
    prompts = folder.prompts(mixed_rows(family))
    counts = [(len(m.images), len(m.videos)) for m in prompts.media]
    assert counts == [(0, 0), (1, 0), (2, 0), (0, 0), (0, 1)][: len(counts)]
    image = folder.processor.placeholders["image"]
    for p, (tokens, media, inputs) in enumerate(zip(prompts.token_ids, prompts.media, prompts.inputs, strict=True)):
        assert bool(inputs) == bool(media) == (p in (1, 2, 4))
        if media.images:
            assert media.token_ids.count(image) == len(media.images) < tokens.count(image)
    if family == "qwen2_vl":
        sizes = [int(grid.prod()) // 4 for grid in prompts.inputs[2]["image_grid_thw"]]
        assert sizes == [4, 12] and prompts.token_ids[2].count(image) == 16


def test_a_missing_file_stops_the_run_before_training_and_a_broken_one_when_it_is_drawn(
    folder_of: Any, tmp_path: Path
) -> None:
    folder, whole = folder_of("idefics3"), png(picture(40, 40))
    (tmp_path / "broken.png").write_bytes(whole[: len(whole) // 2])
    rows = [{"prompt": "a", "image": None}, *({"prompt": "it?", "image": f"{name}.png"} for name in ("broken", "gone"))]
    common: dict[str, Any] = {"media_folder": str(tmp_path)}
    with pytest.raises(MediaError, match="row 2: no such file"):
        PromptSource(rows=rows, **common).load(folder.tokenizer, processor=folder.processor)
    prompts = PromptSource(rows=rows[:2], **common).load(folder.tokenizer, processor=folder.processor)
    with pytest.raises(MediaError, match="row 1: image 1"):
        prompts.rows([1])


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(a) print\n%%EOF\n"


@pytest.fixture()
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Programs that were started, such as Ghostscript."""
    given: list[Any] = []
    monkeypatch.setattr("subprocess.check_call", lambda *args, **kwargs: given.append(args))
    return given


def test_postscript_is_a_program_and_is_not_run(tmp_path: Path, ran: list[Any]) -> None:
    (tmp_path / "innocent.png").write_bytes(POSTSCRIPT)
    for kind, value in (("image", POSTSCRIPT), ("image", str(tmp_path / "innocent.png")), ("video", POSTSCRIPT)):
        with pytest.raises(MediaError, match=f"{kind} 1 can't be read: "):
            decode([(kind, value)], source())
    with pytest.raises(ValueError, match="not a base64 image"):
        decode_image([base64.b64encode(POSTSCRIPT).decode()])
    assert ran == []


@pytest.mark.parametrize("what", ["postscript", "bomb"])
def test_pictures_that_datasets_would_decode_are_rejected(
    what: str, folder_of: Any, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Parquet file of the hub has them as a feature, decoded when a row is read."""
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 1000)
    bad = {"postscript": POSTSCRIPT, "bomb": png(Image.new("L", (90, 90)))}[what]
    features = Features({"prompt": Value("string"), "completion": Value("string"), "image": DatasetsImage()})
    images = [{"bytes": png(picture(16, 16)), "path": None}, {"bytes": bad, "path": None}]
    data = Dataset.from_dict({"prompt": ["it?"] * 2, "completion": ["a"] * 2, "image": images}, features=features)
    folder = folder_of("idefics3")
    with pytest.raises(ValueError, match="row 1: "):
        PromptSource(rows=data).load(folder.tokenizer, processor=folder.processor, shuffle=False).rows([1])
    with pytest.raises(ValueError, match="row 1: "):
        SFTSource(rows=data).tokenized(folder.tokenizer, folder.processor)
    assert ran == []


def test_over_long_prompts_are_never_cut_through_an_image(folder_of: Any) -> None:
    folder = folder_of("qwen2_vl")
    rows = [{"prompt": f"{'x' * 30}<image>it?", "images": [picture(32, 32)]}]
    whole = folder.prompts(rows)
    length, image = len(whole.token_ids[0]), folder.processor.placeholders["image"]
    cut = folder.prompts(rows, max_prompt_tokens=length - 20, overlong="truncate_left")
    assert cut.token_ids[0] == whole.token_ids[0][20:] and cut.token_ids[0].count(image) == 16
    assert cut.inputs[0]["mm_token_type_ids"].shape == (1, length - 20)
    with pytest.raises(MediaError, match="row 0: .*can't be truncated"):
        folder.prompts(rows, max_prompt_tokens=20, overlong="truncate_left")
    assert len(PromptSource(rows=[*rows, {"prompt": "a"}], max_prompt_tokens=30).load(
        folder.tokenizer, processor=folder.processor)) == 1  # fmt: skip


def test_strings_with_images_are_left_alone_without_a_chat_template(
    folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("idefics3")
    row = {"prompt": "it is <image>?", "images": [picture(16, 16)]}
    made = folder.prompts([row])
    assert made.texts[0].startswith("<|im_start|>user") and made.inputs[0]
    rendered = {**row, "prompt": made.texts[0]}  # already has the template's text and the model's placeholder
    plain = folder.prompts([row, rendered, {**row, "prompt": "it?"}, {"prompt": "no"}], chat_template=False)
    assert plain.texts == ["it is <image>?", made.texts[0], "<image>it?", "no"]
    assert plain.token_ids[1] == made.token_ids[0]
    with pytest.raises(ValueError, match="chat_template"):
        folder.prompts([rendered])
    monkeypatch.setattr(folder.tokenizer, "chat_template", None)  # a base model
    assert folder.prompts([row]).token_ids == [plain.token_ids[0]]
    (example,) = SFTSource(rows=[{**row, "completion": "a"}]).tokenized(folder.tokenizer, folder.processor)
    prompt, completion = prompt_and_completion(example)
    assert prompt == plain.token_ids[0] and folder.tokenizer.decode(completion) == "a<eos>"


def test_a_strings_own_placeholders_are_places(folder_of: Any) -> None:
    folder = folder_of("qwen2_vl")
    row = {"prompt": "<image>it?", "images": [picture(32, 32)]}
    made = folder.prompts([row])
    again = folder.prompts([{**row, "prompt": made.texts[0]}], chat_template=False)
    assert "<|image_pad|>" in made.texts[0] and again.token_ids == made.token_ids
    assert again.inputs[0].keys() == made.inputs[0].keys()


def test_inputs_stay_on_the_host_and_are_shared_by_a_group(folder_of: Any) -> None:
    from lightrl.environments.episodes import one_turn
    from lightrl.records import Completion, CompletionGroup, SamplingParams
    from lightrl.rollout.collector import ScoredGroup, collate

    prompts = folder_of("idefics3").prompts([{"prompt": "it?", "image": picture(16, 16)}])
    group = CompletionGroup(
        prompts.request(0, SamplingParams(), 0, 3), [Completion([5], [-1.0], "a", "stop") for _ in range(3)], 0
    )
    rollouts = collate([ScoredGroup(prompts, one_turn(group), None)], 0, 1.0).to("meta")
    assert rollouts.token_ids.device.type == "meta"
    assert all(row is prompts.inputs[0] for row in rollouts.inputs) and all(
        m is prompts.media[0] for m in rollouts.media
    )
    assert isinstance(rollouts.select(torch.tensor([2])).inputs[0]["pixel_values"], torch.Tensor)


@pytest.mark.parametrize("options", [{"max_pixels": 64}, {"index": 1}])
def test_options_of_a_single_image_are_rejected_by_name(folder_of: Any, options: dict[str, Any]) -> None:
    block = {"type": "image", "image": picture(16, 16), **options}
    with pytest.raises(MediaError, match=next(iter(options))):
        folder_of("qwen2_vl").prompts([{"prompt": [{"role": "user", "content": [block]}]}])
    with pytest.raises(MediaError, match=next(iter(options))):
        folder_of("qwen2_vl").prompts([{"prompt": "what is it?", "images": [block]}])


@pytest.mark.parametrize("column", ["images", "audio"])
def test_a_model_of_text_rejects_rows_with_media(column: str) -> None:
    tokenizer = load_tokenizer(str(QUICKSTART_MODEL))
    rows = [{"prompt": "1+1=", column: None}, {"prompt": "1+2=", column: [picture(8, 8)]}]
    with pytest.raises(ValueError, match=f"row 1.*{column}.*media_columns"):
        PromptSource(rows=rows).load(tokenizer)
    assert len(PromptSource(rows=rows, media_columns={}).load(tokenizer)) == 2
    assert len(PromptSource(rows=rows[:1]).load(tokenizer)) == 1


def test_reward_models_and_supervised_runs_reject_rows_with_media() -> None:
    tokenizer = load_tokenizer(str(QUICKSTART_MODEL))
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "completion": "2", "images": [picture(8, 8)]}
    with pytest.raises(ValueError, match="row 0.*images"):
        PreferenceSource(rows=[row]).tokenized(tokenizer)
    with pytest.raises(ValueError, match="row 0.*images"):
        SFTSource(rows=[row]).tokenized(tokenizer)
