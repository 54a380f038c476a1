"""Answers by batched generation, and what they are worth: accuracy, macro F1 per attribute, images per second.

An answer's *attributes* are its "key: value" pairs, separated by commas, semicolons or lines, or a JSON object. A picture
counts as right when all attributes of the expected answer are right; an expected answer without attributes is free text: it
counts as right when it is the same, and how near the answers come is their chrF. An answer that doesn't parse, or lacks an
attribute, is wrong there, and is counted.
"""

import json
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from sklearn.metrics import f1_score
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from vlftlib.dataset import VisionLanguageCollator, VisionLanguageDataset
from vlftlib.forms import Example
from vlftlib.graph_mode import uncompiled
from vlftlib.images import ImageError, load_image
from vlftlib.sharding import is_sharded

ANSWERS = "answers.jsonl"  # beside a run record
UNPARSABLE = "(unparsable)"  # as a predicted value; the brackets keep it from meeting a real one


@dataclass(frozen=True)
class Attribute:
    """One attribute over a split: accuracy, F1 averaged over the classes that occur in the expected answers, their number."""

    accuracy: float
    macro_f1: float
    classes: int


@dataclass(frozen=True)
class Evaluation:
    """The result on one split; `answers` holds one (expected, given) pair an example.

    `metrics` has "chrF" where answers are free text, and a data set's own measures, all from 0 to 1.
    """

    split: str
    accuracy: float
    attributes: dict[str, Attribute]
    unparsable: int
    images_per_second: float
    answers: tuple[tuple[str, str], ...]
    metrics: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        parts = [f"{name} {attribute.accuracy:.1%}" for name, attribute in self.attributes.items()]
        return f"Evaluation({self.split}, {len(self.answers)} examples, accuracy {self.accuracy:.1%}, {', '.join(parts)})"

    def as_dict(self, step: int | None = None) -> dict:
        """For a run record; the answers are kept beside it."""
        attributes = {name: vars(attribute).copy() for name, attribute in self.attributes.items()}
        return dict(
            split=self.split,
            step=step,
            examples=len(self.answers),
            accuracy=self.accuracy,
            attributes=attributes,
            unparsable=self.unparsable,
            images_per_second=self.images_per_second,
            metrics=self.metrics,
        )


def parse_answer(text: str) -> dict[str, str] | None:
    """The attributes of an answer, or None where it isn't made of them."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        pairs = [part.split(":", 1) for part in re.split(r"[,;\n]", text.strip())]
        if any(len(pair) < 2 or not pair[0].strip() for pair in pairs):
            return None
        return {key.strip(): value.strip() for key, value in pairs}
    return {str(key): str(value) for key, value in content.items()} if isinstance(content, dict) else None


@torch.no_grad()
def predict(
    model: torch.nn.Module,
    processor,
    examples: Sequence[Example],
    *,
    batch_size: int = 16,
    max_new_tokens: int = 64,
    progress: str | None = None,
) -> list[str]:
    """The model's answers to the last user turn of each example, by greedy decoding.

    Args:
        model: on its device; left in the mode that it had.
        processor: from `load_processor`.
        examples: a last assistant turn is left out of the prompt.
        batch_size: prompts a batch, padded on the left; the answers don't depend on it.
        max_new_tokens: an answer is cut there.
        progress: what the progress bar is called; None shows none.
    """
    batches = DataLoader(
        VisionLanguageDataset(examples, processor, prompts=True),
        batch_size=batch_size,
        collate_fn=VisionLanguageCollator(processor, padding_side="left"),
        generator=torch.Generator(),  # a loader draws a seed, which must not come out of a training run's stream
    )
    mode, answers = model.training, []
    model.eval()
    with tqdm(total=len(examples), desc=progress, unit="image", disable=progress is None) as bar:
        for inputs in batches:
            inputs = {key: value.to(model.device) for key, value in inputs.items()}
            greedy = dict(do_sample=False, temperature=None, top_p=None, top_k=None)
            with uncompiled(model):  # each token would be a new shape
                tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, synced_gpus=is_sharded(model), **greedy)
            answers += processor.tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            bar.update(len(tokens))
    model.train(mode)
    return answers


def ask(
    model: torch.nn.Module, processor, pictures: Sequence[str | os.PathLike], question: str, **options
) -> list[tuple[str | os.PathLike, str | ImageError]]:
    """One question about each picture; `options` go to `predict`.

    Returns:
        A picture and its answer, in order; in the answer's place an `ImageError` where the picture can't be read.
    """
    examples, results = [], []
    for picture in pictures:
        try:
            load_image(picture)
        except ImageError as error:
            results.append((picture, error))
            continue
        content = [{"type": "image"}, {"type": "text", "text": question}]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": []}]
        examples.append(Example((os.fspath(picture),), turns, os.fspath(picture), 0))
        results.append((picture, None))
    answers = iter(predict(model, processor, examples, **options)) if examples else iter(())
    return [(picture, next(answers) if result is None else result) for picture, result in results]


def evaluate(
    model: torch.nn.Module, processor, examples: Sequence[Example], *, split: str = "test", metric=None, **options
) -> Evaluation:
    """Answer every example and compare; `options` go to `predict`.

    Args:
        model, processor, examples: see `predict`.
        split: what the examples are called.
        metric: a data set's own measure: a function of the (expected, given) answers that returns values by name.

    Raises:
        ValueError: there is no example, or one has no answer to compare with.
    """
    if not examples:
        raise ValueError(f"split {split!r}: no example to evaluate on")
    began = time.perf_counter()
    given = _predict_together(model, processor, examples, progress=f"evaluating {split}", **options)
    elapsed = time.perf_counter() - began
    result = score([example.answer for example in examples], given, split=split, images_per_second=len(examples) / elapsed)
    return result if metric is None else replace(result, metrics=result.metrics | metric(result.answers))


def _predict_together(model, processor, examples: Sequence[Example], progress: str, **options) -> list[str]:
    """`predict`, the examples shared out over the processes of a distributed run; each gets all answers."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return predict(model, processor, examples, progress=progress, **options)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    share = list(examples[rank::world])
    if is_sharded(model):  # every process takes part in every forward: as many examples for each
        share += examples[:1] * (math.ceil(len(examples) / world) - len(share))
    own = predict(model, processor, share, progress=progress if rank == 0 else None, **options)
    shares = [None] * world
    torch.distributed.all_gather_object(shares, own)
    return [shares[i % world][i // world] for i in range(len(examples))]


def score(expected: Sequence[str], given: Sequence[str], *, split: str, images_per_second: float = 0.0) -> Evaluation:
    """Compare answers with the expected ones; both in the examples' order."""
    wanted = [parse_answer(text) for text in expected]
    found = [parse_answer(text) for text in given]
    names = list(dict.fromkeys(name for pairs in wanted if pairs for name in pairs))
    right, unparsable, attributes = [], 0, {}
    for text, answer, pairs, own in zip(expected, given, wanted, found, strict=True):
        if pairs is None:
            right.append(answer.strip() == text.strip())
        else:
            right.append(own is not None and all(own.get(name) == value for name, value in pairs.items()))
            unparsable += own is None or any(name not in own for name in pairs)
    for name in names:
        values = [(pairs[name], (own or {}).get(name, UNPARSABLE)) for pairs, own in zip(wanted, found) if pairs and name in pairs]
        true, predicted = zip(*values)
        classes = sorted(set(true))
        attributes[name] = Attribute(
            accuracy=sum(a == b for a, b in values) / len(values),
            macro_f1=float(f1_score(true, predicted, labels=classes, average="macro", zero_division=0)),
            classes=len(classes),
        )
    texts = [(text, answer) for text, answer, pairs in zip(expected, given, wanted) if pairs is None]
    metrics = {"chrF": text_similarity(texts)} if texts else {}
    answers = tuple(zip(expected, given))
    return Evaluation(split, sum(right) / len(right), attributes, unparsable, images_per_second, answers, metrics)


def text_similarity(answers: Sequence[tuple[str, str]]) -> float:
    """chrF of (expected, given) texts, from 0 to 1: how many of their runs of one to six characters agree, in any language.

    Source: Popović, chrF: character n-gram F-score for automatic MT evaluation (2015); by sacreBLEU with its defaults.
    """
    from sacrebleu import corpus_chrf

    expected, given = zip(*answers)
    return corpus_chrf(given, [expected]).score / 100


def write_answers(evaluations: Sequence[Evaluation], path: Path) -> None:
    """Every expected and given answer, one JSON line each, to be read beside the run record."""
    rows = [dict(split=e.split, expected=expected, given=given) for e in evaluations for expected, given in e.answers]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
