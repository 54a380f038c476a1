"""Pictures of any make as the upright 8-bit RGB picture that a person would see.

Training and evaluation both load pictures here. Only formats that Pillow decodes by itself are opened (EPS would start a
program). The file's content decides, not its name's ending.

Greys deeper than 8 bits are scaled from the depth they use: a camera's 12-bit values in a 16-bit file would otherwise be
nearly black. A broken colour profile or orientation mark is passed over, as viewers do.
"""

import base64
import functools
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "AVIF", "JPEG2000", "PPM", "TGA", "ICO", "PCX", "DIB", "PSD")
MAX_PIXELS = 128_000_000  # a phone's 108 megapixels pass; decoding needs up to 10 bytes a pixel at its peak
MAX_ASPECT = 200  # Qwen2.5-VL's own limit
PHOTOMETRIC, WHITE_IS_ZERO = 262, 0  # TIFF 6.0, p. 37
SRGB = ImageCms.createProfile("sRGB")


class ImageError(ValueError):
    """A picture that can't be used: `kind` (to count by) and `detail`."""

    def __init__(self, kind: str, detail: str):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


@contextmanager
def open_image(source: str | os.PathLike) -> Iterator[Image.Image]:
    """Open a picture, reading no more than its header, for as long as the `with` block lasts.

    Args:
        source: a path, or a `data:` address with base64 content.

    Raises:
        ImageError: missing, empty, no picture, too large (above 128 megapixels) or too long (above 200 to 1).
    """
    source = os.fspath(source)
    embedded = source.startswith("data:")
    name = source[:40] if embedded else source
    try:
        stream = io.BytesIO(base64.b64decode(source.partition(",")[2])) if embedded else open(source, "rb")
    except OSError as error:
        raise ImageError("image not found", f"{name}: {error.strerror}") from None
    with stream:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns of sizes that are judged below, and of harmless marks
                image = Image.open(stream, formats=_formats())
        except Image.DecompressionBombError as error:
            raise ImageError("image too large", f"{name}: {error}") from None
        except Exception as error:  # broken files raise anything, from OSError to struct.error
            reason = _what_it_is(stream) or ("no known kind of picture" if isinstance(error, UnidentifiedImageError) else error)
            raise ImageError("not an image", f"{name}: {reason}") from None
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ImageError("image too large", f"{name}: {width} x {height}, above {MAX_PIXELS:,} pixels")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise ImageError("image too long", f"{name}: {width} x {height}, above {MAX_ASPECT} to 1")
        yield image


def image_size(source: str | os.PathLike) -> tuple[int, int]:
    """(width, height) in px of the picture as stored, from the header alone; a turned one counts the same tokens.

    Raises:
        ImageError: as `open_image`.
    """
    with open_image(source) as image:
        return image.size


def upright_size(source: str | os.PathLike) -> tuple[int, int]:
    """(width, height) in px of the picture as `load_image` gives it; some formats are read whole for it.

    Raises:
        ImageError: as `open_image`.
    """
    with open_image(source) as image:
        width, height = image.size
        orientation = 1
        with suppress(Exception):  # as in `_turn_upright`
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def load_image(source: str | os.PathLike) -> Image.Image:
    """A picture as a person would see it: upright, RGB, 8 bits a channel, transparency on white, the first frame.

    Args:
        source: a path, or a `data:` address with base64 content.

    Raises:
        ImageError: as `open_image`; or its content is cut off or broken.
    """
    with open_image(source) as image:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                image.load()
                _turn_upright(image)
                picture = _to_rgb(image)
                picture.info.clear()  # nothing of the file's marks may be applied twice
                return picture
        except Exception as error:  # as above
            raise ImageError("image broken", f"{os.fspath(source)[:200]}: {error}") from None


@functools.cache
def _formats() -> tuple[str, ...]:
    """Those of FORMATS that this build of Pillow has; JPEG includes phones' MPO."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _what_it_is(stream: io.BufferedIOBase) -> str:
    stream.seek(0)
    head = stream.read(512)
    if not head:
        return "the file is empty"
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"hevc", b"mif1", b"msf1"):
        return "HEIC is not read: export it as JPEG"
    if not any(head):
        return "the file holds zeros only"
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "a TIFF of a kind that is not read, or broken: export it with 8 or 16 bits and 1, 3 or 4 channels"
    if head[:8] == b"\x89PNG\r\n\x1a\n" or head[:3] == b"\xff\xd8\xff":
        return "its header is broken"
    text = head.lstrip().lower()
    for start, kind in (
        (b"<!doctype html", "a web page"),
        (b"<html", "a web page"),
        (b"<svg", "an SVG drawing: export it as PNG"),
        (b"<?xml", "XML or an SVG drawing: export it as PNG"),
        (b"%pdf", "a PDF: export its page as PNG"),
        (b"%!ps", "PostScript: export it as PNG"),
        (b"version https://git-lfs", "a Git LFS pointer: run git lfs pull"),
        (b"pk\x03\x04", "a ZIP archive"),
    ):
        if text.startswith(start):
            return f"it is {kind}"
    return ""


def _turn_upright(image: Image.Image) -> None:
    with suppress(Exception):  # a broken mark says nothing about the picture
        ImageOps.exif_transpose(image, in_place=True)


def _to_rgb(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    if image.mode in ("1", "I", "F") or image.mode.startswith("I;"):
        grey = _scale_grey(image)
        # Pillow turns 8-bit greys that count from white the right way, deeper ones not.
        counts_from_white = image.mode != "1" and getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == WHITE_IS_ZERO
        return (ImageOps.invert(grey) if counts_from_white else grey).convert("RGB")
    alpha = None
    if image.has_transparency_data:
        alpha = image.convert("RGBA").getchannel("A")
        image = image.convert("L" if image.mode in ("L", "LA", "La") else "RGB")
    elif image.mode == "P":
        image = image.convert("RGB")
    image = _apply_profile(image, profile)
    if alpha is not None:
        paper = Image.new("RGB", image.size, "white")
        paper.paste(image, mask=alpha)
        image = paper
    return image


def _scale_grey(image: Image.Image) -> Image.Image:
    if image.mode == "1":
        return image.convert("L")
    values = np.asarray(image)
    if values.dtype.kind == "f":
        values = np.nan_to_num(values, posinf=0, neginf=0)
        low, high = float(values.min()), float(values.max())
        if 0 <= low and high <= 255:
            low, high = 0, 1 if high <= 1 else 255  # a share of white, or 8-bit values
    else:
        low, high = min(0, int(values.min())), int(values.max())
        bits = max(8, high.bit_length() + high.bit_length() % 2)
        high = 2**bits - 1 if low == 0 else high
    scaled = (values.astype(np.float32) - low) * (255 / max(high - low, 1e-30))
    return Image.fromarray(np.clip(scaled + 0.5, 0, 255).astype(np.uint8))


def _apply_profile(image: Image.Image, profile: bytes | None) -> Image.Image:
    """RGB in the sRGB colour space."""
    if profile and image.mode in ("L", "RGB", "CMYK", "LAB"):
        try:
            embedded = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if "sRGB" not in (ImageCms.getProfileDescription(embedded) or ""):
                return ImageCms.profileToProfile(image, embedded, SRGB, outputMode="RGB")
        except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
            pass  # a profile that doesn't fit its picture: viewers show the plain values
    return image.convert("RGB")
