"""GenerativeJudge against a small chat server on a loopback socket that looks at what it is sent."""

from __future__ import annotations

import base64
import http.server
import io
import json
import math
import threading

import pytest
from PIL import Image

from lightrl.rewards import GenerativeJudge, RewardError, RewardScorer

RED, BLUE = Image.new("RGB", (8, 6), (255, 0, 0)), Image.new("RGB", (8, 6), (0, 0, 255))


class Chat:
    """Scores an answer by the share of the images that are of the colour it names; "odd" answers are special."""

    def __init__(self) -> None:
        self.bodies, self.headers = [], []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.headers.append(dict(self.headers))
                status, data = outer.answer(body)
                data = json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/chat/completions"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, body):
        parts = body["messages"][0]["content"]
        text = parts[-1]["text"]
        pixels = [picture(part).getpixel((0, 0)) for part in parts[:-1]]
        wanted = (255, 0, 0) if 'A: "red"' in text else (0, 0, 255)
        share = 10 * sum(pixel == wanted for pixel in pixels) / max(1, len(pixels))
        judged = {'A: "mute': "I cannot say.", 'A: "loud': "Score: 11", 'A: "twice': "Score: 1, no: **Score:** 4"}
        said = next((v for k, v in judged.items() if k in text), f"Well. Score: {share:g}")
        return 200, completion(said)


def completion(said, finish_reason="stop"):
    choice = {"message": {"role": "assistant", "content": said}, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}}


def picture(part) -> Image.Image:
    head, data = part["image_url"]["url"].split(",", 1)
    assert part["type"] == "image_url" and head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


@pytest.fixture
def chat():
    server = Chat()
    yield server
    server.server.shutdown()
    server.server.server_close()


def judge(chat, **kwargs) -> GenerativeJudge:
    return GenerativeJudge(chat.url, "judge", instruction="Q: {prompt}\nA: {completion}", backoff=0.001, **kwargs)


def ask(reward, completions, media=None, **columns):
    scorer = RewardScorer([reward], names=["judge"])
    n = len(completions)
    columns.setdefault("prompt", ["<|image_pad|> is a marker only in `prompts`"] * n)
    try:
        return scorer.submit(
            prompts=["templated"] * n,
            completions=completions,
            completion_ids=[[1]] * n,
            columns=columns,
            media=media or {},
            group_ids=list(range(n)),
        ).result(30)
    finally:
        scorer.close()


def test_the_judge_sees_the_rows_own_images(chat):
    media = {"images": [[RED], [RED, BLUE], []], "videos": [[]] * 3}
    scores = ask(judge(chat), ["red", "blue", "red"], media, prompt=["q0", "q1", "q2"])
    assert scores.total == [1.0, 0.5, 0.0]
    assert scores.extra["judge/judgement"] == ["Well. Score: 10", "Well. Score: 5", "Well. Score: 0"]
    assert scores.extra["judge/judge_call"] == [{"requests": 1, "tokens": [100, 10], "cost": None}] * 3
    names = {"unread": 0.0, "cached": 0.0, "prompt_tokens": 100.0, "completion_tokens": 10.0}
    assert scores.metrics == {f"reward/judge/{name}": value for name, value in names.items()}
    by_question = {body["messages"][0]["content"][-1]["text"]: body for body in chat.bodies}
    assert set(by_question) == {'Q: q0\nA: "red"', 'Q: q1\nA: "blue"', 'Q: q2\nA: "red"'}
    body = by_question['Q: q0\nA: "red"']
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("judge", 2048, 0.0)
    assert picture(body["messages"][0]["content"][0]).size == (8, 6)


def test_images_can_be_left_out(chat):
    ask(judge(chat, send_images=False), ["red"], {"images": [[RED]]})
    assert len(chat.bodies[0]["messages"][0]["content"]) == 1


def test_what_cannot_be_read_scores_nothing_and_the_last_number_counts(chat):
    scores = ask(judge(chat), ["mute", "loud", "twice"])
    assert math.isnan(scores.total[0]) and math.isnan(scores.total[1]) and scores.total[2] == 0.4
    assert scores.metrics["reward/judge/unread"] == pytest.approx(2 / 3)
    assert ask(judge(chat, low=1.0, high=11.0), ["loud", "twice"]).total == [1.0, 0.3]


def test_columns_token_and_further_keys_are_sent(chat, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    reward = GenerativeJudge(
        chat.url, "m", instruction="{answer}|{completion}", token_env="JUDGE_TOKEN", extra={"seed": 3}
    )
    ask(reward, ["x"], answer=[42])
    assert chat.bodies[0]["messages"][0]["content"][-1]["text"] == '42|"x"' and chat.bodies[0]["seed"] == 3
    assert chat.headers[0]["Authorization"] == "Bearer secret"
    with pytest.raises(RewardError, match="column='answer'"):
        ask(reward, ["x"])
    with pytest.raises(ValueError, match="lacks {completion}"):
        GenerativeJudge(chat.url, "m", instruction="Grade.")
