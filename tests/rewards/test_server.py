"""`serve_reward` and `RemoteReward` against one another, over a socket between two processes."""

from __future__ import annotations

import math
import signal

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from lightrl.rewards import RemoteReward, RewardError
from lightrl.rewards.server import serve_reward
from tests.rewards.conftest import scored


def post(server, **kwargs):
    return httpx.post(server.url, trust_env=False, timeout=60, **kwargs)


@pytest.fixture(scope="module")
def plain(serve):
    return serve("length_or_none")


def test_rewards_travel_and_none_stays_none(plain):
    before = plain.health["rows"]
    scores = scored(RemoteReward(plain.url), ["a", "skip", "abc"])
    assert scores.total[0] == 1.0 and math.isnan(scores.total[1]) and scores.total[2] == 3.0
    health = plain.health
    assert health["reward"] == "length_or_none" and health["rows"] == before + 3


def test_everything_that_can_be_sent_arrives(serve):
    server = serve("uses_all")
    reward = RemoteReward(server.url, columns=["level"], reference_column="ref", label_column="kind")
    columns = {"level": [100] * 6, "ref": [10] * 6, "kind": [1000] * 6}
    scores = scored(reward, ["a"] * 6, [0, 0, 1, 1, 2, 2], **columns)
    assert scores.total == [2 + 1 + 10 + 1000 + 100] * 6  # |prompt| + |completion| + columns
    assert server.health["requests"] == 1
    with pytest.raises(RewardError, match="422.*references"):  # the server says what it needs
        scored(RemoteReward(server.url, columns=["level"]), ["a"], level=[1])


def test_media_travel_and_are_decoded_again(serve):
    import numpy as np
    from PIL import Image

    server = serve("pixels")
    red, dark = Image.new("RGB", (3, 2), (200, 0, 0)), Image.new("RGBA", (4, 4), (7, 0, 0, 9))
    media = {"images": [[red], [], [red, dark]], "videos": [[], [np.zeros((5, 4, 4, 3), np.uint8)], []]}
    before = [image.tobytes() for image in (red, dark)]
    assert scored(RemoteReward(server.url), ["a"] * 3, media=media).total == [200.0, 5.0, 207.0]
    assert [image.tobytes() for image in (red, dark)] == before
    assert scored(RemoteReward(server.url, send_media=False), ["a"] * 3, media=media).total == [0.0] * 3
    said = post(server, json={"prompts": ["a"], "completions": ["a"], "images": [["no image"]]})
    assert said.status_code == 422 and "not a base64 image" in said.text


def test_malformed_requests_are_rejected(plain):
    assert post(plain, content=b"{").status_code == 422
    assert post(plain, json={"prompts": ["a"]}).status_code == 422
    assert post(plain, json={"prompts": ["a"], "completions": ["a", "b"]}).status_code == 422
    assert plain.health["status"] == "ok"


def test_token(serve, monkeypatch):
    server = serve("async_length", token="secret")
    assert server.health["status"] == "ok"  # health asks for no token
    with pytest.raises(RewardError, match="401"):
        scored(RemoteReward(server.url), ["a"])
    monkeypatch.setenv("MY_TOKEN", "wrong")
    with pytest.raises(RewardError, match="401"):
        scored(RemoteReward(server.url, token_env="MY_TOKEN"), ["a"])
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert scored(RemoteReward(server.url, token_env="MY_TOKEN"), ["ab"]).total == [2.0]
    assert server.health["rows"] == 1


def test_a_function_that_fails_on_the_server(plain):
    with pytest.raises(RewardError, match=r"after 2 attempts.*500.*KeyError: 'inside'"):
        scored(RemoteReward(plain.url, retries=1, backoff=0.01), ["raise"])


def test_a_server_killed_in_the_middle_of_a_request_and_another_ended_by_ctrl_c(plain):
    """Last of those that share a server."""
    reward = {"retries": 2, "backoff": 0.01}
    with pytest.raises(RewardError, match=r"failed to score 1 completion after 3 attempts"):
        scored(RemoteReward(plain.url, **reward), ["kill"])
    plain.process.wait(60)
    plain.start()
    scores = [scored(RemoteReward(plain.url, on_failure="skip", **reward), [text]) for text in ("a", "kill", "b")]
    plain.process.wait(60)
    # The first row was scored before the server died, the others not: nothing of the rollout is lost but these two.
    assert scores[0].total == [1.0] and all(math.isnan(one.total[0]) for one in scores[1:])
    assert [one.metrics["reward/RemoteReward/unanswered"] for one in scores] == [0.0, 1.0, 1.0]
    plain.start().process.send_signal(signal.SIGINT)
    assert plain.process.wait(60) == 0


def test_what_serve_reward_refuses(monkeypatch):
    monkeypatch.delenv("LIGHTRL_REWARD_TOKEN", raising=False)
    for kwargs, message in [
        ({}, "exactly one"),
        ({"reward": "a:b", "host": "0.0.0.0"}, "LIGHTRL_REWARD_TOKEN"),
        ({"reward": "no_such_module:b", "port": 0}, "no_such_module"),
    ]:
        with pytest.raises(ValueError, match=message):
            serve_reward(**kwargs)


@pytest.fixture
def scores(tmp_path):
    from tests.toys import SMALL, quickstart_model

    return quickstart_model(tmp_path, head="ForSequenceClassification", num_labels=1, **SMALL)


def test_texts_without_tokens_are_not_scored_and_a_broken_model_is_an_error(scores):
    from lightrl.rewards.server import ModelReward

    reward = ModelReward(scores)
    (alone,) = reward(["12"], ["3"])
    assert reward(["", "12"], ["", "3"]) == [None, pytest.approx(alone)]
    assert reward([""], [""]) == [None]
    reward.model.model.score.weight.data.fill_(math.nan)
    values = reward(["12", ""], ["3", ""])
    assert math.isnan(values[0]) and values[1] is None  # the scorer refuses the former


@pytest.mark.slow
def test_a_sequence_classification_model_is_served(serve, scores):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from lightrl.rewards.server import ModelReward

    model = AutoModelForSequenceClassification.from_pretrained(scores)
    completions = ["3", "345", "6"]
    tokens = [AutoTokenizer.from_pretrained(scores)("12" + text)["input_ids"] for text in completions]
    expected = [model(torch.tensor([row])).logits.item() for row in tokens]  # each alone, without padding
    assert len(set(expected)) == 3
    reward = ModelReward(scores)  # unequal lengths share a batch
    assert reward(["12"] * 3, completions) == pytest.approx(expected, abs=1e-6)
    short = ModelReward(scores, max_length=2)(["12"], completions[1:2])  # loses its start
    assert short == pytest.approx([model(torch.tensor([tokens[1][-2:]])).logits.item()], abs=1e-6)
    server = serve("length", reward=None, model=scores)
    found = scored(RemoteReward(server.url), completions, prompts=["12"] * 3)
    assert found.total == pytest.approx(expected, abs=1e-6)
