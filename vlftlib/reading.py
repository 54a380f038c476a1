"""Read files of examples, JSON lists or JSON lines, into examples and rejections; and write them in the normal form."""

import base64
import binascii
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlftlib.forms import Example, Rejection, RowError, check_text, read_row, rename_columns, short

# A path has a dot before its ending; bare base64 has none, and no picture fits into fewer characters.
BARE_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{100,}={0,2}\s*")
MAX_EMBEDDED = 64 * 2**20  # characters of a picture inside a row, which stay in memory: a 48 MB file


@dataclass(frozen=True)
class LoadedExamples:
    """What `load_examples` found: examples, rejected rows, and notes (things done to rows that are used, counted)."""

    examples: list[Example]
    rejected: list[Rejection]
    notes: Counter = field(default_factory=Counter)
    root: str = ""  # what image paths were relative to

    def __repr__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(r.kind for r in self.rejected).most_common())
        return f"{len(self.examples)} examples, {len(self.rejected)} rejected" + (f" ({kinds})" if kinds else "")


def load_examples(path: str | os.PathLike, root: str | os.PathLike | None = None, outside: bool = False) -> LoadedExamples:
    """Read a file of examples, a JSON list or JSON lines, in any of the four forms.

    Args:
        path: the file; or a LLaMA-Factory `dataset_info.json`, with `:name` after it where it has several entries.
        root: image paths are relative to this folder; by default the file's own, or that of `dataset_info.json`.
        outside: also read pictures that lie outside of `root`.

    Returns:
        The examples, and a rejection for each row that can't be used. Pictures stay on the disk; one that is embedded in its
        row (`data:`) is kept as the text that it was.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the `dataset_info.json` has no such entry, or names no local file.
    """
    given, (path, entry) = str(path), _find_entry(str(path))
    root = os.path.abspath(root if root is not None else os.path.dirname(path if entry is None else given))
    if not os.path.isdir(root):
        raise FileNotFoundError(f"no image root {root}: give the folder that image paths are relative to")
    examples, rejected, notes = [], [], Counter()
    for line, row in _read_rows(path):
        try:
            if isinstance(row, RowError):
                raise row
            if not isinstance(row, dict):
                raise RowError("not an object", f"{type(row).__name__} {short(row)}")
            if entry is not None:
                row = rename_columns(row, entry)
            images, messages = read_row(row, notes)
            images = tuple(_locate_image(image, root, outside) for image in images)
            examples.append(Example(images, messages, path, line))
        except RowError as error:
            rejected.append(Rejection(path, line, error.kind, error.detail))
    return LoadedExamples(examples, rejected, notes, root)


def write_examples(examples: Iterable[Example], path: str | os.PathLike, root: str | os.PathLike) -> None:
    """Write examples as JSON lines in the normal form: content parts, image paths relative to `root` and with `/`.

    A file that is there is replaced when all rows are written.

    Raises:
        ValueError: a picture lies outside of `root`.
    """
    root, partial = os.path.abspath(root), Path(f"{path}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            for example in examples:
                images = iter(example.images)
                turns = []
                for message in example.messages:
                    content = [
                        {"type": "image", "image": _relative(next(images), root)} if part["type"] == "image" else part
                        for part in message["content"]
                    ]
                    turns.append(message | {"content": content})
                file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _relative(image: str, root: str) -> str:
    if image.startswith("data:"):
        return image
    if not _is_under(image, root):
        raise ValueError(f"{image} lies outside of the root {root}: choose a root above all pictures")
    return os.path.relpath(image, root).replace(os.sep, "/")


def _read_rows(path: str) -> Iterator[tuple[int, object]]:
    """(line, value or RowError) for each row; lines count from 1. JSON lines in UTF-8 are read one at a time."""
    with open(path, "rb") as file:
        encoding = json.detect_encoding(file.read(4))
    if encoding.startswith("utf-8") and _starts_with_a_row(path):
        with _open_text(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parse(line.rstrip("\n"))
        return
    raw, broken = Path(path).read_bytes(), None
    try:
        text = raw.decode(encoding, "surrogateescape" if encoding.startswith("utf-8") else "surrogatepass")
    except UnicodeDecodeError as error:  # only the wide encodings get here
        text = raw[: error.start].decode(encoding, "surrogatepass")
        broken = RowError("not text", f"no {encoding} from byte {error.start} on")
    del raw
    text = text.removeprefix("\ufeff")
    yield from _list_rows(text) if text.lstrip()[:1] == "[" else _line_rows(text)
    if broken is not None:
        yield len(_split_lines(text)), broken


def _open_text(path: str):
    return open(path, encoding="utf-8-sig", errors="surrogateescape", newline=None)


def _starts_with_a_row(path: str) -> bool:
    """Whether the first line with anything on it is a JSON object: the file is JSON lines, then."""
    with _open_text(path) as lines:
        first = next((line for line in lines if line.strip()), "")
    return isinstance(_parse(first), dict)


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
                yield line, RowError("not JSON", f"after the list's end: {short(rest)}")
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
            yield line, RowError("not JSON", f"expected , or ] and what follows is lost: {short(text[place : place + 80])}")
            return


def _parse(text: str) -> object:
    try:
        return json.loads(text, strict=False)  # a bare tab inside a string is no harm
    except (ValueError, RecursionError) as error:
        return RowError("not JSON", _json_trouble(error))


def _json_trouble(error: Exception) -> str:
    return error.msg + f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


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


def _locate_image(source: object, root: str, outside: bool) -> str:
    """An absolute path, or a `data:` address, that is there and may be read.

    A link inside of the root may lead out of it: whoever set up the folder made it. A row can't make one.
    """
    if isinstance(source, dict):
        source = f"data:;base64,{source['bytes']}" if isinstance(source.get("bytes"), str) else source.get("path")
    if not isinstance(source, str) or not source or "\0" in check_text(source):
        raise RowError("image is no path", short(source))
    if source.startswith("data:"):
        return _check_data_address(source)
    if source[:7].lower() == "file://":
        source = unquote(urlsplit(source).path)
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source):
        raise RowError("network address", f"{short(source)}: download it first")
    path = _find_name(os.path.abspath(os.path.join(root, source)))
    if "." not in source and BARE_BASE64.fullmatch(source) and not os.path.exists(path):
        return _check_data_address(f"data:;base64,{source}")
    if os.sep == "/" and "\\" in source and not os.path.exists(path):
        if re.match(r"[A-Za-z]:|\\\\", source):
            raise RowError("image outside the root", f"{short(source)} is a path of another machine; root {root}")
        path = os.path.abspath(os.path.join(root, source.replace("\\", "/")))
    if not outside and not _is_under(path, root):
        # The root itself may have been reached by a link.
        below = os.path.relpath(os.path.realpath(path), os.path.realpath(root))
        if below.split(os.sep)[0] == os.pardir:
            raise RowError("image outside the root", f"{path}; root {root}")
        path = os.path.join(root, below)
    if not os.path.isfile(path):
        shown = path if len(path) <= 300 else f"{path[:297]}..."
        raise RowError("image not found", f"{shown} is no file" if os.path.exists(path) else shown)
    return path


def _find_name(path: str) -> str:
    """The path; where nothing is there, one that differs in how accents are composed (archives change it) or in end space."""
    if os.path.exists(path):
        return path
    forms = (path.strip(), unicodedata.normalize("NFC", path), unicodedata.normalize("NFD", path))
    return next((name for name in forms if os.path.exists(name)), path)


def _is_under(path: str, root: str) -> bool:
    return path.startswith(os.path.join(root, ""))


def _check_data_address(address: str) -> str:
    head, comma, content = address.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RowError("image is no path", f"{short(address)}: a data: address needs ;base64,")
    if len(content) > MAX_EMBEDDED:
        raise RowError("image too large", f"{len(content):,} characters in the row, limit {MAX_EMBEDDED:,}: save it as a file")
    try:
        base64.b64decode("".join(content.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError("image is no path", f"{short(address)}: {error}") from None
    return address
