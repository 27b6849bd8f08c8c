"""A synthetic vision task: one to four shapes of one color on a two-by-two grid, and questions about them.

what colour?               one image                               -> a color
how many?                  one image                               -> a number
how many in both?          two images                              -> a number
how many: red red blue?    no image, the words are counted         -> a number
"""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Picture
from PIL import ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 200, 40)}
SHAPES = ("circle", "square", "triangle")
SIZE = 56
KINDS = ("count", "count", "name", "name", "both", "text")
"""The kinds of questions: a third count, a third name, a sixth have two images, and a sixth have none."""


def draw(colour: str, number: int, rng: random.Random) -> Picture.Image:
    """Draws an image of 56 x 56 pixels. `rng` chooses the cells, kinds, sizes, and positions of its shapes."""
    grey = rng.randint(235, 255)
    picture = Picture.new("RGB", (SIZE, SIZE), (grey, grey, grey))
    pen = ImageDraw.Draw(picture)
    for cell in rng.sample(range(4), number):
        size, shape = rng.randint(16, 24), rng.choice(SHAPES)
        x, y = (SIZE // 2 * at + rng.randint(1, 27 - size) for at in (cell % 2, cell // 2))
        fill = tuple(max(0, min(255, part + rng.randint(-20, 20))) for part in COLOURS[colour])
        if shape == "circle":
            pen.ellipse((x, y, x + size, y + size), fill=fill)
        elif shape == "square":
            pen.rectangle((x, y, x + size, y + size), fill=fill)
        else:
            pen.polygon(((x + size / 2, y), (x, y + size), (x + size, y + size)), fill=fill)
    return picture


def make_row(rng: random.Random) -> dict[str, Any]:
    """Makes one question with its images and answer."""
    kind, colour, numbers = rng.choice(KINDS), rng.choice(list(COLOURS)), [rng.randint(1, 4) for _ in range(2)]
    if kind == "text":
        words = [rng.choice(list(COLOURS)) for _ in range(numbers[0])]
        return row(kind, f"how many: {' '.join(words)}?", str(numbers[0]), [])
    if kind == "both":
        pictures = [draw(colour, number, rng) for number in numbers]
        return row(kind, "how many in both?", str(sum(numbers)), pictures)
    pictures = [draw(colour, numbers[0], rng)]
    if kind == "name":
        return row(kind, "what colour?", colour, pictures)
    return row(kind, "how many?", str(numbers[0]), pictures)


def row(kind: str, question: str, answer: str, images: list[Picture.Image]) -> dict[str, Any]:
    """Makes an example of the dataset."""
    content = [*({"type": "image", "text": None} for _ in images), {"type": "text", "text": question}]
    prompt = [{"role": "user", "content": content}]
    return {"prompt": prompt, "images": images, "completion": answer, "answer": answer, "kind": kind}


class ShapeRows:
    """Examples of the task.

    Args:
        split: "sft", "train", or "eval", each with a different seed.
        size: Number of examples.
    """

    def __init__(self, split: str = "train", size: int = 4000) -> None:
        self.split, self.size = split, size

    def __call__(self) -> Dataset:
        rng = random.Random(f"shapes/{self.split}")
        text = Value("string")
        message = {"role": text, "content": List({"type": text, "text": text})}
        features = {"prompt": List(message), "images": List(Image())}
        features |= {name: text for name in ("completion", "answer", "kind")}
        return Dataset.from_list([make_row(rng) for _ in range(self.size)], features=Features(features))
