"""Rows as people have them, for Qwen's scripts, LLaMA-Factory, ms-swift or an OpenAI-style export, read into one form.

The form is recognised by each row's keys. In the forms with `<image>` tags, one line end on either side of a tag belongs
to the tag (Qwen's own scripts drop it too): a model sees a picture and text, never the tag's line. In the forms with
content parts, `<image>` is text like any other.
"""

import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

IMAGE_TAG = re.compile(r"(?:\r?\n)?<image>(?:\r?\n)?")
IMAGE_PART = {"type": "image"}  # shared by all examples: one dict, not one for each picture
ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}
TURN_KEYS = ("messages", "conversations")
IGNORED_KEYS = ("rejected", "rejected_response", "rejected_messages", "rejected_images")  # of preference data
QUESTION_KEYS, ANSWER_KEYS = ("query", "instruction", "prompt"), ("response", "output")


@dataclass(frozen=True, slots=True)
class Example:
    """One row of data: pictures and the conversation about them.

    `messages` are {"role", "content"}; content is a list of {"type": "text", "text": ...} and {"type": "image"}, and the
    n-th image part is `images[n]`, an absolute path or a `data:` address. An assistant turn that shall not be learnt
    also has {"loss": False}.
    """

    images: tuple[str, ...]
    messages: list[dict]
    file: str
    line: int

    @property
    def answer(self) -> str:
        """The text of the last assistant turn."""
        turn = next(message for message in reversed(self.messages) if message["role"] == "assistant")
        return "".join(part.get("text", "") for part in turn["content"])

    @property
    def picture_names(self) -> list[str]:
        """The pictures without their folders, which differ by machine; an embedded one is its own name."""
        return [image if image.startswith("data:") else os.path.basename(image) for image in self.images]


def hash_examples(parts: Mapping[str, Sequence[Example]]) -> str:
    """Sixteen hexadecimal digits over the texts, pictures' names and order of a data set's parts."""
    rows = [(name, example.picture_names, example.messages) for name, part in parts.items() for example in part]
    return hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Rejection:
    """A row that isn't used: where it stands, what kind of trouble (to count by), and the value that caused it."""

    file: str
    line: int
    kind: str
    detail: str = ""

    @property
    def reason(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class RowError(ValueError):
    """Trouble with one row: `kind` (to count by) and `detail`."""

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


def short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def rename_columns(row: dict, entry: dict) -> dict:
    """A row with the column and tag names of a `dataset_info.json` entry (LLaMA-Factory's) replaced by the usual ones."""
    columns, tags = entry.get("columns", {}), entry.get("tags", {})
    usual_keys = ("images", "videos", "audios", "system", "history", "tools", "rejected")
    renamed = {key: row.get(columns[key]) for key in usual_keys if key in columns}
    if entry.get("formatting", "alpaca") == "alpaca":
        for key, usual in {"prompt": "instruction", "query": "input", "response": "output"}.items():
            renamed[usual] = row.get(columns.get(key, usual))
        return renamed
    key = columns.get("messages", "conversations")
    if not isinstance(row.get(key), list) or not all(isinstance(turn, dict) for turn in row[key]):
        raise RowError("turns are not a list of objects", f"{key}: {short(row.get(key))}")
    role_key, content_key = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    usual = {"user": "human", "assistant": "gpt", "system": "system"}
    roles = {tags.get(f"{role}_tag", tag): role for role, tag in usual.items()}
    turns = []
    for turn in row[key]:
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in roles:
            raise RowError("unknown role", f"{short(role)}: the entry's tags are {', '.join(roles)}")
        turns.append({"role": roles[role], "content": turn.get(content_key), "loss": turn.get("loss")})
    return renamed | {"messages": turns}


def read_row(row: dict, notes: Counter) -> tuple[list, list[dict]]:
    """Image sources in order, and messages in the normal form."""
    for key in ("video", "videos", "audio", "audios"):
        if row.get(key):
            raise RowError("video or audio", f"{key} is not supported: give frames as images")
    for key in ("tools", "objects"):  # ms-swift writes boxes into the text from the latter
        if row.get(key):
            raise RowError("unsupported key", f"{key}: {short(row[key])}: write into the text what the model shall see")
    for key in IGNORED_KEYS:
        if row.get(key):
            notes[f"{key} ignored: only the answer is learnt"] += 1
    column = _first(row, "images", "image")
    column = [] if column in (None, "") else column if isinstance(column, list) else [column]
    supply, images, messages = iter(column), [], []
    turns = _turns(row)
    for number, (role, content, loss) in enumerate(turns):
        if not isinstance(role, str) or role not in ROLES:
            raise RowError("unknown role", f"{short(role)}: use one of {', '.join(ROLES)}")
        role = ROLES[role]
        if role == "system" and number > 0:
            raise RowError("system turn is not first", f"turn {number + 1}")
        parts = []
        for text, source in _parts(content, supply, notes):
            if source is not None:
                images.append(source)
                parts.append(IMAGE_PART)
            elif text:
                parts.append({"type": "text", "text": check_text(text)})
        message = {"role": sys.intern(role), "content": parts}
        if loss is not None and role == "assistant":
            if loss not in (0, 1):  # also False and True
                raise RowError("unknown loss switch", f"{short(loss)}: use true or false")
            if not loss:
                message["loss"] = False
        messages.append(message)
    rest = list(supply)
    if rest and images:
        raise RowError("images and <image> tags differ", f"{len(column)} images, {len(column) - len(rest)} tags")
    if rest:  # what ms-swift does, too
        first = next((m for m in messages if m["role"] == "user"), None)
        if first is None:
            raise RowError("images without a user turn", f"{len(rest)} images")
        first["content"][:0] = [IMAGE_PART] * len(rest)
        images = rest
        notes["images without a tag, put before the first question"] += 1
    learnt = [m for m in messages if m["role"] == "assistant" and m.get("loss", True)]
    if not learnt:
        raise RowError("no answer to learn", "no assistant turn" if messages else "no turn at all")
    if not any(part.get("text", "").strip() for m in learnt for part in m["content"]):
        raise RowError("no answer to learn", "every answer is empty")
    return images, messages


def _first(of: dict, *keys: str) -> object:
    """The value of the first key that has one: tables exported as JSON fill what a row lacks with null."""
    return next((of[key] for key in keys if of.get(key) is not None), None)


def _turns(row: dict) -> list[tuple[object, object, object]]:
    """(role, content, loss switch) of each turn, whatever the row's keys."""
    key = next((key for key in TURN_KEYS if row.get(key) is not None), None)
    if key is not None:
        if not isinstance(row[key], list) or not all(isinstance(turn, dict) for turn in row[key]):
            raise RowError("turns are not a list of objects", f"{key}: {short(row[key])}")
        turns = [
            (_first(turn, "role", "from"), _first(turn, "content", "value"), _first(turn, "loss", "weight"))
            for turn in row[key]
        ]
        return ([("system", row["system"], None)] if row.get("system") else []) + turns
    question = next((key for key in QUESTION_KEYS if row.get(key) is not None), None)
    answer = next((key for key in ANSWER_KEYS if row.get(key) is not None), None)
    if question is None or answer is None:
        raise RowError("unknown form", f"keys {short(list(row))}: needs messages, conversations, or a question and an answer")
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowError("history is not a list of pairs", short(history))
    text = row[question]
    if row.get("input"):
        if not isinstance(text, str) or not isinstance(row["input"], str):
            raise RowError("content is not text", f"{question}, input: {short((text, row['input']))}")
        text = f"{text}\n{row['input']}" if text else row["input"]
    turns = [("system", row["system"], None)] if row.get("system") else []
    for asked, answered in [*history, (text, row[answer])]:
        turns += [("user", asked, None), ("assistant", answered, None)]
    return turns


def _parts(content: object, supply: Iterator, notes: Counter) -> Iterator[tuple[str | None, object]]:
    """(text, None) or (None, image source) in order; tags and bare image parts take the next image from `supply`."""

    def take():
        image = next(supply, None)
        if image is None:
            raise RowError("images and <image> tags differ", "more places than images")
        return image

    if isinstance(content, str):
        for number, text in enumerate(IMAGE_TAG.split(content)):
            if number:
                yield None, take()
            yield text, None
        return
    if not isinstance(content, list):
        raise RowError("content is not text", short(content))
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield part["text"], None
        elif kind in ("image", "image_url"):
            source = _first(part, kind, "image", "url", "path")
            if kind == "image_url" and isinstance(source, dict):
                source = source.get("url")
            if part.get("min_pixels") or part.get("max_pixels"):
                notes["min_pixels and max_pixels of a picture ignored: the processor's hold"] += 1
            yield None, take() if source is None else source
        else:
            raise RowError("unknown content part", short(part))


def check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        kind = "a byte that is no UTF-8" if 0xDC80 <= ord(text[error.start]) <= 0xDCFF else "half a surrogate pair"
        raise RowError("text can't be encoded", f"{kind} at character {error.start + 1} of {short(text)}") from None
    return text
