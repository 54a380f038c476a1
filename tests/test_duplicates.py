import io
import random
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter
from sklearn.datasets import load_sample_image

from vlftlib.copies import REFUSALS, Scan, group_copies, same_picture, scan_picture, scan_pictures
from vlftlib.duplicates import drop_repeated, find_duplicates, find_leaks, split_examples
from vlftlib.forms import Example
from vlftlib.images import load_image
from vlftlib.samples import draw_product, random_product, shop_floor

RESAVED = ("jpeg 75", "jpeg 40", "webp 60", "half", "double", "six tenths", "palette")


def resave(image, how):
    width, height = image.size
    if how in ("half", "double", "six tenths"):
        scale = {"half": 0.5, "double": 2, "six tenths": 0.6}[how]
        return image.resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)
    if how == "palette":
        return image.quantize(256).convert("RGB")
    name, quality = how.split()
    buffer = io.BytesIO()
    image.save(buffer, name.upper(), quality=int(quality))
    return Image.open(buffer).convert("RGB")


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """80 different products as the shop floor sees them."""
    folder, rng = tmp_path_factory.mktemp("products"), random.Random(3)
    paths = []
    for number in range(80):
        path = folder / f"{number}.png"
        shop_floor(draw_product(random_product(rng), rng), rng).save(path)
        paths.append(str(path))
    return paths


def row(image, question="What?", answer="this", line=1):
    images = (image,) if isinstance(image, str) else tuple(image)
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": question}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
    return Example(images, turns, "rows", line)


@pytest.fixture(scope="module")
def with_copies(products, tmp_path_factory):
    """The products and a copy in every way of resaving of the first two."""
    folder, copies = tmp_path_factory.mktemp("copies"), {}
    for number in (0, 1):
        for how in RESAVED:
            path = str(folder / f"{number} {how}.png")
            resave(load_image(products[number]), how).save(path)
            copies[path] = number
    return copies


def test_copies_are_found_and_products_are_told_apart(products, with_copies):
    duplicates = find_duplicates([row(path) for path in [*products, *with_copies]], processes=1, progress=False)
    expected = [{products[n], *(path for path, of in with_copies.items() if of == n)} for n in (0, 1)]
    assert [set(group) for group in duplicates.groups()] == expected


@pytest.mark.slow
def test_elpv_has_no_copies_and_all_resaved_ones_are_found(tmp_path):
    from pathlib import Path

    elpv_dataset = pytest.importorskip("elpv_dataset")
    cells = [str(path) for path in sorted((Path(elpv_dataset.__file__).parent / "data").rglob("*.png"))]
    assert len(cells) == 2624
    copies = {}
    for number, path in enumerate(random.Random(0).sample(cells, 21)):
        copy = str(tmp_path / f"{number}.png")
        resave(load_image(path), RESAVED[number % len(RESAVED)]).save(copy)
        copies[copy] = path
    duplicates = find_duplicates([row(path) for path in [*cells, *copies]], progress=False)
    assert sorted(map(sorted, duplicates.groups())) == sorted(sorted(pair) for pair in copies.items())


def photograph_tiles():
    """24 places of two photographs, of 160 x 142 px: nothing that the tolerances were fitted on."""
    for name in ("china.jpg", "flower.jpg"):
        photograph = Image.fromarray(load_sample_image(name))
        for left, top in ((i * 160, j * 142) for i in range(4) for j in range(3)):
            yield photograph.crop((left, top, left + 160, top + 142))


def drawn_cells(count):
    """Bright discs under a microscope's blur and noise."""
    rng = np.random.default_rng(21)
    for _ in range(count):
        image = Image.new("L", (300, 220), 25)
        for x, y, r in rng.integers((0, 0, 4), (300, 220, 18), (50, 3)).tolist():
            ImageDraw.Draw(image).ellipse([x - r, y - r, x + r, y + r], fill=60 + 8 * r)
        pixels = np.asarray(image.filter(ImageFilter.GaussianBlur(2)), float) + rng.normal(0, 6, (220, 300))
        yield Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert("RGB")


@pytest.mark.parametrize("kind", ["photographs", "cells"])
def test_pictures_of_another_kind(kind, tmp_path):
    """All pictures are told apart, and of their copies at most one in 30 is missed."""
    pictures = list(photograph_tiles()) if kind == "photographs" else list(drawn_cells(20))
    paths, expected = [], {}
    for number, picture in enumerate(pictures):
        for how in ("", *RESAVED[number % 2 :: 2]):
            paths.append(str(tmp_path / f"{number} {how}.png"))
            (resave(picture, how) if how else picture).save(paths[-1])
            expected[paths[-1]] = number
    groups = find_duplicates([row(path) for path in paths], processes=1, progress=False).pictures
    of = defaultdict(set)
    for path, number in expected.items():
        of[groups[path]].add(number)
    assert all(len(numbers) == 1 for numbers in of.values())  # no group of different pictures
    missed = len(of) - len(pictures)
    assert missed <= (len(paths) - len(pictures)) / 30, (missed, len(paths) - len(pictures))


@pytest.mark.parametrize("how", RESAVED)
def test_resaved_pictures_are_the_same(products, how):
    for path in products[:15]:
        image = load_image(path)
        assert same_picture(image, resave(image, how)) and same_picture(resave(image, how), image)


def test_small_changes_that_matter_are_no_copies(products):
    image = load_image(products[0])
    changed = image.copy()
    changed.paste((250, 250, 250), (100, 100, 130, 130))
    assert not same_picture(image, changed)
    assert not same_picture(image, image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    assert not same_picture(image, image.crop((0, 0, 224, 150)))
    assert not same_picture(image, Image.merge("RGB", image.split()[::-1]))


def test_repeated_rows_and_conflicts(products, with_copies):
    a, copy, b = products[0], next(path for path, of in with_copies.items() if of == 0), products[1]
    rows = [
        row(a, line=1),
        row(copy, line=2),  # repeats 1
        row(a, answer="that", line=3),  # contradicts 1 and 2
        row(b, line=4),
        row(a, question="Other?", answer="that", line=5),  # another question: neither
        row((a, b), line=6),
        row((b, a), line=7),  # another order: neither
        row((), question="2 + 2?", answer="4", line=8),
        row((), question="2 + 2?", answer="4", line=9),  # repeats 8
    ]
    duplicates = find_duplicates(rows, processes=1, progress=False)
    assert duplicates.repeated == [(0, 1), (7, 8)] and duplicates.conflicts == [(0, 1, 2)]
    kept, dropped = drop_repeated(rows, duplicates)
    assert [r.line for r in kept] == [1, 3, 4, 5, 6, 7, 8]
    assert [str(r) for r in dropped] == ["rows:2: repeats a row: rows:1", "rows:9: repeats a row: rows:8"]


def test_leaks_across_parts(products, with_copies):
    copy = next(path for path, of in with_copies.items() if of == 1)
    parts = {"train": [row(products[0]), row(products[1])], "test": [row(copy, line=5), row(products[2])]}
    duplicates = find_duplicates([r for part in parts.values() for r in part], processes=1, progress=False)
    (leak,) = find_leaks(parts, duplicates)
    assert leak == {"train": [parts["train"][1]], "test": [parts["test"][0]]}


def test_unusable_pictures_stand_alone(products, tmp_path):
    broken = [str(tmp_path / name) for name in "ab"]
    for path in broken:
        open(path, "wb").close()
    scan = scan_picture(broken[0])
    assert scan.error[0] == "not an image"
    assert not find_duplicates([row(path) for path in broken], processes=1, progress=False).groups()


def test_scanning_in_processes_gives_the_same(products, monkeypatch):
    monkeypatch.setattr("vlftlib.copies.FEW", 1)
    alone, spread = scan_pictures(products[:3], 1, progress=False), scan_pictures(products[:3], 2, progress=False)
    assert {k: replace(v, seconds=0) for k, v in alone.items()} == {k: replace(v, seconds=0) for k, v in spread.items()}


def test_a_script_without_a_guard_is_told_so(products, tmp_path):
    script = f"""
from vlftlib import copies
copies.FEW = 1
copies.scan_pictures({products[:2]!r}, 2, progress=False)
"""
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "if __name__ == '__main__':` was started again" in done.stderr.splitlines()[-1]


def fingerprints(count, seed=0):
    rng = np.random.default_rng(seed)
    return [Scan((9, 9), 0, b"", rng.bytes(16), bytes(rng.integers(0, 256, 576, np.uint8))) for _ in range(count)]


def test_search_among_many():
    """Of 3,000 random fingerprints, exactly those that were put in twice are compared."""
    scans, compared = fingerprints(3000), []
    flipped = bytearray(scans[7].bits)
    flipped[0] ^= 0b111
    scans.append(replace(scans[7], bits=bytes(flipped)))
    scans.append(replace(scans[8], cells=bytes(576)))  # the same hash, other pixels
    groups, cut = group_copies(scans, lambda i, j: not compared.append((i, j)), block=500)
    assert compared == [(7, 3000)] and cut == 0
    assert np.flatnonzero(groups != np.arange(3002)).tolist() == [3000] and groups[3000] == 7


def alike(count):
    rng = np.random.default_rng(0)
    base = rng.integers(40, 200, 576)
    return [Scan((9, 9), 0, b"", bytes(16), bytes((base + rng.integers(-2, 3, 576)).astype(np.uint8))) for _ in range(count)]


def test_ten_thousand_copies_take_a_comparison_each():
    compared = []
    groups, cut = group_copies(alike(10_000), lambda i, j: not compared.append(i))
    assert len(compared) == 9_999 and not groups.any() and cut == 0


def test_many_that_only_look_alike_are_compared_with_their_nearest():
    """Two million pairs are close; the one copy among them is found, since it is nearest."""
    scans, compared = alike(2_000), Counter()
    scans[1500] = scans[700]
    groups, cut = group_copies(scans, lambda i, j: not compared.update([i]) and (i, j) == (700, 1500))
    assert np.flatnonzero(groups != np.arange(2_000)).tolist() == [1500] and groups[1500] == 700
    assert max(compared.values()) == REFUSALS + 1 and cut == 2_000 - REFUSALS - 1


# Splits


def many(count, start=0):
    return [row(f"/data/{i}.png", answer=f"kind: {i % 3}", line=i) for i in range(start, start + count)]


def test_split_is_reproducible_and_moves_with_no_folder():
    rows = many(400)
    first, second = split_examples(rows, 0.75)
    assert len(first) + len(second) == 400 and 270 < len(first) < 330
    assert split_examples(rows, 0.75) == (first, second)
    moved = [replace(r, images=(r.images[0].replace("/data/", "/elsewhere/"),)) for r in rows]
    assert [r.line for r in split_examples(moved, 0.75)[0]] == [r.line for r in first]
    assert split_examples(rows, 0.75, seed=1)[0] != first


def test_added_rows_move_none():
    first, second = split_examples(many(300))
    more, rest = split_examples(many(400))
    assert more[: len(first)] == first and rest[: len(second)] == second


def test_rows_of_one_picture_stay_together():
    rows = [row(f"/data/{i % 50}.png", question=f"{i}?", line=i) for i in range(200)]
    first, second = split_examples(rows)
    assert not {r.images for r in first} & {r.images for r in second} and first and second


def test_copies_stay_together(products, with_copies):
    rows = [row(path) for path in [*products, *with_copies]]
    duplicates = find_duplicates(rows, processes=1, progress=False)
    for seed in range(5):
        first, second = split_examples(rows, 0.5, seed=seed, duplicates=duplicates)
        assert not find_leaks({"first": first, "second": second}, duplicates)


def test_stratified_split_keeps_shares():
    first, second = split_examples(many(400), 0.75, stratify=lambda r: r.answer)
    for kind, count in (("kind: 0", 134), ("kind: 1", 133), ("kind: 2", 133)):
        assert sum(r.answer == kind for r in first) == round(0.75 * count)
    assert len(second) == 400 - len(first)


def test_share_is_checked():
    with pytest.raises(ValueError, match="between 0 and 1"):
        split_examples(many(4), 75)
