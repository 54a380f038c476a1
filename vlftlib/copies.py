"""Pictures that are copies of each other.

A perceptual hash proposes pairs: 64 bits each of imagehash's pHash and dHash. By itself it proposes mostly nonsense where
pictures are alike (2,600 product pictures: 37,500 pairs, all of different products). So a comparison of pixels
confirms: both pictures at the smaller one's size, averaged over cells of about 12 px, and no block of 3 x 3 cells may
differ by more than a tolerance, which is wider where the picture itself is noisy or busy. Two pages that differ in letters
smaller than a cell still count as copies. Drawings of a few flat areas give unsteady hashes: their lossy copies can be missed.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

import imagehash
import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from vlftlib.images import ImageError, load_image

HASH_DISTANCE = 24  # bits of 128; copies of a third of the size (53 px) at JPEG quality 60 reach it
CELLS = 24  # of a fingerprint's side
REFUSALS = 8  # comparisons that a picture may fail, nearest first, before the others like it are left uncompared
LOOSE = 6.0  # grey levels, for fingerprints; confirmation is stricter
CELL = 12.5  # px of a cell when pixels are compared: the average over so many is steady
# Grey levels that a block may differ by: a part, and a share of the noisier picture's mean step between neighbouring
# pixels, since what recompressing and resizing take away grows with it. Of the pictures tried (products, ELPV, tiles of
# photographs, pages, drawn cells and parts), copies in 15 ways reach 1.0 of this, and the two likest cells of ELPV 1.02.
STEADY, NOISY = 0.65, 0.21
# Neither so many pictures nor so many bytes of them are worth starting processes for; a chunk of work holds no more bytes.
FEW, FEW_BYTES, CHUNK, CHUNK_BYTES = 400, 64 * 2**20, 32, 4 * 2**20


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

    Raises:
        RuntimeError: the processes ended before their work was done.
    """
    sources = list(dict.fromkeys(sources))
    processes = processes or usable_cores()
    sizes = [len(source) if source.startswith("data:") else _file_size(source) for source in sources]
    bar = tqdm(total=len(sources), desc="reading pictures", unit="image", disable=not progress)
    scans = {}
    with bar, contextlib.ExitStack() as stack:
        run = map
        if processes > 1 and (len(sources) >= FEW or sum(sizes) >= FEW_BYTES):
            run = stack.enter_context(ProcessPoolExecutor(processes, get_context("spawn"), _warm_up)).map
        else:
            _warm_up()
        chunks = list(_chunks(sources, sizes))
        try:
            for chunk, found in zip(chunks, run(_scan_chunk, chunks)):
                scans.update(zip(chunk, found))
                bar.update(len(chunk))
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process that reads pictures has ended: memory ran out, or a script without `if __name__ == '__main__':` was "
                "started again by each of them; processes=1 reads in one process"
            ) from error
    return scans


def usable_cores() -> int:
    """This process's share: a container may lend fewer cores than the machine has, and torchrun starts several processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _warm_up() -> None:
    """imagehash imports SciPy at the first hash; no picture shall seem slow for it."""
    imagehash.phash(Image.new("L", (32, 32)))


def _file_size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0  # its scan says why


def _chunks(sources: Sequence[str], sizes: Sequence[int]) -> Iterator[list[str]]:
    chunk, held = [], 0
    for source, size in zip(sources, sizes):
        if chunk and (len(chunk) == CHUNK or held + size > CHUNK_BYTES):
            yield chunk
            chunk, held = [], 0
        chunk.append(source)
        held += size
    if chunk:
        yield chunk


def _scan_chunk(sources: Sequence[str]) -> list[Scan]:
    return [scan_picture(source) for source in sources]


def scan_picture(source: str) -> Scan:
    """Decode one picture and take its fingerprints."""
    began = time.perf_counter()
    try:
        picture = load_image(source)
    except ImageError as error:
        return Scan(error=(error.kind, error.detail), seconds=time.perf_counter() - began)
    # Averaged down once: it makes the hashes of large pictures cheap, and hardly changes them.
    grey = picture.reduce(max(1, min(picture.size) // 128)).convert("L").resize((3 * CELLS, 3 * CELLS), Image.Resampling.BOX)
    small = grey.resize((32, 32), Image.Resampling.BOX)  # pHash's own size
    bits = np.packbits([imagehash.phash(small).hash, imagehash.dhash(grey).hash]).tobytes()
    cells = grey.reduce(3).tobytes()
    if source.startswith("data:"):
        content = source.encode()
    else:
        with open(source, "rb") as file:
            content = file.read()
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return Scan(picture.size, time.perf_counter() - began, digest, bits, cells)


def group_copies(
    scans: Sequence[Scan], same: Callable[[int, int], bool], block: int | None = None, progress: bool = False
) -> tuple[np.ndarray, int]:
    """Group pictures by their fingerprints and a comparison.

    Only pairs that are not yet in one group are compared, and a picture fails no more than REFUSALS comparisons: so ten
    thousand pictures that all look alike, copies or not, cost about as many comparisons, not fifty million. A copy is
    nearest to its like and comes first.

    Memory: about 100 MB more than the scans for 50,000; 30 bytes for each pair with close hashes within a block.

    Args:
        scans: of pictures that could be read.
        same: the comparison of two of them, given their indices.
        block: rows of the hashes' product at a time; by default what fits 16 MB.
        progress: show a bar.

    Returns:
        For each picture the index of its group's first, (n,); and how many pictures have look-alikes left uncompared.
    """
    count = len(scans)
    group, cut = np.arange(count), 0
    if count < 2:
        return group, cut
    bits = np.frombuffer(b"".join(scan.bits for scan in scans), np.uint8).reshape(count, -1)
    signs = np.unpackbits(bits, axis=1).astype(np.float32) * 2 - 1  # equal bits minus different ones = a scalar product
    cells = np.frombuffer(b"".join(scan.cells for scan in scans), np.uint8).reshape(count, CELLS, CELLS)
    means, spread = _block_means(cells)
    close = signs.shape[1] - 2 * HASH_DISTANCE
    block = block or max(16, 2**22 // count)
    with tqdm(total=count, desc="comparing pictures", unit="image", disable=not progress) as bar:
        for start in range(0, count, block):
            products = signs[start : start + block] @ signs[start:].T
            products[np.tril_indices(len(products))] = -np.inf  # each pair once
            hit = np.flatnonzero(products.max(1) >= close)  # mostly few: cheaper than to look at every pair twice
            rows, columns = np.nonzero(products[hit] >= close)
            rows = hit[rows]
            begins = np.searchsorted(rows, np.arange(len(products) + 1))
            for row in np.flatnonzero(np.diff(begins)):
                i, near = start + row, start + columns[begins[row] : begins[row + 1]]
                near = near[group[near] != group[i]]
                # A block's means differ by no more than its cells do, and are cheaper.
                differences = np.abs(means[near] - means[i]) / np.maximum(spread[near], spread[i])
                differences = differences.max(1)
                near = near[np.argsort(differences, kind="stable")][: np.count_nonzero(differences <= LOOSE)]
                cut += _compare(i, near, group, cells, same)
            bar.update(len(products))
    return group, cut


def _compare(i: int, near: np.ndarray, group: np.ndarray, cells: np.ndarray, same: Callable[[int, int], bool]) -> bool:
    """Compare a picture with others, the nearest first, and join `group`s; whether some are left uncompared."""
    refused = 0
    for part in range(0, len(near), 64):
        others = near[part : part + 64]
        others = others[group[others] != group[i]]
        differences = _block_difference(cells[others], cells[i : i + 1])
        for place in np.argsort(differences, kind="stable"):
            j = others[place]
            if differences[place] > LOOSE:
                break
            if group[i] == group[j]:
                continue
            if refused == REFUSALS:
                return True
            if same(i, j):
                first, second = sorted((group[i], group[j]))
                group[group == second] = first
            else:
                refused += 1
    return False


def same_picture(first: Image.Image, second: Image.Image) -> bool:
    """Whether one picture is a resaved, resized or recompressed copy of the other (both RGB)."""
    ratio = (first.width * second.height) / (first.height * second.width)
    if not 0.95 < ratio < 1.05:
        return False
    size = tuple(min(first.size[k], second.size[k], 1024) for k in (0, 1))
    cells = 3 * max(1, round(min(size) / (3 * CELL)))
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
    first, second = _blocks(first), _blocks(second)
    rms = np.sqrt(((first - second) ** 2).mean((2, 4)))
    contrast = np.maximum(first.std((2, 4)), second.std((2, 4)))
    return (rms / (1 + contrast / 10)).max((1, 2))


def _block_means(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each block's mean, and what its differences are divided by; (n, blocks) both."""
    means = np.empty((len(cells), (cells.shape[1] // 3) ** 2), np.float32)
    spread = np.empty_like(means)
    for part in range(0, len(cells), 4096):
        blocks = _blocks(cells[part : part + 4096])
        means[part : part + 4096] = blocks.mean((2, 4)).reshape(len(blocks), -1)
        spread[part : part + 4096] = 1 + blocks.std((2, 4)).reshape(len(blocks), -1) / 10
    return means, spread


def _blocks(cells: np.ndarray) -> np.ndarray:
    count, side, _ = cells.shape
    return cells.astype(np.float32).reshape(count, side // 3, 3, side // 3, 3)
