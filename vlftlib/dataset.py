"""Examples as a model's inputs: tokens, labels on the answers alone, pictures, batches."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.utils.data import Dataset

from vlftlib.encoding import IGNORED, ChatEncoder
from vlftlib.forms import Example, RowError
from vlftlib.grids import grid_of, to_grid
from vlftlib.images import ImageError, image_size, load_image, upright_size
from vlftlib.reading import LoadedExamples, Rejection, load_examples, write_examples

__all__ = [
    "Example",
    "LoadedExamples",
    "Rejection",
    "load_examples",
    "write_examples",
    "VisionLanguageDataset",
    "VisionLanguageCollator",
    "load_image",
]


class BadRow(ValueError):
    """A row that turns out unusable when its item is computed; the message names file, line and reason.

    A worker of torch's hands its errors over as a traceback's text, which here is cut down to that message again.
    """

    def __init__(self, message: str):
        super().__init__(message.strip().splitlines()[-1].removeprefix(f"{__name__}.BadRow: "))


class VisionLanguageDataset(Dataset):
    """Examples as model inputs, computed when asked for.

    An item has input_ids, attention_mask, labels, mm_token_type_ids (each (tokens,), int64) and, where there are pictures,
    pixel_values ((patches, 1176), float32) and image_grid_thw ((pictures, 3), int64, in patches). For training it also has
    row, the example's index.

    Args:
        examples: from `load_examples`.
        processor: Qwen2.5-VL's; its image processor's size limits hold.
        max_length: in tokens, counted from the texts and the pictures' headers; no picture is ever cut.
        too_long: what becomes of longer examples: "reject" them whole, or "drop turns": leave away the oldest questions
            without a picture, with their answers, and reject where that isn't enough.
        prompts: items end where the last answer begins, with no labels: for generation. `examples[i].answer` is expected.

    `examples` are those kept, `rejected` the others, `shortened` counts those that lost turns. A picture is decoded first
    when its item is asked for: one that is broken behind its header raises BadRow then, and nothing is put in its place.

    Raises:
        ValueError: another word for `too_long`.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        processor,
        max_length: int | None = None,
        too_long: str = "reject",
        prompts: bool = False,
    ):
        if too_long not in ("reject", "drop turns"):
            raise ValueError(f"too_long {too_long!r}: use 'reject' or 'drop turns'")
        self.processor, self.prompts = processor, prompts
        self.encoder = ChatEncoder(processor)
        self.examples, self.rejected, self.shortened = [], [], 0
        lengths = []
        for example in examples:
            try:
                if not prompts and not _has_label(example):
                    raise RowError("no answer to learn")
                if max_length is not None:
                    example, length = self._fit(example, max_length, too_long == "drop turns")
                    lengths.append(length)
                self.examples.append(example)
            except (RowError, ImageError) as error:
                self.rejected.append(Rejection(example.file, example.line, error.kind, error.detail))
        if max_length is not None:
            self.lengths = lengths  # in place of counting again

    def _fit(self, example: Example, max_length: int, drop: bool) -> tuple[Example, int]:
        length = full = self.count_tokens(example)
        fitting = example
        while length > max_length:
            shorter = _drop_oldest(fitting) if drop else None
            if shorter is None:
                raise RowError("too many tokens", f"{full}, limit {max_length}")
            fitting = shorter
            length = self.count_tokens(fitting)
        self.shortened += fitting is not example
        return fitting, length

    def count_tokens(self, example: Example) -> int:
        """The length of an example's item, from its texts and its pictures' headers alone."""
        example = _without_answer(example) if self.prompts else example
        # Which of several sizes a picture is brought to depends on which side is up.
        size = image_size if grid_of(self.processor) is None else upright_size
        counts = [count_image_tokens(self.processor, *size(image)) for image in example.images]
        return len(self.encoder.encode(example, counts, self.prompts)[0])

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Tokens of every item, for batches grouped by length."""
        return [self.count_tokens(example) for example in self.examples]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        example = _without_answer(self.examples[index]) if self.prompts else self.examples[index]
        item, counts = {}, []
        try:
            if example.images:
                pictures = to_grid(self.processor, [load_image(image) for image in example.images])
                pictures = self.processor.image_processor(pictures, return_tensors="pt")
                item = {"pixel_values": pictures["pixel_values"], "image_grid_thw": pictures["image_grid_thw"]}
                merged = self.processor.image_processor.merge_size**2
                counts = (item["image_grid_thw"].prod(-1) // merged).tolist()
            ids, labels = self.encoder.encode(example, counts, self.prompts)
        except (RowError, ImageError) as error:
            where = f"{example.file}:{example.line}"
            raise BadRow(f"{where}: {error.kind}: {error.detail}; python -m vlftlib check finds such rows") from error
        ids = torch.tensor(ids)
        item["input_ids"], item["attention_mask"] = ids, torch.ones_like(ids)
        item["mm_token_type_ids"] = (ids == self.encoder.image_token_id).long()
        if not self.prompts:
            item["labels"] = torch.tensor(labels)
            item["row"] = torch.tensor(index)  # so that the trainer can name it; no input of the model
        return item


class LengthGroupedOrder:
    """An order of training in which rows of like length meet in a batch (transformers' LengthGroupedSampler).

    An epoch's order hangs on the seed and its number alone, so every process has the same and a resumed run goes on in it.

    Args:
        lengths: in tokens, of every row.
        batch_size: rows that should be alike, all processes and accumulated micro-batches together.
        seed: another seed, other orders.
        epoch: says which epoch begins.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, epoch: Callable[[], int]):
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        from transformers.trainer_pt_utils import LengthGroupedSampler

        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch())
        return iter(LengthGroupedSampler(self.batch_size, lengths=self.lengths, generator=generator))


def _has_label(example: Example) -> bool:
    return any(message["role"] == "assistant" and message.get("loss", True) for message in example.messages)


def _without_answer(example: Example) -> Example:
    """The example up to its last assistant turn."""
    answers = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
    messages = example.messages[: answers[-1]] if answers else example.messages
    places = sum(part["type"] == "image" for message in messages for part in message["content"])
    return replace(example, messages=messages, images=example.images[:places])


def _drop_oldest(example: Example) -> Example | None:
    """The example without its oldest user turn that shows no picture, and its answer; None where none can go."""
    starts = [i for i, message in enumerate(example.messages) if message["role"] == "user"]
    for begin, end in zip(starts, starts[1:]):
        shorter = replace(example, messages=example.messages[:begin] + example.messages[end:])
        shown = any(part["type"] == "image" for message in example.messages[begin:end] for part in message["content"])
        if not shown and _has_label(shorter):
            return shorter
    return None


def count_image_tokens(processor, width: int, height: int) -> int:
    """The number of tokens that a picture of this size (px) takes."""
    images = processor.image_processor
    if (grid := grid_of(processor)) is not None:
        width, height = grid.choose(width, height)
    return images.get_number_of_image_patches(height, width, {}) // images.merge_size**2


class VisionLanguageCollator:
    """Items into a batch: texts padded, pictures joined in order.

    Args:
        processor: whose tokenizer names the padding token.
        padding_side: "right" for training, "left" for generation.
        multiple: texts are padded to a multiple of so many tokens.

    Raises:
        ValueError: another side, or a tokenizer without a padding token.
    """

    def __init__(self, processor, padding_side: str = "right", multiple: int = 1):
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side {padding_side!r}: use left or right")
        if processor.tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no padding token: set tokenizer.pad_token")
        self.padding_side, self.multiple = padding_side, multiple
        self.padding = {
            "input_ids": processor.tokenizer.pad_token_id,
            "attention_mask": 0,
            "mm_token_type_ids": 0,
            "labels": IGNORED,
        }

    def __call__(self, items: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {}
        for key, value in self.padding.items():
            if key in items[0]:
                rows = [item[key] for item in items]
                batch[key] = torch.nn.utils.rnn.pad_sequence(rows, True, value, self.padding_side)
                more = -batch[key].shape[1] % self.multiple
                if more:
                    sides = (0, more) if self.padding_side == "right" else (more, 0)
                    batch[key] = torch.nn.functional.pad(batch[key], sides, value=value)
        if "row" in items[0]:
            batch["row"] = torch.stack([item["row"] for item in items])
        for key in ("pixel_values", "image_grid_thw"):
            parts = [item[key] for item in items if key in item]
            if parts:  # a batch of texts alone has no such key
                batch[key] = torch.cat(parts)
        return batch


def labelled_only(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with what lets a model compute logits only where some row has a label next; the loss is the same.

    The head's output is the largest tensor of a step: tokens times vocabulary, in float32, more than once.

    Args:
        batch: with labels, from `VisionLanguageCollator`.

    Returns:
        It, with logits_to_keep (positions,) and shift_labels (rows, positions), the label after each.
    """
    following = batch["labels"][:, 1:]
    positions = (following != IGNORED).any(0).nonzero().flatten()
    return batch | dict(logits_to_keep=positions, shift_labels=following[:, positions])
