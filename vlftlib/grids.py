"""Bring every picture to one of a few sizes, so that the model sees a handful of shapes: for graph mode, off by default.

A picture is scaled to fit inside the size whose aspect ratio is nearest, and the rest is filled: its own aspect is kept. What
it costs is resolution: of a 3:1 picture in a square, two thirds of the tokens show filling.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

FILLING = (123, 117, 104)  # the mean colour that the image processor subtracts (CLIP's), so that filling is near zero


@dataclass(frozen=True)
class FixedGrid:
    """The sizes, (width, height) in px, that pictures are brought to; each is a whole number of image tokens."""

    sizes: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return ",".join(f"{width}x{height}" for width, height in self.sizes)

    def choose(self, width: int, height: int) -> tuple[int, int]:
        """The size for a picture of this one: that of the nearest aspect ratio, the first of equals."""
        return min(self.sizes, key=lambda size: abs(math.log(size[0] * height / (size[1] * width))))

    def fit(self, picture: Image.Image) -> Image.Image:
        """The picture, scaled to fit inside its size, in the middle of the filling."""
        size = self.choose(*picture.size)
        scale = min(side / own for side, own in zip(size, picture.size))
        inner = [min(side, max(1, round(own * scale))) for side, own in zip(size, picture.size)]
        scaled = picture.resize(inner, Image.Resampling.BICUBIC)
        if scaled.size == size:
            return scaled
        filled = Image.new("RGB", size, FILLING)
        filled.paste(scaled, tuple((side - own) // 2 for side, own in zip(size, inner)))
        return filled


def parse_grid(text: str, image_processor) -> FixedGrid:
    """The sizes written as "112x112" or "448x448,560x336".

    Args:
        text: widths and heights in px.
        image_processor: Qwen2.5-VL's; a size must be one that it leaves as it is.

    Raises:
        ValueError: another form, a side that isn't a whole number of tokens, a size outside its limits; says what is right.
    """
    if not re.fullmatch(r"\d+x\d+(,\d+x\d+)*", text):
        raise ValueError(f"fixed_grid {text!r}: write width x height in pixels, as 448x448, or several, as 448x448,560x336")
    sizes = tuple(tuple(map(int, size.split("x"))) for size in text.split(","))
    unit, limits = image_processor.patch_size * image_processor.merge_size, image_processor.size
    least, most = limits["shortest_edge"], limits["longest_edge"]
    for size in sizes:
        if any(side % unit or not side for side in size):
            right = "x".join(str(max(1, round(side / unit)) * unit) for side in size)
            raise ValueError(f"fixed_grid {size[0]}x{size[1]}: sides must be multiples of {unit} px, a token's side, as {right}")
        if not least <= size[0] * size[1] <= most:
            raise ValueError(
                f"fixed_grid {size[0]}x{size[1]} has {size[0] * size[1]:,} pixels, outside the processor's limits of "
                f"{least:,} to {most:,}: choose another size, or set min_pixels and max_pixels"
            )
    return FixedGrid(sizes)


def grid_of(processor) -> FixedGrid | None:
    """The sizes that a processor's pictures are brought to; None, as in a stock processor, leaves each its own."""
    return getattr(processor, "fixed_grid", None)


def to_grid(processor, pictures: Sequence[Image.Image]) -> list[Image.Image]:
    """Pictures as the processor's grid wants them."""
    grid = grid_of(processor)
    return list(pictures) if grid is None else [grid.fit(picture) for picture in pictures]
