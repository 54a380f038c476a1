"""Examples as a model's inputs: tokens, labels on the answers alone, pictures, batches.

Unusual here: the chat template never sees a user's text. It is rendered once for each shape of conversation with marks in
place of the texts, and cut at the marks; so it is known which tokens come from the template and which from whom, whatever
the texts say. Texts are then encoded with special tokens switched off: `<|im_end|>` or `<|image_pad|>` typed by a user is
text. Where no text holds such a token, the tokens are those of the stock processor.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.utils.data import Dataset

from vlftlib.forms import Example, RowError
from vlftlib.images import ImageError, image_size, load_image
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

IGNORED = -100  # what torch's cross entropy leaves out
# Private-use characters around turn and part, or turn and "end": no template has them, and none trims or changes them.
MARK = re.compile("\ue000(?P<turn>\\d+)\\.(?P<part>\\d+|end)\ue001")


class ChatEncoder:
    """Turn conversations into tokens and labels by a processor's chat template.

    Args:
        processor: has `tokenizer`, `image_processor` and `chat_template` (its own, or its tokenizer's).
    """

    def __init__(self, processor):
        self.tokenizer = processor.tokenizer
        self.template = processor.chat_template or self.tokenizer.chat_template
        self.image_token_id = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._special = {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        self._pieces = re.compile("|".join([MARK.pattern, *map(re.escape, self._special)]))
        self._plans = {}

    def encode(self, example: Example, image_tokens: Sequence[int], prompt: bool = False) -> tuple[list[int], list[int]]:
        """Tokens and labels of one example.

        Args:
            example: what to encode.
            image_tokens: the number of tokens of each of its pictures.
            prompt: begin an assistant turn at the end, for generation.

        Returns:
            Token ids, and labels of the same length: -100 except on learnt answers and their end tokens.

        Raises:
            RowError: a text can't be encoded, or the pictures don't match their places.
        """
        messages = example.messages
        shape = tuple((m["role"], m.get("loss", True), tuple(part["type"] for part in m["content"])) for m in messages)
        places = sum(kinds.count("image") for _, _, kinds in shape)
        if places != len(image_tokens):
            raise RowError("images and places differ", f"{len(image_tokens)} images, {places} places")
        if (shape, prompt) not in self._plans:
            self._plans[shape, prompt] = self._plan(shape, prompt)
        plan = self._plans[shape, prompt]
        runs = [
            "".join(p if isinstance(p, str) else messages[p[0]]["content"][p[1]]["text"] for p in run)
            for run, _ in plan
            if not isinstance(run, int)
        ]
        try:
            encoded = iter(self.tokenizer(runs, add_special_tokens=False, split_special_tokens=True).input_ids if runs else [])
        except (TypeError, UnicodeEncodeError) as error:
            raise RowError("text can't be encoded", str(error)[:80]) from None
        ids, labels, counts = [], [], iter(image_tokens)
        for run, learnt in plan:
            if run == self.image_token_id:
                new = [run] * next(counts)
            else:
                new = [run] if isinstance(run, int) else next(encoded)
            ids += new
            labels += new if learnt else [IGNORED] * len(new)
        return ids, labels

    def _plan(self, shape: tuple, prompt: bool) -> list[tuple[object, bool]]:
        """Runs in order: a special token's id, or a list of template texts and (turn, part) places; and if it is learnt."""
        conversation = []
        for turn, (role, _, kinds) in enumerate(shape):
            content = [
                {"type": "text", "text": f"\ue000{turn}.{part}\ue001"} if kind == "text" else {"type": "image"}
                for part, kind in enumerate(kinds)
            ]
            content.append({"type": "text", "text": f"\ue000{turn}.end\ue001"})
            conversation.append({"role": role, "content": content})
        text = self.tokenizer.apply_chat_template(
            conversation, chat_template=self.template, tokenize=False, add_generation_prompt=prompt
        )
        expected = [part["text"] for turn in conversation for part in turn["content"] if part["type"] == "text"]
        if [mark.group() for mark in MARK.finditer(text)] != expected:
            raise ValueError("the chat template leaves out, repeats or reorders turns: it can't be trained on")
        plan, answer_ends, owner = [], False, None
        for piece in self._split(text):
            if isinstance(piece, int):
                plan.append((piece, answer_ends))  # the end token is learnt; the line end after it is not
                answer_ends, owner = False, None
                continue
            turn = None
            if not isinstance(piece, str):
                turn, part = piece
                role, learnt, _ = shape[turn]
                if part is None:
                    answer_ends = role == "assistant" and learnt
                    continue
                turn = turn if role == "assistant" else None
            # Neighbouring texts are encoded together, as the stock processor does; but an answer by itself, since
            # generation begins with fresh tokens after the template's text.
            if plan and not isinstance(plan[-1][0], int) and turn == owner:
                plan[-1][0].append(piece)
            else:
                plan.append(([piece], turn is not None and learnt))
            owner = turn
        return plan

    def _split(self, text: str) -> list[int | str | tuple[int, int | None]]:
        """The template's text as special tokens' ids, texts, and marks: (turn, part), or (turn, None) at a turn's end."""
        pieces, place = [], 0
        for match in self._pieces.finditer(text):
            if match.start() > place:
                pieces.append(text[place : match.start()])
            turn, part = match["turn"], match["part"]
            pieces.append(self._special[match.group()] if turn is None else (int(turn), None if part == "end" else int(part)))
            place = match.end()
        return pieces + [text[place:]] if place < len(text) else pieces


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

    `examples` are those kept, `rejected` the others, `shortened` counts those that lost turns.

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
        for example in examples:
            try:
                if not prompts and not _has_label(example):
                    raise RowError("no answer to learn")
                if max_length is not None:
                    example = self._fit(example, max_length, too_long == "drop turns")
                self.examples.append(example)
            except (RowError, ImageError) as error:
                self.rejected.append(Rejection(example.file, example.line, error.kind, error.detail))

    def _fit(self, example: Example, max_length: int, drop: bool) -> Example:
        length = full = self.count_tokens(example)
        fitting = example
        while length > max_length:
            shorter = _drop_oldest(fitting) if drop else None
            if shorter is None:
                raise RowError("too many tokens", f"{full}, limit {max_length}")
            fitting = shorter
            length = self.count_tokens(fitting)
        self.shortened += fitting is not example
        return fitting

    def count_tokens(self, example: Example) -> int:
        """The length of an example's item, from its texts and its pictures' headers alone."""
        example = _without_answer(example) if self.prompts else example
        counts = [count_image_tokens(self.processor, *image_size(image)) for image in example.images]
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
                pictures = self.processor.image_processor([load_image(image) for image in example.images], return_tensors="pt")
                item = {"pixel_values": pictures["pixel_values"], "image_grid_thw": pictures["image_grid_thw"]}
                merged = self.processor.image_processor.merge_size**2
                counts = (item["image_grid_thw"].prod(-1) // merged).tolist()
            ids, labels = self.encoder.encode(example, counts, self.prompts)
        except (RowError, ImageError) as error:
            raise ValueError(f"{example.file}:{example.line}: {error.kind}: {error.detail}") from error
        ids = torch.tensor(ids)
        item["input_ids"], item["attention_mask"] = ids, torch.ones_like(ids)
        item["mm_token_type_ids"] = (ids == self.encoder.image_token_id).long()
        if not self.prompts:
            item["labels"] = torch.tensor(labels)
            item["row"] = torch.tensor(index)  # so that the trainer can name it; no input of the model
        return item


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
    return images.get_number_of_image_patches(height, width, {}) // images.merge_size**2


class VisionLanguageCollator:
    """Items into a batch: texts padded, pictures joined in order.

    Args:
        processor: whose tokenizer names the padding token.
        padding_side: "right" for training, "left" for generation.

    Raises:
        ValueError: another side, or a tokenizer without a padding token.
    """

    def __init__(self, processor, padding_side: str = "right"):
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side {padding_side!r}: use left or right")
        if processor.tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no padding token: set tokenizer.pad_token")
        self.padding_side = padding_side
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
        if "row" in items[0]:
            batch["row"] = torch.stack([item["row"] for item in items])
        for key in ("pixel_values", "image_grid_thw"):
            parts = [item[key] for item in items if key in item]
            if parts:  # a batch of texts alone has no such key
                batch[key] = torch.cat(parts)
        return batch
