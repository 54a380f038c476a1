"""Two small data sets in the forms that the demo data of LLaMA-Factory and of Qwen's fine-tuning scripts have, to try a path on.

The layout and the keys are theirs, the words and pictures our own: bricks on a table.
"""

import json
import os
import random
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (190, 50, 45), "green": (60, 145, 70), "blue": (55, 85, 185), "yellow": (220, 190, 60)}
SHAPES = ("cube", "ball", "cone")
WIDTH, HEIGHT = 196, 140  # px
NUMBERS = ("no brick", "one brick", "two bricks", "three bricks")


def make_demos(folder: str | os.PathLike, rows: int = 12, seed: int = 0) -> Path:
    """Write FOLDER/dataset_info.json with LLaMA-Factory's entries, FOLDER/qwen_demo.json, and their pictures.

    Entries: bricks (conversations with pictures, ShareGPT's form), bricks_alpaca (questions with one picture, Alpaca's form)
    and bricks_text (no picture). qwen_demo.json has rows with one picture, with two, and without.

    Args:
        folder: made where it isn't there.
        rows: of each of the data sets with pictures; bricks_text has three.
        seed: another seed, other bricks.
    """
    folder, rng = Path(folder), random.Random(seed)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    talks, pairs, qwen = [], [], []
    for i in range(rows):
        (first, bricks), (second, others) = (_picture(folder, f"{2 * i + k}.jpg", rng) for k in (0, 1))
        turns = ["<image>What lies on the table?", _name(bricks), "And <image> there?", _name(others)]
        roles = ("user", "assistant") * 2
        talks.append({"messages": [dict(role=r, content=c) for r, c in zip(roles, turns)], "images": [first, second]})
        pairs.append({"instruction": "<image>How many?", "input": "", "output": NUMBERS[len(bricks)], "images": [first]})
        if i % 3 == 0:
            asked, answer = "<image>\n<image>\nWhich picture has more bricks?", _more(len(bricks), len(others))
            qwen.append({"image": [first, second], "conversations": _said(asked, answer)})
        elif i % 3 == 1:
            qwen.append({"image": first, "conversations": _said("Name the bricks from left to right.\n<image>", _name(bricks))})
        else:
            qwen.append({"conversations": _said("What is a brick good for?", "It is good for building.")})
    talks[0]["messages"].insert(0, {"role": "system", "content": "You look after the bricks."})
    text = [{"instruction": "Count.", "input": f"to {n}", "output": ", ".join(map(str, range(1, n + 1)))} for n in (2, 3, 4)]
    files = {"bricks.json": talks, "bricks_alpaca.json": pairs, "bricks_text.json": text, "qwen_demo.json": qwen}
    files["dataset_info.json"] = {
        "bricks": {
            "file_name": "bricks.json",
            "formatting": "sharegpt",
            "columns": {"messages": "messages", "images": "images"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
        },
        "bricks_alpaca": {
            "file_name": "bricks_alpaca.json",
            "columns": {"prompt": "instruction", "query": "input", "response": "output", "images": "images"},
        },
        "bricks_text": {"file_name": "bricks_text.json"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    return folder


def _picture(folder: Path, name: str, rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """Draw one to three bricks; the picture's path in the folder, and the bricks from left to right."""
    image = Image.new("RGB", (WIDTH, HEIGHT), (235, 230, 220))
    pen = ImageDraw.Draw(image)
    pen.rectangle([0, HEIGHT * 0.7, WIDTH, HEIGHT], fill=(150, 110, 75))
    bricks = [(rng.choice(list(COLOURS)), rng.choice(SHAPES)) for _ in range(rng.randint(1, 3))]
    for place, (colour, shape) in enumerate(bricks):
        left, bottom, side = 16 + 60 * place + rng.randint(-6, 6), HEIGHT * 0.8, rng.randint(38, 48)
        box = [left, bottom - side, left + side, bottom]
        if shape == "cube":
            pen.rectangle(box, fill=COLOURS[colour])
        elif shape == "ball":
            pen.ellipse(box, fill=COLOURS[colour])
        else:
            pen.polygon([(left, bottom), (left + side, bottom), (left + side / 2, bottom - side)], fill=COLOURS[colour])
    image.save(folder / "pictures" / name, quality=92)
    return f"pictures/{name}", bricks


def _name(bricks: list[tuple[str, str]]) -> str:
    return ", ".join(f"a {colour} {shape}" for colour, shape in bricks)


def _more(first: int, second: int) -> str:
    return "neither" if first == second else "the first" if first > second else "the second"


def _said(asked: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]
