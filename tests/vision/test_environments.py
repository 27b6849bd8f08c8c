"""Images that environments show: what the engine is asked, what is trained, and the numbers of both."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import anthropic
import openai
import pytest
import torch

from lightrl.algorithms import GRPOLightningModule
from lightrl.algorithms.module import Updates
from lightrl.callbacks import RolloutWriter
from lightrl.callbacks.rollout_writer import load_rollouts
from lightrl.data.prompts import PromptSource
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.environments import AgentProgram, EnvironmentEpisode, Reply, ToolEnvironment
from lightrl.environments.bridges import TemplateBridge
from lightrl.environments.ledger import Ledger
from lightrl.environments.renderers import RendererBridge
from lightrl.models.policy import named_hf_weights
from lightrl.models.spec import ModelSpec
from lightrl.objectives import GroupRelative
from lightrl.records import Completion, CompletionGroup, EngineContext, GenerationRequest, SamplingParams
from tests.environments.scripted import alone, closing
from tests.rollout.tasks import fit, sgd
from tests.vision.conftest import picture
from tests.vision.looking import Looks, played
from tests.vision.test_engines import gap


def ids_of(folder: Any, text: str) -> list[int]:
    return list(folder.tokenizer.encode(text, add_special_tokens=False))


def opened(folder_of: Any) -> tuple[Any, Ledger, int]:
    """The folder of a family, a ledger of its own, and the placeholder of images."""
    folder = folder_of("qwen2_vl")
    ledger = Ledger(TemplateBridge(folder.tokenizer, None, folder.processor))
    return folder, ledger, folder.tokenizer.convert_tokens_to_ids("<|image_pad|>")


def test_a_row_is_what_the_processor_makes_of_the_whole_conversation(folder_of: Any) -> None:
    """Two turns, each showing something, joined by the proof; compared with one run over all of it."""
    folder, ledger, image = opened(folder_of)
    first = [
        {"role": "user", "content": [{"type": "image", "image": picture(16, 24, 1)}, {"type": "text", "text": "a"}]}
    ]
    more = [
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "image", "image": picture(32, 24, 2)}]}
    ]
    ledger.begin(first)
    sampled = ids_of(folder, "yes<|im_end|>")
    ledger.sampled(Completion(sampled, [-1.0] * len(sampled), "", "stop"), 0, Reply("yes").message())
    ledger.answer(more)
    ledger.sampled(Completion(ids_of(folder, "no"), [-1.0] * 2, "", "stop"), 0, Reply("no").message())
    (row,) = ledger.rows
    text = folder.tokenizer.apply_chat_template(
        [*first, {"role": "assistant", "content": "yes"}, *more], tokenize=False, add_generation_prompt=True
    )
    pictures = [picture(16, 24, 1), picture(32, 24, 2)]
    whole = folder.processor.processor(text=[text], images=[pictures], return_tensors="pt")
    assert ledger.forks == 0 and row.token_ids[:-2] == whole["input_ids"][0].tolist()
    assert row.token_ids.count(image) > 2, "each image has a placeholder for each of its features"
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(row.inputs[name], whole[name])
    (types,) = [row.inputs[name] for name in row.inputs if name.endswith("token_type_ids")]
    assert types[0].tolist() == [int(token == image) for token in row.token_ids]
    assert row.media is not None and row.media.token_ids.count(image) == 2 and len(row.media.images) == 2


def test_images_after_the_last_reply_are_in_no_row(folder_of: Any) -> None:
    folder, ledger, _ = opened(folder_of)
    ledger.begin([{"role": "user", "content": "a"}])
    ledger.sampled(Completion(ids_of(folder, "yes"), [-1.0] * 3, "", "stop"), 0, Reply("yes").message())
    ledger.answer([{"role": "user", "content": [{"type": "image", "image": picture(16, 16)}]}])
    (row,) = ledger.rows
    assert row.inputs is None and row.media is None and row.token_ids[-3:] == ids_of(folder, "yes")


def test_media_of_a_row_are_those_of_its_tokens_and_none_beyond(folder_of: Any) -> None:
    """An image before the last reply and one behind it: with one placeholder per image, the row ends where it ends."""
    folder, ledger, image = opened(folder_of)

    def shown(seed: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image", "image": picture(16, 24, seed)}]}]

    ledger.begin(shown(1))
    ledger.sampled(Completion(ids_of(folder, "yes<|im_end|>"), [-1.0] * 4, "", "stop"), 0, Reply("yes").message())
    (whole,) = ledger.rows
    ledger.answer(shown(2))
    (row,) = ledger.rows
    assert row.media is not None and whole.media is not None and len(row.media.images) == 1
    assert row.token_ids == whole.token_ids and row.media.token_ids == whole.media.token_ids
    pairs = zip(row.token_ids, [0, *row.token_ids[:-1]], strict=True)
    assert row.media.token_ids == [token for token, last in pairs if token != image or last != token]


def test_a_placeholder_that_the_policy_samples_begins_a_new_row_in_which_it_is_text(folder_of: Any) -> None:
    folder, ledger, image = opened(folder_of)
    ledger.begin([{"role": "user", "content": "a"}])
    ledger.sampled(
        Completion([image, *ids_of(folder, "<|im_end|>")], [-1.0] * 2, "", "stop"), 0, Reply("<|image_pad|>").message()
    )
    ledger.answer([{"role": "user", "content": "b"}])
    assert ledger.forks == 1 and image not in ledger.request_ids


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "idefics3"])
def test_log_probs_of_rows_with_images_between_turns_are_those_sampled(folder_of: Any, family: str) -> None:
    folder = folder_of(family)
    engine = TransformersEngine()
    engine.start(EngineContext(folder.path, max_prompt_tokens=400, max_new_tokens=8))
    engine.load_weights(named_hf_weights(folder.policy()), policy_version=0)
    rollouts = played(engine, folder)
    assert rollouts.turn_ids is not None and int(rollouts.turn_ids.max()) == 4
    assert max(len(media.images) for media in rollouts.media) == 4
    for layout in ("padded", "packed", "shared_prefix"):
        assert gap(folder.policy(layout), rollouts) < 5e-5, layout
    other = [{name: -x if x.is_floating_point() else x for name, x in row.items()} for row in rollouts.inputs]
    assert gap(folder.policy(), type(rollouts)(**{**vars(rollouts), "inputs": other})) > 1e-3, "it looks at them"
    engine.close()


def test_a_run_learns_from_what_environments_show(folder_of: Any, tmp_path: Any) -> None:
    folder = folder_of("qwen2_vl")
    rows = [{"prompt": f"say {word}", "image": None} for word in ("a", "b")]
    module = GRPOLightningModule(
        ModelSpec(folder.path),
        kl=None,
        optimizer=sgd,
        advantage=GroupRelative(scale="none"),
        updates=Updates(micro_batch_tokens=256),
    )
    seen: list[int] = []

    def looks(images: list[Any], messages: list[Any], **_: Any) -> list[float]:
        seen.extend(len(row) for row in images)
        return [0.0] * len(images)

    _, keep = fit(
        folder.path, [RolloutWriter(1, str(tmp_path))], module, environment=Looks, episode={"max_turns": 4},
        prompts=PromptSource(rows=rows, media_columns={}), prompts_per_rollout=2, rollouts_per_epoch=1, rewards=[looks],
        sampling=SamplingParams(max_new_tokens=4),
    )  # fmt: skip
    assert max(keep.gaps) < 5e-5 and keep.metrics[0]["rollout/turns"] > 1
    assert set(seen) <= {0, 1, 3, 4} and max(seen) >= 3
    _, records = load_rollouts(tmp_path / "rollout=000001")
    assert max(len(record["media"].get("images", ())) for record in records) == max(seen)


def test_rows_with_images_are_left_to_the_environment(folder_of: Any) -> None:
    folder = folder_of("qwen2_vl")
    rows = PromptSource(rows=[{"prompt": "say a", "image": picture(16, 16)}])
    with pytest.raises(ValueError, match="has media, but the environment's `reset` returns the first messages"):
        fit(folder.path, prompts=rows, rollouts_per_epoch=1)


def test_what_a_tool_returns_enters_the_conversation(folder_of: Any) -> None:
    folder = folder_of("qwen2_vl")

    class Camera:
        def reset(self, **row: Any) -> list[Any]:
            return [{"type": "image", "image": picture(16, 16, 5)}]

    attempts = EnvironmentEpisode(lambda: ToolEnvironment(Camera), max_turns=1)
    attempts.setup(folder.tokenizer, folder.processor)
    bridge = TemplateBridge(folder.tokenizer, None, folder.processor)
    ledger = Ledger(bridge)
    messages = asyncio.run(ToolEnvironment(Camera).reset({"prompt": "look"}, seed=1))
    assert [part["type"] for part in messages[0]["content"]] == ["text", "image"]
    ledger.begin(messages)
    assert ledger.request_ids.count(folder.tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 4


def test_what_cannot_be_shown_is_refused_by_name(folder_of: Any) -> None:
    folder = folder_of("qwen2_vl")
    image = [{"role": "user", "content": [{"type": "image", "image": picture(16, 16)}]}]
    with pytest.raises(ValueError, match="takes text only"):
        TemplateBridge(folder.tokenizer).opened(image)
    with pytest.raises(ValueError, match="`renderer: template`"):
        RendererBridge(None, folder.tokenizer).opened(image)
    seeing = TemplateBridge(folder.tokenizer, None, folder.processor)
    with pytest.raises(ValueError, match="of type 'video'"):
        seeing.opened([{"role": "user", "content": [{"type": "video", "video": []}]}])
    with pytest.raises(ValueError, match="image 1 can't be read: "):
        seeing.opened([{"role": "user", "content": [{"type": "image", "image": b"no picture"}]}])


def test_images_that_a_program_sends_are_one_row_with_their_media(folder_of: Any) -> None:
    """Each request sends all images again, as each provider's clients do."""
    folder = folder_of("qwen2_vl")
    urls = []
    for seed in (1, 2):
        stream = io.BytesIO()
        picture(16, 24, seed).save(stream, "PNG")
        urls.append("data:image/png;base64," + base64.b64encode(stream.getvalue()).decode())

    def chat(row: Any, base_url: str, api_key: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        said: list[Any] = []
        for url in urls:
            block = {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}
            said.append({"role": "user", "content": [{"type": "text", "text": "see"}, block]})
            message: Any = client.chat.completions.create(model="m", messages=said).choices[0].message
            said.append({"role": "assistant", "content": message.content})
        return 1.0

    def messages(row: Any, base_url: str, api_key: str) -> float:
        client = anthropic.Anthropic(base_url=base_url, api_key=api_key)
        said: list[Any] = []
        for url in urls:
            source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
            said.append(
                {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "source": source}]}
            )
            message: Any = client.messages.create(model="m", max_tokens=9, messages=said)
            said.append({"role": "assistant", "content": message.content})
        return 1.0

    async def engine(request: GenerationRequest) -> CompletionGroup:
        ids = ids_of(folder, "yes<|im_end|>")
        return CompletionGroup(request, [Completion(ids, [-1.0] * len(ids), "", "stop")], 0)

    rows = []
    for main in (chat, messages):
        program = AgentProgram(main)
        program.setup(folder.tokenizer, folder.processor)
        (trajectory,) = asyncio.run(closing(program, alone(program, engine, {}, SamplingParams(max_new_tokens=9))))
        assert trajectory.failure is None and trajectory.metrics["turns"] == 2
        (row,) = trajectory.rows
        assert row.media is not None and [image.size for image in row.media.images] == [(16, 24)] * 2
        assert row.media.images[0].tobytes() == picture(16, 24, 1).tobytes()
        rows.append(row.token_ids)
    assert rows[0] == rows[1]
