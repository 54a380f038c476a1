"""Pictures brought to a few sizes: none distorted, none cut, tokens known from the header, the same in training and evaluation."""

import argparse

import pytest
import torch
from PIL import ExifTags, Image

from vlftlib.__main__ import _processor
from vlftlib.dataset import VisionLanguageCollator, VisionLanguageDataset
from vlftlib.forms import Example
from vlftlib.grids import FILLING, FixedGrid
from vlftlib.models import TINY_BASE, load_processor
from vlftlib.runs import RunRecord

GRIDS = "112x112,168x84,84x140"


def picture_of(path, size, orientation=None) -> Example:
    image = Image.new("RGB", size, "red")
    options = {}
    if orientation:
        options["exif"] = image.getexif()
        options["exif"][ExifTags.Base.Orientation] = orientation
    image.save(path, **options)
    turns = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
    ]
    return Example((str(path),), turns, str(path), 1)


@pytest.mark.parametrize(
    "size, chosen",
    [((300, 300), (112, 112)), ((90, 100), (112, 112)), ((640, 320), (168, 84)), ((9, 900), (84, 140)), ((600, 1000), (84, 140))],
)
def test_the_nearest_aspect_is_chosen_and_kept(size, chosen):
    grid = FixedGrid(((112, 112), (168, 84), (84, 140)))
    fitted = grid.fit(Image.new("RGB", size, "red"))
    assert grid.choose(*size) == chosen == fitted.size
    red = [tuple(fitted.getpixel((x, y))) == (255, 0, 0) for x in range(chosen[0]) for y in range(chosen[1])]
    # As large as fits, and the rest is filling: nothing is stretched or cut.
    scale = min(chosen[0] / size[0], chosen[1] / size[1])
    assert sum(red) == max(1, round(size[0] * scale)) * max(1, round(size[1] * scale))
    corner = fitted.getpixel((0, 0))
    assert corner == ((255, 0, 0) if all(red) else FILLING)


def test_pictures_of_every_shape_give_a_handful_of_grids(tmp_path):
    processor = load_processor(TINY_BASE, 84 * 140, 168 * 84, GRIDS)
    sizes = [(50, 400), (113, 111), (333, 77), (28, 28), (900, 300), (64, 96)]
    dataset = VisionLanguageDataset([picture_of(tmp_path / f"{i}.png", size) for i, size in enumerate(sizes)], processor)
    grids = [tuple(dataset[i]["image_grid_thw"][0].tolist()) for i in range(len(sizes))]
    assert set(grids) <= {(1, 8, 8), (1, 6, 12), (1, 10, 6)} and len(set(grids)) == 3
    assert dataset.lengths == [len(dataset[i]["input_ids"]) for i in range(len(sizes))]


@pytest.mark.parametrize("orientation", [None, 3, 6])
def test_tokens_are_counted_for_the_picture_turned_upright(orientation, tmp_path):
    processor = load_processor(TINY_BASE, 84 * 140, 168 * 84, GRIDS)
    dataset = VisionLanguageDataset([picture_of(tmp_path / "a.jpg", (320, 160), orientation)], processor)
    assert dataset.lengths == [len(dataset[0]["input_ids"])]
    assert dataset[0]["image_grid_thw"].tolist() == [[1, 10, 6] if orientation == 6 else [1, 6, 12]]


def test_without_a_grid_a_picture_keeps_its_shape(tmp_path):
    example = picture_of(tmp_path / "a.png", (224, 56))
    shapes = []
    for grid in (None, "112x112"):
        dataset = VisionLanguageDataset([example], load_processor(TINY_BASE, fixed_grid=grid))
        shapes.append(dataset[0]["image_grid_thw"].tolist())
    assert shapes == [[[1, 4, 16]], [[1, 8, 8]]]


def test_a_picture_of_a_grids_own_shape_has_the_same_pixels(examples):
    items = [VisionLanguageDataset(examples[:1], load_processor(TINY_BASE, fixed_grid=grid))[0] for grid in (None, "112x112")]
    assert torch.equal(items[0]["pixel_values"], items[1]["pixel_values"])


def test_adapters_are_evaluated_on_the_grid_that_they_were_trained_on(tmp_path):
    trained = dict(min_pixels=84 * 140, max_pixels=168 * 84, fixed_grid=GRIDS)
    RunRecord("x", "completed", {"processor": trained}).save(tmp_path)
    asked = dict(model=TINY_BASE, min_pixels=None, max_pixels=None, fixed_grid=None, adapters=tmp_path / "adapters")
    assert str(_processor(argparse.Namespace(**asked)).fixed_grid) == GRIDS
    assert str(_processor(argparse.Namespace(**asked | {"fixed_grid": "112x112"})).fixed_grid) == "112x112"
    assert _processor(argparse.Namespace(**asked | {"adapters": None})).fixed_grid is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("448", "write width x height in pixels, as 448x448"),
        ("112x112;84x84", "write width x height"),
        ("100x112", "sides must be multiples of 28 px, a token's side, as 112x112"),
        ("0x112", "multiples of 28 px, a token's side, as 28x112"),
        ("112x112,448x448", "448x448 has 200,704 pixels, outside the processor's limits of 12,544 to 12,996"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        load_processor(TINY_BASE, fixed_grid=text)


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_padded_to_a_multiple(side, examples, processor):
    items = [VisionLanguageDataset(examples, processor)[i] for i in range(2)]
    plain = VisionLanguageCollator(processor, side)(items)
    padded = VisionLanguageCollator(processor, side, multiple=50)(items)
    assert plain["input_ids"].shape == (2, 63) and padded["input_ids"].shape == (2, 100)
    own = slice(0, 63) if side == "right" else slice(37, 100)
    for key in ("input_ids", "attention_mask", "labels", "mm_token_type_ids"):
        assert torch.equal(padded[key][:, own], plain[key])
    assert padded["attention_mask"].sum() == plain["attention_mask"].sum()
    assert (padded["labels"] != -100).sum() == (plain["labels"] != -100).sum()
