"""What `check` costs: its speed beside bare decoding of the same files on the same cores, its memory, the search for copies.

The pictures are drawn for it: thumbnails, which cost little to decode and so show what everything else costs, and
photographs of 12 megapixels. Some are resaved copies, so that the search has something to find.
"""

import gc
import json
import os
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
from PIL import Image, ImageChops
from tqdm.auto import tqdm

from vlftlib.copies import CHUNK, scan_pictures, usable_cores
from vlftlib.duplicates import find_duplicates
from vlftlib.reading import LoadedExamples, load_examples

# What brings torch is imported in functions: the processes that decode import this module, too.

SETS = {"thumbnails": ((160, 120), 50_000), "photographs": ((4000, 3000), 80)}  # size in px and number
QUICK = {"thumbnails": ((160, 120), 300), "photographs": ((400, 300), 8)}
NOISE = 12  # standard deviation in grey levels; a photograph of 12 megapixels takes 4 MB with it
COPY_EVERY = 100  # the picture after each hundredth is a copy of it
LIMITS = {"thumbnails": 0.25, "photographs": 0.4, "bytes_a_row": 4096, "search_s": 20, "search_bytes": 2 * 2**30}


@dataclass(frozen=True)
class CheckBenchmark:
    """What `measure_check` found, and where it is written."""

    results: list[dict]
    path: Path

    def __str__(self) -> str:
        lines = [
            f"{row['case']}: {row['rows']:,} rows, {row['share']:.2f} of bare decoding's speed (at least {LIMITS[row['case']]}), "
            f"{row['share_with_search']:.2f} with the search for copies"
            for row in self.results
            if "share" in row
        ]
        row = self.results[0]
        lines.append(f"memory: {row['held_bytes_a_row']:,.0f} bytes a row held, {row['peak_bytes_a_row']:,.0f} at the peak of reading")
        lines.append(f"search: {row['search_s']:.1f} s, {row['search_peak_bytes'] / 2**20:,.0f} MB; {row['groups']} groups found")
        return "\n".join([*lines, f"record: {self.path}"])


def measure_check(*, device, output: str | os.PathLike, repeats: int = 3, quick: bool = False) -> CheckBenchmark:
    """Measure both sets and write OUTPUT/check.json.

    Args:
        device: named in the record; nothing runs on it.
        output: a folder.
        repeats: interleaved rounds.
        quick: few thumbnails, small photographs, one round: to see that it runs.
    """
    from vlftlib.benchmark import save_benchmark
    from vlftlib.models import TINY_BASE, load_processor

    processor, results = load_processor(TINY_BASE), []
    for name, (size, count) in (QUICK if quick else SETS).items():
        with tempfile.TemporaryDirectory() as folder:
            file = draw_set(Path(folder), size, count)
            row = dict(case=name, size=size, rows=count)
            if name == "thumbnails":
                row |= measure_memory(file, processor)
            loaded = load_examples(file)
            results.append(row | measure_speed(loaded, processor, 1 if quick else repeats))
    settings = dict(processes=usable_cores(), repeats=repeats, copy_every=COPY_EVERY, limits=LIMITS, quick=quick)
    return CheckBenchmark(results, save_benchmark("check", settings, results, output, device))


def draw_set(folder: Path, size: tuple[int, int], count: int) -> Path:
    """Draw `count` JPEG pictures (soft blobs under a camera's noise) and write FOLDER/rows.jsonl, a row for each."""
    rng, rows = np.random.default_rng(0), []
    noise = Image.effect_noise((size[0] + 256, size[1] + 256), NOISE)
    for i in tqdm(range(count), "drawing pictures", unit="image"):
        if i % COPY_EVERY != 1:
            blobs = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
            left, top = rng.integers(0, 257, 2).tolist()
            grain = noise.crop((left, top, left + size[0], top + size[1]))
            picture = ImageChops.add(blobs, Image.merge("RGB", [grain] * 3), offset=-128)
        picture.save(folder / f"{i}.jpg", quality=90 if i % COPY_EVERY != 1 else 60)
        turns = [
            {"from": "human", "value": f"<image>\nWhat are the colour and number of part {i}?"},
            {"from": "gpt", "value": f"colour: {('red', 'green', 'blue')[i % 3]}, number: A{i:05d}"},
        ]
        rows.append(json.dumps({"image": f"{i}.jpg", "conversations": turns}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "rows.jsonl"


def measure_speed(loaded: LoadedExamples, processor, repeats: int) -> dict:
    """Rounds of bare decoding, in processes that are there already, and of checks, which start their own."""
    import torch

    from vlftlib.benchmark import interleave, summary
    from vlftlib.check import check_examples

    names = [image for example in loaded.examples for image in example.images]
    size = CHUNK if len(names) >= 1000 else 1  # photographs are handed out one by one
    chunks = [names[i : i + size] for i in range(0, len(names), size)]
    with ProcessPoolExecutor(usable_cores(), get_context("spawn")) as pool:
        cases = {
            "bare": lambda: list(pool.map(_decode, chunks)),
            "check": lambda: check_examples(loaded, processor, duplicates=False, progress=False),
            "check_with_search": lambda: check_examples(loaded, processor, progress=False),
        }
        seconds = {case: summary(values) for case, values in interleave(cases, repeats=repeats, device=torch.device("cpu")).items()}
    bare = seconds["bare"]["median_s"]
    shares = dict(share=bare / seconds["check"]["median_s"], share_with_search=bare / seconds["check_with_search"]["median_s"])
    return seconds | shares


def _decode(names: list[str]) -> None:
    for name in names:
        with Image.open(name) as image:
            image.load()


def measure_memory(file: Path, processor) -> dict:
    """This process's memory above what it had before reading: held by examples, fingerprints and report, and at its peaks."""
    from vlftlib.check import check_examples

    before = _resident()
    with Peak() as reading:
        loaded = load_examples(file)
        scans = scan_pictures((image for example in loaded.examples for image in example.images), progress=False)
    scanned = _resident()
    began = time.perf_counter()
    with Peak() as searching:
        found = find_duplicates(loaded.examples, scans, progress=False)
    search_s = time.perf_counter() - began
    rows, groups = len(loaded.examples), len(found.groups())
    del scans, found
    report = check_examples(loaded, processor, progress=False)
    held = _resident() - before
    assert len(report.examples) == rows
    return dict(
        held_bytes_a_row=held / rows,
        peak_bytes_a_row=(reading.most - before) / rows,
        search_s=search_s,
        search_peak_bytes=searching.most - scanned,
        groups=groups,
    )


def _resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


class Peak:
    """The most memory that this process had, in bytes, looked at every few milliseconds."""

    def __enter__(self):
        self.most, self._done = _resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._done.wait(0.005):
            self.most = max(self.most, process.memory_info().rss)

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()
