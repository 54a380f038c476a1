"""The data that comes with the repository: drawn product pictures, and ELPV's solar cells turned into examples.

A product picture answers three questions: which colour, which defect, which number. On a *catalogue* picture the light
is even and the background clean; the embedded base was trained on such pictures alone. The *shop floor* shows the same
products under a dim, warm lamp through a cheap, slightly unsharp camera: that is the fine-tuning task.
"""

import functools
import importlib.util
import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from sklearn.model_selection import train_test_split
from tqdm.auto import tqdm

from vlftlib.duplicates import Duplicates, find_duplicates, split_examples
from vlftlib.evaluation import parse_answer
from vlftlib.forms import Example, Rejection, hash_examples
from vlftlib.reading import LoadedExamples, load_examples

DATA = Path(__file__).parent.parent / "data"

COLOURS = {
    "red": (200, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 200),
    "yellow": (225, 200, 40),
    "black": (35, 35, 35),
    "white": (235, 235, 235),
    "orange": (235, 130, 30),
    "purple": (130, 50, 160),
}
DEFECTS = ("none", "scratch", "dent", "crack", "stain")
LETTERS = "ABCDEFGH"
SIZE = 224  # px, both sides
BACKDROP = 245  # grey value of the catalogue's background

# The shop floor, each drawn from a range: blur radius in px, brightness, how much of the green and of the blue the lamp
# leaves out (green half of it), the share by which the light falls off to one side, noise's standard deviation in grey values.
BLUR, LIGHT, WARMTH, FALL, NOISE = (0.5, 1.5), (0.6, 0.95), (0.1, 0.3), (0.05, 0.2), (3, 8)
# part: (pictures, seed)
PRODUCT_PARTS = {"train": (1600, 11), "validation": (200, 12), "test": (400, 13), "catalogue": (400, 14)}
GRADES = ("0", "1/3", "2/3", "1")  # ELPV's defect probability

QUESTION = "What are the product's colour, defect and number?"
NUMBER_QUESTION = "What is the product's number?"
CELL_QUESTION = "What are this solar cell's type and defect grade?"


@dataclass(frozen=True)
class Product:
    colour: str
    defect: str
    number: str  # one of A-H and two digits

    @property
    def answer(self) -> str:
        return f"colour: {self.colour}, defect: {self.defect}, number: {self.number}"


def random_product(rng: random.Random) -> Product:
    number = f"{rng.choice(LETTERS)}{rng.randint(0, 99):02d}"
    return Product(rng.choice(list(COLOURS)), rng.choice(DEFECTS), number)


@functools.lru_cache(maxsize=1)
def _housing() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What all products share, as (SIZE, SIZE, 1) arrays: the body's coverage, its shading factor, the backdrop's grey."""
    mask = Image.new("L", (4 * SIZE, 4 * SIZE))
    ImageDraw.Draw(mask).rounded_rectangle([40, 40, 4 * SIZE - 40, 4 * SIZE - 40], 110, fill=255)
    body = np.asarray(mask.resize((SIZE, SIZE), Image.Resampling.BOX), np.float32) / 255
    soft = np.asarray(mask.resize((SIZE, SIZE)).filter(ImageFilter.GaussianBlur(5)), np.float32) / 255
    shading = np.linspace(1.08, 0.92, SIZE, dtype=np.float32)[:, None] * (0.75 + 0.25 * np.clip(2 * soft - 0.9, 0, 1))
    vents = Image.new("L", (SIZE, SIZE))
    for i in range(-2, 3):
        ImageDraw.Draw(vents).rounded_rectangle([108 + 16 * i, 203, 116 + 16 * i, 207], 2, fill=255)
    shading *= 1 - 0.35 * np.asarray(vents, np.float32) / 255
    shadow = np.roll(soft, (4, 2), (0, 1))
    return body[..., None], shading[..., None], (BACKDROP - 60 * shadow)[..., None]


def draw_product(product: Product, rng: random.Random, pose: float = 1.0) -> Image.Image:
    """The catalogue picture of a product.

    Args:
        product: what to show.
        rng: draws pose, shade and the place of the defect.
        pose: 0 keeps the product centred and upright; 1 moves it by up to 8 px and turns it by up to 2 degrees.

    Returns:
        An RGB picture of SIZE x SIZE px.
    """
    red, green, blue = COLOURS[product.colour]
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 120  # luma, ITU-R BT.601
    ink = (20, 20, 20) if bright else (235, 235, 235)
    body, shading, backdrop = _housing()
    fill = np.array([red, green, blue], np.float32) + np.float32([rng.uniform(-12, 12) for _ in range(3)])
    image = Image.fromarray(np.clip(fill * shading * body + backdrop * (1 - body), 0, 255).astype(np.uint8))
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(90)
    for i, glyph in enumerate(product.number):
        pen.text((SIZE // 2 + (i - 1) * 60, 64), glyph, font=font, fill=ink, anchor="mm")
    _draw_defect(image, product.defect, rng, ink, bright)
    angle, move = rng.uniform(-2, 2) * pose, [rng.uniform(-8, 8) * pose for _ in range(2)]
    if pose:
        image = image.rotate(angle, Image.Resampling.BILINEAR, translate=move, fillcolor=(BACKDROP,) * 3)
    return image


def _draw_defect(image: Image.Image, defect: str, rng: random.Random, ink: tuple, bright: bool) -> None:
    pen = ImageDraw.Draw(image)
    x, y = SIZE * rng.uniform(0.32, 0.68), SIZE * rng.uniform(0.68, 0.78)
    if defect == "scratch":  # two straight parallel strokes
        angle, half = rng.uniform(-0.35, 0.35), SIZE * rng.uniform(0.15, 0.22)
        dx, dy = half * math.cos(angle), half * math.sin(angle)
        for shift, width in ((0, 5), (11, 3)):
            pen.line([x - dx, y - dy + shift, x + dx, y + dy + shift], fill=ink, width=width)
    elif defect == "dent":  # a soft shadow with a highlight on its lower rim
        radius = SIZE * rng.uniform(0.07, 0.1)
        for tone, strength, top, bottom in ((0 if bright else 150, 190, -1, 1), (255, 110, -0.4, 1.1)):
            spot = Image.new("L", (80, 80))
            box = [40 - radius, 40 + top * radius, 40 + radius, 40 + bottom * radius]
            ImageDraw.Draw(spot).ellipse(box, fill=strength)
            image.paste((tone,) * 3, (round(x) - 40, round(y) - 40), spot.filter(ImageFilter.GaussianBlur(5)))
    elif defect == "crack":  # a jagged line with a branch
        points = [(x + (i - 3) * SIZE * 0.06, y + rng.choice((-1, 1)) * rng.uniform(0.03, 0.08) * SIZE) for i in range(7)]
        pen.line(points, fill=ink, width=4)
        fork = points[rng.randint(2, 4)]
        pen.line([fork, (fork[0] + SIZE * 0.08, fork[1] + SIZE * 0.1)], fill=ink, width=3)
    elif defect == "stain":  # a cluster of brown drops
        for _ in range(8):
            r = SIZE * rng.uniform(0.025, 0.05)
            cx, cy = x + rng.gauss(0, SIZE * 0.05), y + rng.gauss(0, SIZE * 0.03)
            pen.ellipse([cx - r, cy - r, cx + r, cy + r], fill=(110, 80, 40))


def shop_floor(picture: Image.Image, rng: random.Random) -> Image.Image:
    """The same product as a cheap camera sees it on the line: unsharp, dim, under a warm lamp at one side, noisy."""
    pixels = np.asarray(picture.filter(ImageFilter.GaussianBlur(rng.uniform(*BLUR))), np.float32)
    cast = rng.uniform(*WARMTH)
    angle, depth = rng.uniform(0, 2 * math.pi), rng.uniform(*FALL)
    ramp = np.linspace(-1, 1, SIZE, dtype=np.float32)
    lamp = 1 + depth * (math.cos(angle) * ramp[None, :] + math.sin(angle) * ramp[:, None])
    pixels = pixels * rng.uniform(*LIGHT) * np.float32([1, 1 - cast / 2, 1 - cast]) * lamp[..., None]
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(pixels.shape, np.float32)
    return Image.fromarray(np.clip(pixels + rng.uniform(*NOISE) * noise, 0, 255).astype(np.uint8))


def make_products(folder: str | os.PathLike | None = None) -> Path:
    """Draw the product data set, once: shop-floor pictures for train, validation and test, and a catalogue test.

    Writes FOLDER/{train,validation,test,catalogue}.jsonl (data/products by default) in Qwen's form and the pictures beside
    them. Each part has a seed of its own; the base's training has another.

    Returns:
        The folder. One that is complete is left as it is.
    """
    folder = Path(folder or DATA / "products")
    if folder.is_dir():
        return folder
    partial = Path(tempfile.mkdtemp(dir=_made(folder.parent), prefix=f"{folder.name}.partial-"))
    try:
        for name, (count, seed) in tqdm(PRODUCT_PARTS.items(), desc="drawing products"):
            rng, rows = random.Random(seed), []
            (partial / name).mkdir()
            for i in range(count):
                product = random_product(rng)
                picture = draw_product(product, rng)
                file = f"{name}/{i:04d}.png"
                if name != "catalogue":
                    picture, file = shop_floor(picture, rng), f"{name}/{i:04d}.jpg"
                picture.save(partial / file, **({"quality": 92} if file.endswith("jpg") else {}))
                rows.append(_row(file, QUESTION, product.answer))
            _write_rows(partial / f"{name}.jsonl", rows)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def make_elpv(folder: str | os.PathLike | None = None) -> Path:
    """Turn ELPV's solar cells into examples: train and test as published (75/25), stratified by type and grade, and validation.

    Writes FOLDER/{train,validation,test}.jsonl (data/elpv by default); the pictures stay in the installed package
    (CC BY-NC-SA 4.0) and are linked.
    Source: Deitsch et al., Automatic classification of defective photovoltaic module cells in electroluminescence images,
    Solar Energy 185 (2019).

    Raises:
        ModuleNotFoundError: the extra is not installed.
    """
    folder = Path(folder or DATA / "elpv")
    if folder.is_dir():
        return folder
    spec = importlib.util.find_spec("elpv_dataset")
    if spec is None:
        raise ModuleNotFoundError("the solar cells come with an extra: pip install -c constraints.txt -e .[elpv]")
    source = Path(spec.origin).parent / "data"
    rows = []
    for line in (source / "labels.csv").read_text().split("\n"):
        if line.strip():
            file, probability, cell = line.split()
            rows.append(_row(f"cells/{file}", CELL_QUESTION, f"cell: {cell}, grade: {GRADES[round(float(probability) * 3)]}"))
    answers = [row["conversations"][1]["value"] for row in rows]
    rest, test = train_test_split(rows, test_size=0.25, random_state=0, stratify=answers)
    answers = [row["conversations"][1]["value"] for row in rest]
    train, validation = train_test_split(rest, test_size=0.1, random_state=0, stratify=answers)
    partial = Path(tempfile.mkdtemp(dir=_made(folder.parent), prefix=f"{folder.name}.partial-"))
    try:
        (partial / "cells").symlink_to(source, target_is_directory=True)
        for name, part in (("train", train), ("validation", validation), ("test", test)):
            _write_rows(partial / f"{name}.jsonl", part)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def two_class_accuracy(answers: Sequence[tuple[str, str]]) -> dict[str, float]:
    """ELPV's published measure over (expected, given) answers: is the defect probability above one half?

    Returns:
        The accuracy, and that of always answering with the larger class.
    """

    def defective(text: str) -> bool | None:
        grade = (parse_answer(text) or {}).get("grade")
        return GRADES.index(grade) >= 2 if grade in GRADES else None

    pairs = [(defective(expected), defective(given)) for expected, given in answers]
    share = sum(expected for expected, _ in pairs) / len(pairs)
    return {
        "two_class_accuracy": sum(expected == given for expected, given in pairs) / len(pairs),
        "majority_class": max(share, 1 - share),
    }


@dataclass(frozen=True)
class Splits:
    """A data set as a run needs it: its parts by name ("train", "validation", "test", ...), and how its answers are measured."""

    name: str
    parts: dict[str, list[Example]]
    rejected: tuple[Rejection, ...] = ()
    metric: Callable[[Sequence[tuple[str, str]]], dict[str, float]] | None = None

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(part)} {name}" for name, part in self.parts.items())
        return f"Splits({self.name}: {counts}; {len(self.rejected)} rejected)"

    def describe(self) -> dict:
        """For a run record: name, counts, the question that the training part asks first, and a hash of all rows."""
        first = next(iter(self.parts["train"]), None)
        question = first and "".join(part.get("text", "") for part in first.messages[0]["content"])
        counts, digest = {name: len(part) for name, part in self.parts.items()}, hash_examples(self.parts)
        return dict(name=self.name, counts=counts, rejected=len(self.rejected), question=question, hash=digest)


def load_parts(data: str | os.PathLike, root: str | os.PathLike | None = None) -> dict[str, LoadedExamples]:
    """Read a data set: "products" or "elpv" (made where they aren't there yet), a folder, or a file.

    Returns:
        The parts by name: "train", "validation" and "test" of a folder's train.jsonl, validation.jsonl and test.jsonl (the
        products also have "catalogue"), or "all" of a file.

    Raises:
        FileNotFoundError: no such file, or the folder lacks one.
    """
    made = {"products": make_products, "elpv": make_elpv}.get(str(data))
    folder = Path(data) if made is None else made()
    if not folder.is_dir():
        return {"all": load_examples(data, root)}
    names = ["train", "validation", "test"] + ["catalogue"] * (made is make_products)
    # ELPV's pictures stay in their package, which the folder links to.
    return {name: load_examples(folder / f"{name}.jsonl", root, outside=made is make_elpv) for name in names}


def load_splits(data: str | os.PathLike, root: str | os.PathLike | None = None, progress: bool = True) -> Splits:
    """Open a data set for a run: as `load_parts`, and a file of examples is split 80/10/10 by each row's content.

    Copies of a picture stay on one side, so a file's pictures are all decoded here. For a large file,
    `python -m vlftlib check FILE --split FOLDER` does it once.

    Raises:
        FileNotFoundError: no such file, or the folder lacks one.
        ValueError: a part has no example; the message counts what was rejected.
    """
    loaded = load_parts(data, root)
    rejected = tuple(rejection for part in loaded.values() for rejection in part.rejected)
    if set(loaded) == {"all"}:
        examples = loaded["all"].examples
        parts = split_three(examples, find_duplicates(examples, progress=progress))
    else:
        parts = {name: part.examples for name, part in loaded.items()}
    empty = [name for name, part in parts.items() if not part]
    if empty:
        first = f"; the first: {rejected[0]}" if rejected else ""
        found = sum(map(len, parts.values()))
        raise ValueError(f"{data}: no example for {', '.join(empty)} ({found} found, {len(rejected)} rejected{first})")
    return Splits(str(data), parts, rejected, two_class_accuracy if str(data) == "elpv" else None)


def split_three(examples: Sequence[Example], duplicates: Duplicates | None = None) -> dict[str, list[Example]]:
    """Examples as "train", "validation" and "test", 80/10/10 by each row's content (see `split_examples`)."""
    train, rest = split_examples(examples, share=0.8, duplicates=duplicates)
    validation, test = split_examples(rest, share=0.5, seed=1, duplicates=duplicates)
    return {"train": train, "validation": validation, "test": test}


def _publish(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process of the same run was quicker
            raise


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _row(image: str, question: str, answer: str) -> dict:
    turns = [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": answer}]
    return {"image": image, "conversations": turns}


def _write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
