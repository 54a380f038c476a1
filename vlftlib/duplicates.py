"""Pictures that are copies of each other, rows that repeat or contradict each other, and splits that keep them together.

A perceptual hash proposes pairs: 64 bits each of imagehash's pHash and dHash. By itself it proposes mostly nonsense where
pictures are alike (2,600 product pictures: about 2,000 pairs, all of different products). So a comparison of pixels
confirms: both pictures at the smaller one's size, averaged over cells of about 10 px, and no block of 3 x 3 cells may
differ by more than a tolerance, which is wider where the picture itself is noisy or busy. Two pages that differ in letters
smaller than a cell still count as copies: hence rows are dropped only where their answers agree, too. Drawings of a few
flat areas give unsteady hashes: their lossy copies can be missed.
"""

import functools
import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import imagehash
import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from vlftlib.forms import Example, Rejection
from vlftlib.images import ImageError, load_image

HASH_DISTANCE = 18  # bits of 128; copies of a third of the size at JPEG quality 60 reach 16
CELLS = 24  # of a fingerprint's side
LOOSE = 6.0  # grey levels, for fingerprints; confirmation is stricter
# Grey levels that a block may differ by: a part, and a share of the noisier picture's mean step between neighbouring
# pixels, since what recompressing and resizing take away grows with it. Neighbouring cells of ELPV's modules come closest.
STEADY, NOISY = 0.55, 0.24
FEW = 400  # pictures that aren't worth starting processes for


@dataclass(frozen=True, slots=True)
class Scan:
    """What one decoding of a picture tells: size in px, time, and what to find copies by; or why it can't be used."""

    size: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    digest: bytes = b""  # of the file's bytes
    bits: bytes = b""  # 128 bits, pHash and dHash
    cells: bytes = b""  # CELLS x CELLS grey values
    error: tuple[str, str] | None = None  # kind and detail


def scan_pictures(sources: Iterable[str], processes: int | None = None, progress: bool = True) -> dict[str, Scan]:
    """Decode every picture once.

    Args:
        sources: paths or `data:` addresses; each is read once.
        processes: by default one for each core; a few hundred pictures are read in this process.
        progress: show a bar.
    """
    sources = list(dict.fromkeys(sources))
    if processes is None:  # a container may lend fewer cores than the machine has
        processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    bar = functools.partial(tqdm, total=len(sources), desc="reading pictures", unit="image", disable=not progress)
    if processes == 1 or len(sources) < FEW:
        return dict(zip(sources, bar(map(scan_picture, sources))))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        return dict(zip(sources, bar(pool.map(scan_picture, sources, chunksize=32))))


def scan_picture(source: str) -> Scan:
    """Decode one picture and take its fingerprints."""
    began = time.perf_counter()
    try:
        picture = load_image(source)
    except ImageError as error:
        return Scan(error=(error.kind, error.detail), seconds=time.perf_counter() - began)
    # Averaging down first makes the hashes of large pictures cheap, and hardly changes them.
    grey = picture.reduce(max(1, min(picture.size) // 128)).convert("L")
    bits = np.packbits([imagehash.phash(grey).hash, imagehash.dhash(grey).hash]).tobytes()
    cells = grey.resize((CELLS, CELLS), Image.Resampling.BOX).tobytes()
    if source.startswith("data:"):
        content = source.encode()
    else:
        with open(source, "rb") as file:
            content = file.read()
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return Scan(picture.size, time.perf_counter() - began, digest, bits, cells)


def propose_pairs(scans: Sequence[Scan], block: int = 2048) -> np.ndarray:
    """Pairs of indices, (n, 2), whose hashes and fingerprints are close.

    Memory: `block` x len(scans) float32 at a time.
    """
    count = len(scans)
    if count < 2:
        return np.zeros((0, 2), np.int64)
    bits = np.frombuffer(b"".join(scan.bits for scan in scans), np.uint8).reshape(count, -1)
    signs = np.unpackbits(bits, axis=1).astype(np.float32) * 2 - 1  # equal bits minus different ones = a scalar product
    cells = np.frombuffer(b"".join(scan.cells for scan in scans), np.uint8).reshape(count, CELLS, CELLS)
    close = signs.shape[1] - 2 * HASH_DISTANCE
    found = [np.zeros((0, 2), np.int64)]
    for start in range(0, count, block):
        products = signs[start : start + block] @ signs[start:].T
        rows, columns = np.nonzero(products >= close)
        rows, columns = rows[columns > rows] + start, columns[columns > rows] + start
        for part in range(0, len(rows), 4096):
            i, j = rows[part : part + 4096], columns[part : part + 4096]
            keep = _block_difference(cells[i], cells[j]) <= LOOSE
            found.append(np.stack([i[keep], j[keep]], 1))
    return np.concatenate(found)


def same_picture(first: Image.Image, second: Image.Image) -> bool:
    """Whether one picture is a resaved, resized or recompressed copy of the other (both RGB)."""
    ratio = (first.width * second.height) / (first.height * second.width)
    if not 0.95 < ratio < 1.05:
        return False
    size = tuple(min(first.size[k], second.size[k], 1024) for k in (0, 1))
    cells = CELLS * max(1, round(min(size) / 256))
    grids, noise = [], 0.0
    for picture in (first, second):
        if picture.size != size:
            picture = picture.resize(size, Image.Resampling.BICUBIC)
        pixels = np.asarray(picture.convert("L"), np.int16)
        noise = max([noise, *(np.abs(np.diff(pixels, axis=axis)).mean() for axis in (0, 1) if size[1 - axis] > 1)])
        grids.append(np.asarray(picture.resize((cells, cells), Image.Resampling.BOX), np.uint8))
    tolerance = STEADY + NOISY * noise
    weights = np.float32([0.299, 0.587, 0.114])  # luma, ITU-R BT.601
    grey = _block_difference(*((grid @ weights)[None] for grid in grids))[0]
    # Copies may store colour coarsely (JPEG halves it, palettes round it): it only has to agree within five tolerances.
    colour = max(_block_difference(*(grid[None, :, :, k] for grid in grids))[0] for k in range(3))
    return bool(grey <= tolerance and colour <= 5 * tolerance)


def _block_difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The largest difference of a block of 3 x 3 cells: rms, over 1 + a tenth of the block's own standard deviation.

    Args:
        first, second: (n, cells, cells) grey values.

    Returns:
        (n,) in grey levels.
    """
    first, second = first.astype(np.float32), second.astype(np.float32)
    count, side, _ = first.shape
    blocks = (count, side // 3, 3, side // 3, 3)
    first, second = first.reshape(blocks), second.reshape(blocks)
    rms = np.sqrt(((first - second) ** 2).mean((2, 4)))
    contrast = np.maximum(first.std((2, 4)), second.std((2, 4)))
    return (rms / (1 + contrast / 10)).max((1, 2))


@dataclass(frozen=True)
class Duplicates:
    """Pictures in groups of copies; indices of rows with the same pictures and question: of one answer, or of several."""

    pictures: dict[str, int]  # source -> number of its group; a picture without copies has its own
    repeated: list[tuple[int, ...]]
    conflicts: list[tuple[int, ...]]

    def groups(self) -> list[list[str]]:
        """The groups of two and more pictures."""
        members = defaultdict(list)
        for source, group in self.pictures.items():
            members[group].append(source)
        return [group for group in members.values() if len(group) > 1]


def find_duplicates(
    examples: Sequence[Example], scans: Mapping[str, Scan] | None = None, processes: int | None = None, progress: bool = True
) -> Duplicates:
    """Find copies among the examples' pictures, and rows that repeat or contradict each other.

    Args:
        examples: all rows, of all splits.
        scans: from `scan_pictures`, where it has run already; pictures that can't be used stand alone.
    """
    sources = [image for example in examples for image in example.images]
    scans = scan_pictures(sources, processes, progress) if scans is None else scans
    first = {}  # digest -> source: files of the same bytes need no comparison
    sources = list(dict.fromkeys(sources))
    leader = {source: source for source in sources}
    for source in sources:
        if scans[source].error is None:
            leader[source] = first.setdefault(scans[source].digest, source)
    distinct = list(first.values())
    open_picture = functools.lru_cache(maxsize=16)(load_image)
    for i, j in tqdm(propose_pairs([scans[source] for source in distinct]), "comparing pictures", disable=not progress):
        one, other = _find(leader, distinct[i]), _find(leader, distinct[j])
        if one != other and same_picture(open_picture(distinct[i]), open_picture(distinct[j])):
            leader[other] = one
    numbers = {}
    pictures = {source: numbers.setdefault(_find(leader, source), len(numbers)) for source in sources}
    rows = defaultdict(lambda: defaultdict(list))
    for index, example in enumerate(examples):
        question, answer = _question_and_answer(example)
        rows[tuple(pictures[image] for image in example.images), question][answer].append(index)
    repeated = [tuple(same) for answers in rows.values() for same in answers.values() if len(same) > 1]
    conflicts = [tuple(sorted(sum(answers.values(), []))) for answers in rows.values() if len(answers) > 1]
    return Duplicates(pictures, repeated, conflicts)


def drop_repeated(examples: Sequence[Example], duplicates: Duplicates) -> tuple[list[Example], list[Rejection]]:
    """The examples without rows that repeat an earlier one (same picture, question and answer), and those as rejections."""
    later = {index: same[0] for same in duplicates.repeated for index in same[1:]}
    kept = [example for index, example in enumerate(examples) if index not in later]
    dropped = [
        Rejection(examples[i].file, examples[i].line, "repeats a row", f"{examples[first].file}:{examples[first].line}")
        for i, first in later.items()
    ]
    return kept, dropped


def find_leaks(parts: Mapping[str, Sequence[Example]], duplicates: Duplicates) -> list[dict[str, list[Example]]]:
    """Pictures that occur in more than one part, copies included: for each, its rows by part."""
    places = defaultdict(lambda: defaultdict(list))
    for name, examples in parts.items():
        for example in examples:
            for group in {duplicates.pictures[image] for image in example.images}:
                places[group][name].append(example)
    return [{name: list(rows) for name, rows in found.items()} for found in places.values() if len(found) > 1]


def split_examples(
    examples: Sequence[Example],
    share: float = 0.75,
    stratify: Callable[[Example], Hashable] | None = None,
    seed: int = 0,
    duplicates: Duplicates | None = None,
) -> tuple[list[Example], list[Example]]:
    """Split examples in two, reproducibly; rows that share a picture stay together.

    Without `stratify` a row's side hangs on its own pictures' names and text alone (for rows that share a picture, on the
    first one's), so rows added at the end move none, and the first part has about `share` of them. With it, each stratum
    is cut at `share` exactly, and added rows can move those at the cut.

    Args:
        examples: what to split; the order is kept.
        share: of the first part, between 0 and 1.
        stratify: gives each example's stratum, for instance its answer.
        seed: another seed, another split.
        duplicates: from `find_duplicates` of these examples: copies of a picture stay together, too.

    Returns:
        The first and the second part.

    Raises:
        ValueError: `share` is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"share {share}: give a number between 0 and 1")
    clusters = _cluster(examples, duplicates)
    draws = {cluster: _draw(examples[cluster[0]], seed) for cluster in clusters}
    if stratify is None:
        first = {index for cluster in clusters if draws[cluster] < share for index in cluster}
    else:
        strata, first = defaultdict(list), set()
        for cluster in clusters:
            strata[stratify(examples[cluster[0]])].append(cluster)
        for members in strata.values():
            target = round(share * sum(map(len, members)))
            for cluster in sorted(members, key=draws.get):
                if target <= 0:
                    break
                first.update(cluster)
                target -= len(cluster)
    return [e for i, e in enumerate(examples) if i in first], [e for i, e in enumerate(examples) if i not in first]


def _cluster(examples: Sequence[Example], duplicates: Duplicates | None) -> list[tuple[int, ...]]:
    """Indices of rows that must stay together, in order."""
    leader, owner = {index: index for index in range(len(examples))}, {}
    for index, example in enumerate(examples):
        for image in example.images:
            one = _find(leader, owner.setdefault(image if duplicates is None else duplicates.pictures[image], index))
            other = _find(leader, index)
            leader[max(one, other)] = min(one, other)
    clusters = defaultdict(list)
    for index in leader:
        clusters[_find(leader, index)].append(index)
    return [tuple(cluster) for cluster in clusters.values()]


def _find(leader: dict, member: Hashable) -> Hashable:
    while leader[member] != member:
        leader[member] = member = leader[leader[member]]
    return member


def _question_and_answer(example: Example) -> tuple[str, str]:
    asked = [message for message in example.messages if message["role"] != "assistant"]
    answers = [message["content"] for message in example.messages if message["role"] == "assistant"]
    return repr([(m["role"], m["content"]) for m in asked]), repr(answers)


def _draw(example: Example, seed: int) -> float:
    """A number in [0, 1) from what the example is; file names count without their folders, which differ by machine."""
    names = [image if image.startswith("data:") else os.path.basename(image) for image in example.images]
    digest = hashlib.sha256(repr((seed, names, example.messages)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
