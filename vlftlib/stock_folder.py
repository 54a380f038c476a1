"""A base with adapters in its weights, written as a folder like the published ones and read again before it counts."""

import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from vlftlib.attach import adapted_modules
from vlftlib.dataset import VisionLanguageCollator, VisionLanguageDataset
from vlftlib.forms import Example
from vlftlib.merging import MergeCheck, batch_logits, compare_logits, merge_adapters, shake_weights
from vlftlib.models import load_model, load_processor, save_processor
from vlftlib.samples import QUESTION, draw_product, random_product
from vlftlib.saving import load_adapters

STOCK_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def write_merged(
    base: str | os.PathLike, adapters: str | os.PathLike, output: str | os.PathLike, *, dtype: torch.dtype | str = "auto"
) -> MergeCheck:
    """Write a base with adapters in its weights as a stock folder: weights, tokenizer, chat template, configurations.

    The folder is written beside its place, loaded again and compared (all of a stock folder's files, the processor's output and
    the logits on a drawn picture with a question), and only then renamed.

    Args:
        base: a folder or hub name, in full precision.
        adapters: as `load_adapters` takes it.
        output: a new folder.
        dtype: of the merged weights; the base's own by default.

    Returns:
        The folder's logits beside the adapters'.

    Raises:
        FileExistsError: output exists.
        ValueError: the base is quantised.
        RuntimeError: a file is missing, or something differs; then nothing is left.
    """
    output = Path(output)
    if output.exists():
        raise FileExistsError(f"{output} exists: choose a new folder")
    model = load_adapters(load_model(base, dtype=dtype), adapters)
    processor = load_processor(base)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as temporary:
        folder = Path(temporary) / "new"
        batch = _drawn_batch(processor, Path(temporary))
        adapted = batch_logits(model, batch)
        weights = [layer.base_layer.weight for layer in adapted_modules(model).values()]
        merge_adapters(model, remove=True).save_pretrained(folder)
        save_processor(processor, folder)
        video = Path(base) / "video_preprocessor_config.json"
        if video.is_file():
            shutil.copy(video, folder)
        still = batch_logits(model, batch)
        shake_weights(weights)
        shaken, settings = batch_logits(model, batch), model.generation_config.to_dict()
        del model, weights  # two models need not fit
        if missing := _missing_files(folder):
            raise RuntimeError(f"{output}: a stock folder has {', '.join(missing)} too")
        again = load_processor(folder)
        differing = [name for name, value in _drawn_batch(again, Path(temporary)).items() if not torch.equal(value, batch[name])]
        if differing or again.tokenizer.get_vocab() != processor.tokenizer.get_vocab():
            raise RuntimeError(f"{output}: the written processor gives another {', '.join(differing) or 'vocabulary'}")
        model = load_model(folder, dtype="auto")
        if (read := model.generation_config.to_dict()) != settings:
            raise RuntimeError(f"{output}: the written generation config is {read}, it was {settings}")
        check = compare_logits(adapted, batch_logits(model, batch), still, shaken)
        if not check.passed:
            raise RuntimeError(f"{output}: {check}")
        folder.rename(output)
    return check


def _missing_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    return [name for name in (*STOCK_FILES, *sorted(shards)) if not (folder / name).is_file()]


def _drawn_batch(processor, folder: Path) -> dict[str, Tensor]:
    """One drawn picture with a question and an answer, as in training."""
    rng = random.Random(0)
    product = random_product(rng)
    draw_product(product, rng).save(folder / "picture.png")
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": product.answer}]}
    example = Example((str(folder / "picture.png"),), [question, answer], "drawn", 1)
    return VisionLanguageCollator(processor)([VisionLanguageDataset([example], processor)[0]])
