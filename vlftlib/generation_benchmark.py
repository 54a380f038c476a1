"""What generating in batches gains over picture by picture: the same answers, in images a second."""

import os
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vlftlib.benchmark import interleave, save_benchmark, summary
from vlftlib.evaluation import predict
from vlftlib.forms import Example
from vlftlib.models import TINY_BASE, load_model, load_processor
from vlftlib.samples import QUESTION, draw_product, random_product, shop_floor

BATCHES = (1, 4, 16, 32)
PICTURES = 64


@dataclass(frozen=True)
class GenerationBenchmark:
    """A row a batch size; prints as a table."""

    rows: tuple[dict, ...]
    path: Path

    def __str__(self) -> str:
        lines = ["batch  forwards  images/s  times one by one"]
        for row in self.rows:
            speed = f"{row['images_per_second']:9.1f}  {row['time_ratio']:16.2f}" if "time_ratio" in row else "        -                 -"
            lines.append(f"{row['batch_size']:5}  {row['forwards']:8} {speed}")
        return "\n".join([*lines, f"written to {self.path}"])


def measure_generation(
    *, device: torch.device, output: str | os.PathLike, repeats: int = 7, quick: bool = False
) -> GenerationBenchmark:
    """Answer shop-floor pictures by the tiny base in batches of several sizes, in turns, and write OUTPUT/generation.json.

    Reading pictures is part of it, as in an evaluation. A time ratio is the median over the rounds of one by one's time by the
    batches' in the same round.

    Args:
        device: where.
        output: a folder.
        repeats: interleaved rounds.
        quick: eight pictures and one round: to see that it runs.

    Raises:
        RuntimeError: a batch gave other answers than its pictures one by one.
    """
    count, repeats, sizes = (8, 1, BATCHES[:2]) if quick else (PICTURES, repeats, BATCHES)
    model, processor = load_model(TINY_BASE, device=device), load_processor(TINY_BASE)
    with tempfile.TemporaryDirectory() as folder:
        examples = draw_examples(Path(folder), count)
        answers, forwards = {}, {}
        for size in sizes:
            answers[size], forwards[size] = count_forwards(model, processor, examples, size)
            if answers[size] != answers[sizes[0]]:
                raise RuntimeError(f"batches of {size} gave other answers than pictures one by one on {device}")
        cases = {str(size): lambda size=size: predict(model, processor, examples, batch_size=size) for size in sizes}
        seconds = interleave(cases, repeats=repeats, device=device)
    rows = []
    for size in sizes:
        own, alone = seconds[str(size)], seconds[str(sizes[0])]
        ratio = statistics.median(a / b for a, b in zip(alone, own))
        row = dict(batch_size=size, forwards=forwards[size], images_per_second=count / statistics.median(own), time_ratio=ratio)
        rows.append(row | summary(own))
    settings = dict(model=TINY_BASE.name, pictures=count, repeats=repeats, threads=torch.get_num_threads(), quick=quick)
    path = save_benchmark("generation", settings, rows, output, device)
    return GenerationBenchmark(tuple(rows), path)


def draw_examples(folder: Path, count: int) -> list[Example]:
    """Shop-floor pictures with their question."""
    rng, examples = random.Random(0), []
    for i in range(count):
        product, path = random_product(rng), folder / f"{i}.png"
        shop_floor(draw_product(product, rng), rng).save(path)
        turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
        turns.append({"role": "assistant", "content": [{"type": "text", "text": product.answer}]})
        examples.append(Example((str(path),), turns, str(path), 1))
    return examples


def count_forwards(model, processor, examples: Sequence[Example], batch_size: int) -> tuple[list[str], int]:
    """The answers, and how many forwards of the model they took."""
    calls = []
    hook = model.register_forward_hook(lambda module, args, output: calls.append(None))
    try:
        return predict(model, processor, examples, batch_size=batch_size), len(calls)
    finally:
        hook.remove()
