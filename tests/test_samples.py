import json
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vlftlib import samples
from vlftlib.evaluation import parse_answer
from vlftlib.reading import write_examples
from vlftlib.samples import COLOURS, DEFECTS, Product, draw_product, make_products, random_product, shop_floor, two_class_accuracy


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "PRODUCT_PARTS", {"train": (6, 1), "validation": (3, 2), "test": (3, 3), "catalogue": (3, 4)})
        patch.setattr(samples, "DATA", tmp_path_factory.mktemp("data"))
        yield make_products(samples.DATA / "products")


def test_a_picture_hangs_on_the_seed_alone():
    first, second = (np.asarray(shop_floor(draw_product(Product("red", "dent", "A01"), r), r)) for r in map(random.Random, (7, 7)))
    other = np.asarray(draw_product(Product("red", "dent", "A01"), random.Random(8)))
    assert first.shape == (224, 224, 3) and (first == second).all() and (first != other).any()


@pytest.mark.parametrize("colour", COLOURS)
def test_the_colour_is_on_the_body(colour):
    picture = np.asarray(draw_product(Product(colour, "none", "B20"), random.Random(0), pose=0), float)
    body = picture[110:130, 60:160].mean((0, 1))  # between the number and the defect's place
    distances = {name: np.abs(body - value).sum() for name, value in COLOURS.items()}
    assert min(distances, key=distances.get) == colour


@pytest.mark.parametrize("defect", DEFECTS[1:])
def test_a_defect_changes_its_place_and_nothing_else(defect):
    clean, marred = (np.asarray(draw_product(Product("blue", d, "C33"), random.Random(1), pose=0), int) for d in ("none", defect))
    changed = np.abs(clean - marred).sum(-1) > 30
    assert changed.sum() > 150 and not changed[:110].any()


def test_the_shop_floor_is_dimmer_warmer_and_noisier():
    clean = np.asarray(draw_product(Product("white", "none", "C33"), random.Random(1)), float)
    floor = np.asarray(shop_floor(draw_product(Product("white", "none", "C33"), random.Random(1)), random.Random(2)), float)
    assert floor.mean() < 0.9 * clean.mean()
    assert floor[..., 2].mean() < 0.92 * floor[..., 0].mean()
    assert np.diff(floor[100:160, 60:160], axis=1).std() > 2 * np.diff(clean[100:160, 60:160], axis=1).std()


def test_answers_parse():
    for _ in range(20):
        product = random_product(random.Random())
        assert parse_answer(product.answer) == vars(product)


def test_products_are_made_once_and_whole(products):
    assert make_products(products) == products
    rows = {path.stem: path.read_text().count("\n") for path in products.glob("*.jsonl")}
    assert rows == {"train": 6, "validation": 3, "test": 3, "catalogue": 3}
    assert not list(products.parent.glob("*partial*"))


def test_an_interrupted_making_leaves_nothing(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(samples, "shop_floor", stop)
    with pytest.raises(KeyboardInterrupt):
        make_products(tmp_path / "products")
    assert not list(tmp_path.iterdir())


def test_splits_of_a_folder(products):
    splits = samples.load_splits("products")
    assert repr(splits) == "Splits(products: 6 train, 3 validation, 3 test, 3 catalogue; 0 rejected)"
    description = splits.describe()
    assert description["question"] == samples.QUESTION and description["rejected"] == 0
    assert description["hash"] == samples.load_splits("products").describe()["hash"]
    same = samples.load_splits(products)
    assert set(same.parts) == {"train", "validation", "test"} and same.parts["test"] == splits.parts["test"]


def test_splits_of_a_file(draw_examples, tmp_path):
    examples = draw_examples(tmp_path, 40)
    write_examples(examples, tmp_path / "mine.jsonl", tmp_path)
    with (tmp_path / "mine.jsonl").open("a") as file:
        file.write('{"image": "missing.png", "conversations": []}\n')
    splits = samples.load_splits(tmp_path / "mine.jsonl")
    counts = {name: len(part) for name, part in splits.parts.items()}
    assert sum(counts.values()) == 40 and counts["train"] > 25 and len(splits.rejected) == 1
    again = samples.load_splits(tmp_path / "mine.jsonl")
    assert again.parts == splits.parts


def test_splits_of_a_grown_file(draw_examples, tmp_path):
    """Rows added at the end move none, and a copy of an earlier picture goes where that is."""
    examples = draw_examples(tmp_path, 60)
    write_examples(examples[:40], tmp_path / "mine.jsonl", tmp_path)
    before = samples.load_splits(tmp_path / "mine.jsonl", progress=False)
    copies = []
    for i in range(0, 40, 2):
        Image.open(tmp_path / f"{i}.png").resize((160, 160)).save(tmp_path / f"copy{i}.jpg", quality=80)
        copies.append(replace(examples[i], images=(str(tmp_path / f"copy{i}.jpg"),)))
    write_examples([*examples, *copies], tmp_path / "mine.jsonl", tmp_path)
    after = samples.load_splits(tmp_path / "mine.jsonl", progress=False)
    side = {example.images[0]: name for name, part in after.parts.items() for example in part}
    assert len(side) == 80
    for name, part in before.parts.items():
        assert all(side[example.images[0]] == name for example in part)
    assert all(side[str(tmp_path / f"copy{i}.jpg")] == side[str(tmp_path / f"{i}.png")] for i in range(0, 40, 2))


def test_nothing_to_open(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"no example for train, validation, test \(0 found, 0 rejected\)"):
        samples.load_splits(tmp_path / "empty.jsonl")
    with pytest.raises(FileNotFoundError):
        samples.load_splits(tmp_path / "missing.jsonl")
    with pytest.raises(FileNotFoundError, match="train.jsonl"):
        samples.load_splits(tmp_path)


def test_two_classes():
    answers = [("cell: mono, grade: 1", "cell: mono, grade: 2/3"), ("cell: mono, grade: 0", "cell: poly, grade: 1")]
    answers += [("cell: poly, grade: 1/3", "nothing"), ("cell: poly, grade: 0", "cell: poly, grade: 1/3")]
    assert two_class_accuracy(answers) == {"two_class_accuracy": 0.5, "majority_class": 0.75}


def fake_elpv(folder):
    """ELPV's layout with 160 cells."""
    (folder / "data" / "images").mkdir(parents=True)
    lines = []
    for i in range(160):
        Image.new("L", (30, 30), i).save(folder / "data" / "images" / f"cell{i:04d}.png")
        lines.append(f"images/cell{i:04d}.png  {(i % 4) / 3}  {'mono' if i % 8 < 4 else 'poly'}")
    (folder / "data" / "labels.csv").write_text("\n".join(lines) + "\n")
    return SimpleNamespace(origin=str(folder / "__init__.py"))


def test_cells_are_split_by_type_and_grade(tmp_path, monkeypatch):
    spec = fake_elpv(tmp_path / "package")
    monkeypatch.setattr(samples.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(samples, "DATA", tmp_path)
    splits = samples.load_splits("elpv")
    assert repr(splits) == "Splits(elpv: 108 train, 12 validation, 40 test; 0 rejected)"
    for name, each in (("train", 13.5), ("test", 5)):
        counts = Counter(example.answer for example in splits.parts[name])
        assert len(counts) == 8 and all(abs(count - each) < 1 for count in counts.values())
    assert splits.metric is two_class_accuracy and not (tmp_path / "elpv" / "cells").is_file()
    pictures = [example.images for part in splits.parts.values() for example in part]
    assert len(set(pictures)) == 160


def test_cells_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(samples.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -c constraints.txt -e .\[elpv\]"):
        samples.make_elpv(tmp_path / "elpv")


@pytest.mark.slow
def test_the_real_cells(tmp_path):
    """Needs the extra, which make test-long installs."""
    folder = samples.make_elpv(tmp_path / "elpv")
    counts = {path.stem: len(path.read_text().splitlines()) for path in folder.glob("*.jsonl")}
    assert counts == {"train": 1771, "validation": 197, "test": 656}
    answers = [json.loads(line)["conversations"][1]["value"] for line in (folder / "test.jsonl").read_text().splitlines()]
    measures = two_class_accuracy([(answer, "cell: mono, grade: 0") for answer in answers])
    assert measures["two_class_accuracy"] == measures["majority_class"] == pytest.approx(0.687, abs=2e-3)
