import base64
import warnings

import numpy as np
import pytest
from PIL import Image

from vlftlib.awkward import HEIGHT, WIDTH, awkward_files
from vlftlib.dataset import load_examples
from vlftlib.images import MAX_PIXELS, ImageError, image_size, load_image


@pytest.fixture(scope="module")
def awkward(tmp_path_factory):
    folder = tmp_path_factory.mktemp("awkward")
    return folder, awkward_files(folder)


def test_every_readable_picture_shows_the_scene(awkward):
    folder, files = awkward
    readable = [file for file in files if file.quarters]
    assert len(readable) >= 40
    wrong = {}
    for file in readable:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            image = load_image(folder / file.name)
        assert (image.mode, image.size, image.info) == ("RGB", (WIDTH, HEIGHT), {}), file.name
        seen = [image.getpixel((x, y)) for y in (HEIGHT // 4, HEIGHT * 3 // 4) for x in (WIDTH // 4, WIDTH * 3 // 4)]
        if np.abs(np.subtract(seen, file.quarters)).max() > 6:  # JPEG and AVIF are lossy
            wrong[file.name] = seen
    assert not wrong


def test_every_unusable_picture_says_why(awkward):
    folder, files = awkward
    said = {}
    for file in files:
        if file.rejection:
            with pytest.raises(ImageError) as error:
                load_image(folder / file.name)
            assert error.value.kind == file.rejection and file.name in str(error.value)
            said[file.name] = error.value.detail
    for name, part in {
        "empty.jpg": "the file is empty",
        "zeros.jpg": "zeros only",
        "page.jpg": "a web page",
        "drawing.png": "an SVG drawing: export it as PNG",
        "phone.jpg": "HEIC is not read",
        "pointer.png": "git lfs pull",
        "truncated.jpg": "truncated",
        "double.tiff": "a TIFF of a kind that is not read",
        "text.png": "no known kind of picture",
        "large.png": "13000 x 10000",
        "long.png": "4000 x 10, above 200 to 1",
    }.items():
        assert part in said[name]


def test_awkward_rows(awkward):
    folder, files = awkward
    loaded = load_examples(folder / "rows.jsonl")
    assert len(loaded.examples) == len(files) + 2
    assert [rejection.kind for rejection in loaded.rejected] == [
        "not JSON",
        "unknown form",
        "image not found",
        "network address",
        "image outside the root",
        "text can't be encoded",
        "images and <image> tags differ",
    ]


def test_header_tells_the_size_without_decoding(awkward):
    folder, files = awkward
    for file in files:
        if file.quarters:
            assert sorted(image_size(folder / file.name)) == [HEIGHT, WIDTH]
    assert image_size(folder / "truncated.jpg") == (200, 200)


def test_limits_are_inclusive(tmp_path):
    Image.new("1", (16_000, 8_000)).save(tmp_path / "largest.png")
    Image.new("1", (2_000, 10)).save(tmp_path / "longest.png")
    assert np.prod(image_size(tmp_path / "largest.png")) == MAX_PIXELS
    assert load_image(tmp_path / "longest.png").size == (2_000, 10)


def test_data_address(awkward):
    folder, _ = awkward
    content = base64.b64encode((folder / "plain.png").read_bytes()).decode()
    assert load_image(f"data:image/png;base64,{content}").tobytes() == load_image(folder / "plain.png").tobytes()


def test_missing_picture(tmp_path):
    with pytest.raises(ImageError, match="image not found: .*none.png: No such file"):
        load_image(tmp_path / "none.png")
    with pytest.raises(ImageError, match="image not found"):
        load_image(tmp_path)


@pytest.mark.parametrize(
    "values, expected",
    [
        (np.array([[0, 255]], np.uint16), [0, 255]),  # 8-bit values in a deeper file
        (np.array([[0, 256]], np.uint16), [0, 64]),  # 10 bits
        (np.array([[0, 65535]], np.uint16), [0, 255]),
        (np.array([[-1000, 1000]], np.int32), [0, 255]),
        (np.array([[0, 0.5]], np.float32), [0, 128]),
        (np.array([[0, 128]], np.float32), [0, 128]),
        (np.array([[0, np.nan]], np.float32), [0, 0]),
        (np.array([[-3, 5]], np.float32), [0, 255]),
        (np.array([[0, 0]], np.uint16), [0, 0]),
    ],
)
def test_grey_depths(tmp_path, values, expected):
    Image.fromarray(values).save(tmp_path / "grey.tiff")
    assert np.asarray(load_image(tmp_path / "grey.tiff"))[0].tolist() == [[value] * 3 for value in expected]
