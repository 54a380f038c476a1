"""Rows as people have them, for Qwen's scripts, LLaMA-Factory, ms-swift or an OpenAI-style export, read into one form.

The form is recognised by each row's keys. In the forms with `<image>` tags, one line end on either side of a tag belongs
to the tag (Qwen's own scripts drop it too): a model sees a picture and text, never the tag's line. In the forms with
content parts, `<image>` is text like any other.
"""

import base64
import binascii
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

IMAGE_TAG = re.compile(r"(?:\r?\n)?<image>(?:\r?\n)?")
IMAGE_PART = {"type": "image"}  # shared by all examples: one dict, not one for each picture
ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}
TURN_KEYS = ("messages", "conversations")
QUESTION_KEYS, ANSWER_KEYS = ("query", "instruction", "prompt"), ("response", "output")
# A path has a dot before its ending; bare base64 has none, and no picture fits into fewer characters.
BARE_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{100,}={0,2}\s*")


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


@dataclass(frozen=True)
class LoadedExamples:
    """What `load_examples` found: examples, rejected rows, and notes (things done to rows that are used, counted)."""

    examples: list[Example]
    rejected: list[Rejection]
    notes: Counter = field(default_factory=Counter)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(r.kind for r in self.rejected).most_common())
        return f"{len(self.examples)} examples, {len(self.rejected)} rejected" + (f" ({kinds})" if kinds else "")


class RowError(ValueError):
    """Trouble with one row: `kind` (to count by) and `detail`."""

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


def load_examples(path: str | os.PathLike, root: str | os.PathLike | None = None, outside: bool = False) -> LoadedExamples:
    """Read a file of examples, a JSON list or JSON lines, in any of the four forms.

    Args:
        path: the file; or a LLaMA-Factory `dataset_info.json`, with `:name` after it where it has several entries.
        root: image paths are relative to this folder; by default the file's own.
        outside: also read pictures that lie outside of `root`.

    Returns:
        The examples, and a rejection for each row that can't be used.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the `dataset_info.json` has no such entry, or names no local file.
    """
    path, entry = _find_entry(str(path))
    root = os.path.realpath(root if root is not None else os.path.dirname(path) or ".")
    if not os.path.isdir(root):
        raise FileNotFoundError(f"no image root {root}: give the folder that image paths are relative to")
    examples, rejected, notes = [], [], Counter()
    for line, row in _read_rows(Path(path).read_bytes()):
        try:
            if isinstance(row, RowError):
                raise row
            if not isinstance(row, dict):
                raise RowError("not an object", f"{type(row).__name__} {_short(row)}")
            if entry is not None:
                row = _rename_columns(row, entry)
            images, messages = _read_row(row, notes)
            images = tuple(_locate_image(image, root, outside) for image in images)
            examples.append(Example(images, messages, path, line))
        except RowError as error:
            rejected.append(Rejection(path, line, error.kind, error.detail))
    return LoadedExamples(examples, rejected, notes)


def write_examples(examples: Iterable[Example], path: str | os.PathLike, root: str | os.PathLike) -> None:
    """Write examples as JSON lines in the normal form: content parts, image paths relative to `root` and with `/`.

    Raises:
        ValueError: a picture lies outside of `root`.
    """
    root = os.path.realpath(root)
    lines = []
    for example in examples:
        images = iter(example.images)
        turns = []
        for message in example.messages:
            content = [
                {"type": "image", "image": _relative(next(images), root)} if part["type"] == "image" else part
                for part in message["content"]
            ]
            turns.append(message | {"content": content})
        lines.append(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
    Path(path).write_text("".join(lines), encoding="utf-8", newline="\n")


def _relative(image: str, root: str) -> str:
    if image.startswith("data:"):
        return image
    relative = os.path.relpath(image, root)
    if relative.split(os.sep)[0] == os.pardir:
        raise ValueError(f"{image} lies outside of the root {root}: choose a root above all pictures")
    return relative.replace(os.sep, "/")


def _read_rows(raw: bytes) -> Iterator[tuple[int, object]]:
    """(line, value or RowError) for each row; lines count from 1."""
    encoding = json.detect_encoding(raw)
    wide = not encoding.startswith("utf-8")
    try:
        text, broken = raw.decode(encoding, "surrogatepass" if wide else "surrogateescape"), None
    except UnicodeDecodeError as error:  # only the wide encodings get here
        text = raw[: error.start].decode(encoding, "surrogatepass")
        broken = RowError("not text", f"no {encoding} from byte {error.start} on")
    text = text.removeprefix("\ufeff")
    yield from _list_rows(text) if text.lstrip()[:1] == "[" else _line_rows(text)
    if broken is not None:
        yield len(_split_lines(text)), broken


def _split_lines(text: str) -> list[str]:
    # Not str.splitlines: that also cuts at U+2028 and others, which may stand inside a JSON string.
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _line_rows(text: str) -> Iterator[tuple[int, object]]:
    lines = _split_lines(text)
    if text.lstrip()[:1] == "{" and text.rstrip()[-1:] == "}" and not isinstance(_parse(text), RowError):
        yield 1 + next(i for i, line in enumerate(lines) if line.strip()), _parse(text)  # one object, over several lines
        return
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _parse(line)


def _list_rows(text: str) -> Iterator[tuple[int, object]]:
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    decoder, space = json.JSONDecoder(strict=False), re.compile(r"\s*")
    place, line, counted = space.match(text, text.index("[") + 1).end(), 1, 0
    while True:
        line, counted = line + text.count("\n", counted, place), place
        if text[place : place + 1] == "]":
            rest = text[place + 1 :].strip()
            if rest:
                yield line, RowError("not JSON", f"after the list's end: {_short(rest)}")
            return
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            # Inside a list there is no telling where the next row begins.
            yield line, RowError("not JSON", f"the list breaks off here, what follows is lost: {_json_trouble(error)}")
            return
        yield line, value
        place = space.match(text, place).end()
        if text[place : place + 1] == ",":
            place = space.match(text, place + 1).end()
        elif text[place : place + 1] != "]":
            line += text.count("\n", counted, place)
            yield line, RowError("not JSON", f"expected , or ] and what follows is lost: {_short(text[place : place + 80])}")
            return


def _parse(text: str) -> object:
    try:
        return json.loads(text, strict=False)  # a bare tab inside a string is no harm
    except (ValueError, RecursionError) as error:
        return RowError("not JSON", _json_trouble(error))


def _json_trouble(error: Exception) -> str:
    return error.msg + f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _find_entry(path: str) -> tuple[str, dict | None]:
    """The data file, and the entry of `dataset_info.json` that describes it, if one does."""
    name = None
    if not os.path.exists(path) and ".json:" in path:
        path, name = path.rsplit(":", 1)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no data file {path}")
    if os.path.basename(path) != "dataset_info.json":
        if name is not None:
            raise ValueError(f"{path}:{name}: only a dataset_info.json has named entries")
        return path, None
    entries = json.loads(Path(path).read_bytes())
    if name is None and len(entries) == 1:
        name = next(iter(entries))
    if name not in entries:
        raise ValueError(f"{path} has no entry {name!r}: give one of {', '.join(entries)} as {path}:NAME")
    entry = entries[name]
    if "file_name" not in entry:
        raise ValueError(f"{path}, entry {name}: no file_name; data from the network is not read, download it first")
    data = os.path.join(os.path.dirname(path), entry["file_name"])
    if not os.path.isfile(data):
        raise FileNotFoundError(f"{path}, entry {name}: no data file {data}")
    return data, entry


def _rename_columns(row: dict, entry: dict) -> dict:
    """A row with LLaMA-Factory's column and tag names replaced by the usual ones."""
    columns, tags = entry.get("columns", {}), entry.get("tags", {})
    renamed = {key: row[columns[key]] for key in ("images", "videos", "audios", "system", "history") if columns.get(key) in row}
    if entry.get("formatting", "alpaca") == "alpaca":
        for key, usual in {"prompt": "instruction", "query": "input", "response": "output"}.items():
            renamed[usual] = row.get(columns.get(key, usual))
        return renamed
    roles = {tags.get(f"{role}_tag", name): role for role, name in (("user", "human"), ("assistant", "gpt"), ("system", "system"))}
    turns = row.get(columns.get("messages", "conversations"))
    role_key, content_key = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    if isinstance(turns, list):
        turns = [
            {"role": roles.get(turn.get(role_key), turn.get(role_key)), "content": turn.get(content_key), "loss": turn.get("loss")}
            if isinstance(turn, dict)
            else turn
            for turn in turns
        ]
    return renamed | {"messages": turns}


def _read_row(row: dict, notes: Counter) -> tuple[list, list[dict]]:
    """Image sources in order, and messages in the normal form."""
    for key in ("video", "videos", "audio", "audios"):
        if row.get(key):
            raise RowError("video or audio", f"{key} is not supported: give frames as images")
    column = row.get("images", row.get("image"))
    column = [] if column is None else column if isinstance(column, list) else [column]
    supply, images, messages = iter(column), [], []
    turns = _turns(row)
    for number, (role, content, loss) in enumerate(turns):
        if role not in ROLES:
            raise RowError("unknown role", f"{_short(role)}: use one of {', '.join(ROLES)}")
        role = ROLES[role]
        if role == "system" and number > 0:
            raise RowError("system turn is not first", f"turn {number + 1}")
        parts = []
        for text, source in _parts(content, supply, notes):
            if source is not None:
                images.append(source)
                parts.append(IMAGE_PART)
            elif text:
                parts.append({"type": "text", "text": _check_text(text)})
        message = {"role": sys.intern(role), "content": parts}
        if loss is not None and role == "assistant":
            if loss not in (0, 1):  # also False and True
                raise RowError("unknown loss switch", f"{_short(loss)}: use true or false")
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


def _turns(row: dict) -> list[tuple[object, object, object]]:
    """(role, content, loss switch) of each turn, whatever the row's keys."""
    key = next((key for key in TURN_KEYS if row.get(key) is not None), None)
    if key is not None:
        if not isinstance(row[key], list) or not all(isinstance(turn, dict) for turn in row[key]):
            raise RowError("turns are not a list of objects", f"{key}: {_short(row[key])}")
        turns = [
            (turn.get("role", turn.get("from")), turn.get("content", turn.get("value")), turn.get("loss", turn.get("weight")))
            for turn in row[key]
        ]
        return ([("system", row["system"], None)] if row.get("system") else []) + turns
    question = next((key for key in QUESTION_KEYS if row.get(key) is not None), None)
    answer = next((key for key in ANSWER_KEYS if row.get(key) is not None), None)
    if question is None or answer is None:
        raise RowError("unknown form", f"keys {_short(list(row))}: needs messages, conversations, or a question and an answer")
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowError("history is not a list of pairs", _short(history))
    text = row[question]
    if row.get("input"):
        if not isinstance(text, str) or not isinstance(row["input"], str):
            raise RowError("content is not text", f"{question}, input: {_short((text, row['input']))}")
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
        raise RowError("content is not text", _short(content))
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield part["text"], None
        elif kind in ("image", "image_url"):
            source = part.get(kind, part.get("image", part.get("url", part.get("path"))))
            if kind == "image_url" and isinstance(source, dict):
                source = source.get("url")
            if part.get("min_pixels") or part.get("max_pixels"):
                notes["min_pixels and max_pixels of a picture ignored: the processor's hold"] += 1
            yield None, take() if source is None else source
        else:
            raise RowError("unknown content part", _short(part))


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        kind = "a byte that is no UTF-8" if 0xDC80 <= ord(text[error.start]) <= 0xDCFF else "half a surrogate pair"
        raise RowError("text can't be encoded", f"{kind} at character {error.start + 1} of {_short(text)}") from None
    return text


def _locate_image(source: object, root: str, outside: bool) -> str:
    """An absolute path, or a `data:` address, that is there and may be read."""
    if isinstance(source, dict):
        source = f"data:;base64,{source['bytes']}" if isinstance(source.get("bytes"), str) else source.get("path")
    if not isinstance(source, str) or not source:
        raise RowError("image is no path", _short(source))
    if "\0" in _check_text(source):
        raise RowError("image is no path", _short(source))
    if source.startswith("data:"):
        return _check_data_address(source)
    if source.startswith("file://"):
        source = unquote(urlsplit(source).path)
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source):
        raise RowError("network address", f"{_short(source)}: download it first")
    path = os.path.join(root, source)
    if "\\" in source and os.sep == "/" and not os.path.exists(path):
        path = os.path.join(root, source.replace("\\", "/"))
        if re.match(r"[A-Za-z]:|\\\\", source):
            raise RowError("image outside the root", f"{source} is a path of another machine; root {root}")
    if "." not in source and BARE_BASE64.fullmatch(source) and not (len(source) < 256 and os.path.exists(path)):
        return _check_data_address(f"data:;base64,{source}")
    try:
        path = os.path.realpath(path)
        if not outside and os.path.commonpath([path, root]) != root:
            raise RowError("image outside the root", f"{path}; root {root}")
        if not os.path.isfile(path):
            raise RowError("image not found", path if not os.path.exists(path) else f"{path} is no file")
    except (OSError, ValueError) as error:
        if isinstance(error, RowError):
            raise
        raise RowError("image is no path", f"{_short(source)}: {error}") from None
    return path


def _check_data_address(address: str) -> str:
    head, comma, content = address.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RowError("image is no path", f"{_short(address)}: a data: address needs ;base64,")
    try:
        base64.b64decode("".join(content.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError("image is no path", f"{_short(address)}: {error}") from None
    return address
