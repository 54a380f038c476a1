"""The data that comes with the repository: drawn product pictures, and ELPV's solar cells turned into examples.

A product picture answers three questions: which colour, which defect, which number. On a *catalogue* picture the light
is even and the background clean; the embedded base was trained on such pictures alone. The *shop floor* shows the same
products under a dim, warm lamp through a cheap, slightly unsharp camera: that is the fine-tuning task.
"""

import functools
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from tqdm.auto import tqdm

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
