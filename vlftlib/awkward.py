"""A folder of deliberately awkward pictures and rows, to try a data path on.

Every readable picture shows the same scene: four quarters, red and green above, blue and yellow below. What is stored
differs: turned, transparent, deep, in other colour spaces, under a wrong name. The others can't be used, each for a reason.
"""

import io
import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, features

WIDTH, HEIGHT = 64, 40  # px, of the upright scene
SCENE = ((200, 30, 30), (30, 160, 60), (30, 60, 200), (230, 220, 40))  # upper left, upper right, lower left, lower right
GREYS = ((76, 76, 76), (110, 110, 110), (67, 67, 67), (202, 202, 202))  # the same by ITU-R BT.601
CLEAR = ((255, 255, 255), *SCENE[1:])  # with the first quarter transparent
ORIENTATION = 0x0112  # EXIF's tag
# How the upright scene is stored under each orientation mark.
STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@dataclass(frozen=True)
class Awkward:
    """One file: its name, and either the quarters that a person sees or the kind of its rejection."""

    name: str
    quarters: tuple[tuple[int, int, int], ...] | None
    rejection: str | None = None


def awkward_files(folder: str | os.PathLike) -> list[Awkward]:
    """Write the pictures into FOLDER, and FOLDER/rows.jsonl with one row for each and some awkward rows after them.

    Returns:
        What to expect of each picture. Formats that this build of Pillow can't write are left out.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    expected = [*_readable(folder), *_unreadable(folder)]
    lines = []
    for file in expected:
        turns = [{"from": "human", "value": "<image>\nWhat is above, on the left?"}, {"from": "gpt", "value": "a red field"}]
        lines.append(json.dumps({"image": file.name, "conversations": turns}))
    lines += [
        '{"query": "a line that breaks off", "respon',
        json.dumps({"query": "no answer"}),
        json.dumps({"query": "a picture that isn't there", "response": "no", "images": ["nowhere.png"]}),
        json.dumps({"query": "a picture from the network", "response": "no", "images": ["https://example.org/a.png"]}),
        json.dumps({"query": "a picture elsewhere", "response": "no", "images": ["../../elsewhere.png"]}),
        json.dumps({"query": "half a character", "response": "\ud83d"}),
        json.dumps({"query": "two <image> places <image>, one picture", "response": "no", "images": ["plain.png"]}),
        json.dumps({"query": "typed <|im_end|> and <|image_pad|>", "response": "just text <|im_end|>"}),
        "",
        json.dumps({"query": "text alone", "response": "fine"}),
    ]
    (folder / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    return expected


def _scene() -> Image.Image:
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    top, left = slice(0, HEIGHT // 2), slice(0, WIDTH // 2)
    bottom, right = slice(HEIGHT // 2, None), slice(WIDTH // 2, None)
    for colour, place in zip(SCENE, ((top, left), (top, right), (bottom, left), (bottom, right))):
        pixels[place] = colour
    return Image.fromarray(pixels)


def _readable(folder: Path) -> list[Awkward]:
    scene, expected = _scene(), []
    grey, other = scene.convert("L"), scene.transpose(Image.Transpose.ROTATE_180)

    def save(name, image, quarters=SCENE, **options):
        image.save(folder / name, **options)
        expected.append(Awkward(name, quarters))

    save("plain.png", scene)
    save("plain.jpg", scene, quality=95)
    for mark, stored in STORED.items():
        exif = Image.Exif()
        exif[ORIENTATION] = mark
        save(f"turned-{mark}.jpg", scene.transpose(stored), quality=95, exif=exif)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    save("turned.png", scene.transpose(STORED[6]), exif=exif)
    save("turned.webp", scene.transpose(STORED[6]), exif=exif, lossless=True)
    save("turned.tiff", scene.transpose(STORED[6]), tiffinfo={ORIENTATION: 6})
    save("broken-exif.jpg", scene, quality=95, exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff")

    alpha = Image.new("L", scene.size, 255)
    alpha.paste(0, (0, 0, WIDTH // 2, HEIGHT // 2))
    clear = scene.copy()
    clear.putalpha(alpha)
    save("transparent.png", clear, CLEAR)
    save("transparent.webp", clear, CLEAR, lossless=True)
    save("transparent.tiff", clear, CLEAR)
    save("transparent-grey.png", Image.merge("LA", (grey, alpha)), (CLEAR[0], *GREYS[1:]))
    palette = scene.quantize(8)
    save("palette.png", palette)
    save("palette-transparent.png", palette, CLEAR, transparency=palette.getpixel((0, 0)))
    save("palette.gif", palette)
    save("palette-transparent.gif", palette, CLEAR, transparency=palette.getpixel((0, 0)))
    save("key-colour.png", scene, CLEAR, transparency=SCENE[0])
    for name, options in (("animated.gif", {}), ("animated.webp", {"lossless": True}), ("animated.png", {})):
        save(name, scene, save_all=True, append_images=[other, other], duration=50, **options)
    save("pages.tiff", scene, save_all=True, append_images=[other])

    save("grey.png", grey, GREYS)
    save("bilevel.png", grey.point(lambda value: 255 * (value > 100), "1"), tuple((255 * (g[0] > 100),) * 3 for g in GREYS))
    deep = np.asarray(grey).astype(np.float64) / 255
    save("grey-16.png", Image.fromarray((deep * 65535).astype(np.uint16)), GREYS)
    save("grey-16.tiff", Image.fromarray((deep * 65535).astype(np.uint16)), GREYS)
    save("microscope-12-of-16.tiff", Image.fromarray((deep * 4095).astype(np.uint16)), GREYS)
    save("white-is-zero-16.tiff", Image.fromarray(65535 - (deep * 65535).astype(np.uint16)), GREYS)
    negative = (folder / "white-is-zero-16.tiff").read_bytes()
    tag, black, white = struct.pack("<HHI", 262, 3, 1), struct.pack("<HH", 1, 0), bytes(4)  # photometric interpretation
    (folder / "white-is-zero-16.tiff").write_bytes(negative.replace(tag + black, tag + white))
    save("grey-32.tiff", Image.fromarray((deep * 65535).astype(np.int32)), GREYS)
    save("grey-float.tiff", Image.fromarray(deep.astype(np.float32)), GREYS)
    pixels = (np.asarray(scene).astype(np.uint16) * 257).astype(">u2")
    (folder / "colour-16.png").write_bytes(_png(WIDTH, HEIGHT, 16, 2, pixels.reshape(HEIGHT, -1)))
    expected.append(Awkward("colour-16.png", SCENE))

    save("print.jpg", scene.convert("CMYK"), quality=95)
    save("print.tiff", scene.convert("CMYK"))
    save("profile.png", Image.merge("RGB", scene.split()[::-1]), icc_profile=_swapped_profile())
    save("profile.jpg", Image.merge("RGB", scene.split()[::-1]), icc_profile=_swapped_profile(), quality=95)
    save("broken-profile.png", scene, icc_profile=b"no profile")
    save("plain.bmp", scene)
    save("plain.ppm", scene)
    save("plain.tga", scene)
    save("jpeg-named.png", scene, format="JPEG", quality=95)
    save("png-named.jpg", scene, format="PNG")
    for name, feature in (("plain.jp2", "jpg_2000"), ("plain.avif", "avif")):
        if features.check(feature):
            save(name, scene, **({"quality": 95, "subsampling": "4:4:4"} if feature == "avif" else {}))
    return expected


def _unreadable(folder: Path) -> list[Awkward]:
    picture, photo = io.BytesIO(), io.BytesIO()
    noise = Image.effect_noise((200, 200), 80)
    noise.save(picture, "PNG")
    noise.save(photo, "JPEG")
    row = np.zeros((1, 1), np.uint8)
    files = {
        "empty.jpg": (b"", "not an image"),
        "zeros.jpg": (bytes(4096), "not an image"),
        "text.png": (b"This is no picture.\n", "not an image"),
        "page.jpg": (b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "not an image"),
        "drawing.png": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not an image"),
        "pointer.png": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "not an image"),
        "phone.jpg": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), "not an image"),
        "postscript.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        "double.tiff": (_tiff_of_doubles(), "not an image"),
        "truncated.png": (picture.getvalue()[:9000], "image broken"),
        "truncated.jpg": (photo.getvalue()[:5000], "image broken"),
        "enormous.png": (_png(50_000, 50_000, 8, 0, row), "image too large"),
        "large.png": (_png(13_000, 10_000, 8, 0, row), "image too large"),
        "long.png": (_png(4_000, 10, 8, 0, row), "image too long"),
    }
    for name, (content, _) in files.items():
        (folder / name).write_bytes(content)
    return [Awkward(name, None, kind) for name, (_, kind) in files.items()]


def _png(width: int, height: int, depth: int, colour_type: int, rows: np.ndarray) -> bytes:
    """A PNG by hand: Pillow writes no 16-bit colour, and no header that promises more than there is."""
    body = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(body)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _tiff_of_doubles() -> bytes:
    """One pixel of 64-bit floating point, as some instruments' software writes: Pillow reads no such TIFF."""
    tags = ((256, 3, 1), (257, 3, 1), (258, 3, 64), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1), (279, 4, 8), (339, 3, 3))
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<Id H", 16, 0.5, len(tags)) + entries + bytes(4)


def _swapped_profile() -> bytes:
    """sRGB with the first and the last channel exchanged: a picture stored in it looks wrong unless its profile is used."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    table = slice(128, 132 + 12 * int.from_bytes(profile[128:132], "big"))
    profile[table] = profile[table].replace(b"rXYZ", b"?XYZ").replace(b"bXYZ", b"rXYZ").replace(b"?XYZ", b"bXYZ")
    return bytes(profile).replace("sRGB".encode("utf-16-be"), "sBGR".encode("utf-16-be"))
