import base64
import json
import pickle
import random
import re
import tracemalloc
import unicodedata

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vlftlib.dataset import VisionLanguageCollator, VisionLanguageDataset, load_examples, write_examples
from vlftlib.forms import Example
from vlftlib.images import load_image
from vlftlib.models import ImageTextProcessor
from vlftlib.reading import MAX_EMBEDDED
from vlftlib.tiny_base import CHAT_TEMPLATE, build_tokenizer

# What the template that comes with Qwen2.5-VL does: string or list content, images by type or key, numbered on request.
QWEN_TEMPLATE = (
    "{% set images = namespace(n=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}{% set images.n = images.n + 1 %}"
    "{% if add_vision_id %}Picture {{ images.n }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_end|>", "<|im_start|>assistant\n", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>", "<image>"]
SPECIAL += ["\n", " ", "\ue0000.0\ue001"]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module", params=[CHAT_TEMPLATE, QWEN_TEMPLATE], ids=["tiny", "qwen"])
def processor(request, tokenizer):
    images = Qwen2VLImageProcessorPil(min_pixels=4 * 28 * 28, max_pixels=16 * 28 * 28)
    return ImageTextProcessor(images, tokenizer, chat_template=request.param)


@pytest.fixture
def pictures(tmp_path):
    for name, size in {"wide": (160, 60), "tall": (30, 90), "square": (50, 50)}.items():
        Image.effect_noise(size, 90).convert("RGB").save(tmp_path / f"{name}.png")
    return tmp_path


def text(value):
    return {"type": "text", "text": value}


def turns(*contents, system=None):
    """User and assistant turns in alternation; a string, or a list of strings and None for a picture."""
    messages = [{"role": "system", "content": [text(system)]}] if system is not None else []
    for number, content in enumerate(contents):
        parts = [content] if isinstance(content, str) else content
        parts = [{"type": "image"} if part is None else text(part) for part in parts]
        messages.append({"role": ("user", "assistant")[number % 2], "content": parts})
    return messages


def example(*contents, images=(), system=None):
    return Example(tuple(map(str, images)), turns(*contents, system=system), "test", 1)


def load_rows(folder, *rows, **options):
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return load_examples(folder / "rows.jsonl", **options)


def learnt(processor, item):
    """The unmasked labels, decoded."""
    return processor.tokenizer.decode(item["labels"][item["labels"] != -100])


# Inputs and labels


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_inputs_are_the_stock_processors(processor, pictures, system):
    names = [pictures / "wide.png", pictures / "tall.png"]
    asked = ["Left ", None, " or right", None, "\nWhich?"]
    row = example(asked, "left", "Why?\n\nSay.", "it is wide", images=names, system=system)
    item = VisionLanguageDataset([row], processor)[0]
    rendered = processor.tokenizer.apply_chat_template(row.messages, chat_template=processor.chat_template, tokenize=False)
    stock = processor(images=[load_image(name) for name in names], text=[rendered], return_tensors="pt")
    assert set(stock) | {"labels", "row"} == set(item)
    for key in stock:
        torch.testing.assert_close(item[key], stock[key].reshape(item[key].shape), rtol=0, atol=0)


def test_labels_are_answers_and_their_end_tokens(processor, pictures):
    row = example([None, "A?"], "yes", "B?", "no", images=[pictures / "square.png"])
    item = VisionLanguageDataset([row], processor)[0]
    assert learnt(processor, item) == "yes<|im_end|>no<|im_end|>"
    kept = item["labels"] != -100
    assert torch.equal(item["labels"][kept], item["input_ids"][kept])


def test_loss_switch(processor):
    row = example("A?", "yes", "B?", "no")
    row.messages[1]["loss"] = False
    assert learnt(processor, VisionLanguageDataset([row], processor)[0]) == "no<|im_end|>"


def test_typed_special_tokens_are_text(processor, pictures):
    typed = "<|im_end|>\n<|im_start|>assistant\nyes<|image_pad|>"
    row = example([None, typed], typed, images=[pictures / "square.png"], system=typed)
    item = VisionLanguageDataset([row], processor)[0]
    assert learnt(processor, item) == typed + "<|im_end|>"
    assert item["labels"][item["labels"] != -100][-1] == processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    specials = torch.isin(item["input_ids"], torch.tensor(processor.tokenizer.all_special_ids))
    places = int(item["image_grid_thw"].prod()) // 4
    assert specials.sum() == 3 * 2 + 2 + places  # start and end of three turns, the picture's frame and places
    assert item["mm_token_type_ids"].sum() == places


texts = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(SPECIAL)), max_size=4).map("".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=st.lists(texts, min_size=1, max_size=3), answered=texts, second=texts, switch=st.booleans())
def test_any_text_survives(processor, asked, answered, second, switch):
    row = example([*asked], answered, "more", second)
    row.messages[1] |= {} if switch else {"loss": False}
    item = VisionLanguageDataset([row], processor)[0]
    expected = (answered + "<|im_end|>" if switch else "") + second + "<|im_end|>"
    normalize = processor.tokenizer.backend_tokenizer.normalizer.normalize_str
    assert learnt(processor, item) == normalize(answered) * switch + "<|im_end|>" * switch + normalize(second) + "<|im_end|>"
    assert unicodedata.normalize("NFC", learnt(processor, item)) == unicodedata.normalize("NFC", expected)


def test_prompt_ends_where_the_answer_begins(processor, pictures):
    row = example([None, "A?"], "yes", "B?", "no", images=[pictures / "square.png"])
    item, prompt = VisionLanguageDataset([row], processor)[0], VisionLanguageDataset([row], processor, prompts=True)[0]
    begin = len(prompt["input_ids"])
    assert torch.equal(item["input_ids"][:begin], prompt["input_ids"])
    assert processor.tokenizer.decode(item["labels"][begin:][:-1]) == row.answer + "<|im_end|>"
    assert "labels" not in prompt


def test_prompt_without_an_answer(processor):
    ids = VisionLanguageDataset([example("A?")], processor, prompts=True)[0]["input_ids"]
    assert processor.tokenizer.decode(ids).endswith("user\nA?<|im_end|>\n<|im_start|>assistant\n")


def test_nothing_to_learn_is_a_rejection(processor):
    row = example("A?", "yes")
    row.messages[1]["loss"] = False
    dataset = VisionLanguageDataset([row, example("A?"), example("A?", "yes")], processor)
    assert [r.kind for r in dataset.rejected] == ["no answer to learn"] * 2 and len(dataset) == 1


def test_pictures_and_places_must_match(processor, pictures):
    dataset = VisionLanguageDataset([example(["A?"], "yes", images=[pictures / "wide.png"])], processor)
    with pytest.raises(ValueError, match="test:1: images and places differ: 1 images, 0 places"):
        dataset[0]


def test_picture_in_the_answer(processor, pictures):
    row = example([None, "Draw."], ["Here: ", None, " done"], images=[pictures / "wide.png", pictures / "tall.png"])
    item, prompt = VisionLanguageDataset([row], processor)[0], VisionLanguageDataset([row], processor, prompts=True)[0]
    assert learnt(processor, item) == "Here:  done<|im_end|>"
    assert len(item["image_grid_thw"]) == 2 and len(prompt["image_grid_thw"]) == 1


def test_template_that_drops_turns_is_refused(tokenizer):
    images = Qwen2VLImageProcessorPil()
    processor = ImageTextProcessor(images, tokenizer, chat_template="{{ messages[0].content[0].text }}")
    with pytest.raises(ValueError, match="leaves out, repeats or reorders"):
        VisionLanguageDataset([example("A?", "yes")], processor)[0]


# Length


def test_long_examples_are_rejected_whole(processor, pictures):
    rows = [example([None, "A?"], "yes", images=[pictures / "wide.png"]), example("A? " * 50, "yes")]
    length = len(VisionLanguageDataset(rows, processor)[0]["input_ids"])
    dataset = VisionLanguageDataset(rows, processor, max_length=length)
    assert dataset.examples == rows[:1] and len(dataset[0]["input_ids"]) == length
    dataset = VisionLanguageDataset(rows, processor, max_length=length - 1)
    assert not dataset.examples and str(dataset.rejected[0]) == f"test:1: too many tokens: {length}, limit {length - 1}"


def test_old_turns_are_dropped_on_request(processor, pictures):
    row = example("old " * 30, "a", [None, "see"], "b", "mid", "c", "last?", "d", images=[pictures / "wide.png"], system="S")
    shorter = example([None, "see"], "b", "mid", "c", "last?", "d", images=row.images, system="S")
    shortest = example([None, "see"], "b", "last?", "d", images=row.images, system="S")
    first, second, third = VisionLanguageDataset([row, shorter, shortest], processor).lengths
    for limit, expected in ((first, row), (first - 1, shorter), (second - 1, shortest)):
        dataset = VisionLanguageDataset([row], processor, max_length=limit, too_long="drop turns")
        assert dataset.examples == [expected] and dataset.shortened == (expected is not row)
    dataset = VisionLanguageDataset([row], processor, max_length=third - 1, too_long="drop turns")
    assert dataset.rejected[0].detail == f"{first}, limit {third - 1}"
    with pytest.raises(ValueError, match="use 'reject' or 'drop turns'"):
        VisionLanguageDataset([row], processor, too_long="cut")


def test_tokens_are_counted_from_headers(tokenizer, tmp_path):
    processor = ImageTextProcessor(Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=90_000), tokenizer, CHAT_TEMPLATE)
    sizes = [(1, 1), (13, 200), (28, 28), (199, 1), (333, 444), (1000, 10), (41, 43), (640, 480), (29, 5600)]
    rng = random.Random(0)
    sizes += [(round(10 ** rng.uniform(1, 3)), round(10 ** rng.uniform(1, 3))) for _ in range(50)]
    for width, height in sizes:
        Image.new("L", (width, height)).save(tmp_path / "p.png")
        dataset = VisionLanguageDataset([example([None, "A?"], "yes", images=[tmp_path / "p.png"])], processor)
        assert dataset.count_tokens(dataset.examples[0]) == len(dataset[0]["input_ids"]), (width, height)


# Batches


def test_batches_keep_every_row(processor, pictures):
    rows = [
        example([None, "A?", None], "yes", images=[pictures / "wide.png", pictures / "tall.png"]),
        example("No picture here?", "no"),
        example([None], "a longer answer", images=[pictures / "square.png"]),
    ]
    dataset = VisionLanguageDataset(rows, processor)
    items = [dataset[i] for i in range(3)]
    for side in ("right", "left"):
        batch = VisionLanguageCollator(processor, side)(items)
        assert torch.equal(batch["image_grid_thw"], torch.cat([items[0]["image_grid_thw"], items[2]["image_grid_thw"]]))
        assert torch.equal(batch["pixel_values"], torch.cat([items[0]["pixel_values"], items[2]["pixel_values"]]))
        for i, item in enumerate(items):
            real = batch["attention_mask"][i].bool()
            assert real[0 if side == "right" else -1] and real.sum() == len(item["input_ids"])
            for key in ("input_ids", "labels", "mm_token_type_ids"):
                assert torch.equal(batch[key][i][real], item[key])
            assert (batch["labels"][i][~real] == -100).all() and (batch["mm_token_type_ids"][i][~real] == 0).all()


def test_batch_of_texts_alone(processor):
    dataset = VisionLanguageDataset([example("A?", "yes"), example("And B?", "no")], processor)
    batch = VisionLanguageCollator(processor)([dataset[0], dataset[1]])
    assert sorted(batch) == ["attention_mask", "input_ids", "labels", "mm_token_type_ids", "row"]
    assert batch["row"].tolist() == [0, 1]


def test_collator_refuses(processor):
    with pytest.raises(ValueError, match="left or right"):
        VisionLanguageCollator(processor, "both")


def test_dataset_pickles(processor, pictures):
    dataset = VisionLanguageDataset([example([None, "A?"], "yes", images=[pictures / "square.png"])], processor)
    dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert all(torch.equal(copy[0][key], value) for key, value in dataset[0].items())


@pytest.mark.slow
def test_workers_under_spawn(tokenizer, pictures):
    processor = ImageTextProcessor(Qwen2VLImageProcessorPil(max_pixels=9000), tokenizer, chat_template=CHAT_TEMPLATE)
    dataset = VisionLanguageDataset([example([None, "A?"], "yes", images=[pictures / "square.png"])] * 4, processor)
    options = dict(batch_size=2, collate_fn=VisionLanguageCollator(processor))
    alone = list(DataLoader(dataset, **options))
    spawned = list(DataLoader(dataset, **options, num_workers=2, multiprocessing_context="spawn"))
    assert len(spawned) == 2 and torch.equal(alone[1]["pixel_values"], spawned[1]["pixel_values"])


# Reading


ANSWER = {"role": "assistant", "content": [text("yes")]}
FORMS = {
    "qwen": {
        "image": "wide.png",
        "conversations": [{"from": "human", "value": "<image>\nA?"}, {"from": "gpt", "value": "yes"}],
    },
    "llama-factory": {
        "messages": [{"role": "user", "content": "<image>A?"}, {"role": "assistant", "content": "yes"}],
        "images": ["wide.png"],
    },
    "alpaca": {"instruction": "<image>A?", "input": "", "output": "yes", "images": ["wide.png"]},
    "ms-swift": {"query": "<image>A?", "response": "yes", "images": [{"bytes": None, "path": "wide.png"}]},
    "ms-swift without a tag": {"query": "A?", "response": "yes", "images": ["wide.png"]},
    "openai": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "wide.png"}}, text("A?")]},
            {"role": "assistant", "content": "yes"},
        ]
    },
    "qwen parts": {
        "messages": [{"role": "user", "content": [{"type": "image", "image": "wide.png"}, text("A?")]}, ANSWER],
    },
    "parts and a column": {
        "messages": [{"role": "user", "content": [{"type": "image"}, text("A?")]}, ANSWER],
        "images": "wide.png",
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_the_same_example(pictures, form):
    loaded = load_rows(pictures, FORMS[form])
    assert not loaded.rejected
    (row,) = loaded.examples
    assert row.images == (str(pictures / "wide.png"),)
    assert row.messages == turns([None, "A?"], "yes")
    assert row.answer == "yes" and row.line == 1


@pytest.mark.parametrize("layout", ["lines", "list", "pretty list", "one object"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_layouts_encodings_line_ends(tmp_path, layout, encoding, end):
    rows = [{"query": "größer\u2028?", "response": f"Antwort {i} 図"} for i in range(1 if layout == "one object" else 3)]
    content = {
        "lines": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
        "list": json.dumps(rows, ensure_ascii=False),
        "pretty list": json.dumps(rows, ensure_ascii=False, indent=2),
        "one object": json.dumps(rows[0], ensure_ascii=False, indent=2),
    }[layout]
    (tmp_path / "rows").write_bytes((content + "\n").replace("\n", end).encode(encoding))
    loaded = load_examples(tmp_path / "rows")
    assert not loaded.rejected
    assert [e.messages for e in loaded.examples] == [turns("größer\u2028?", row["response"]) for row in rows]
    expected = {"lines": [1, 2, 3], "list": [1, 1, 1], "pretty list": [2, 6, 10], "one object": [1]}[layout]
    assert [e.line for e in loaded.examples] == expected


def test_multi_turn_interleaved_system_history(pictures):
    loaded = load_rows(
        pictures,
        {
            "system": "Be brief.",
            "conversations": [
                {"from": "human", "value": "First\n<image>\nthen <image> and?"},
                {"from": "gpt", "value": "one", "loss": False},
                {"from": "human", "value": "text"},
                {"from": "gpt", "value": "two"},
            ],
            "image": ["wide.png", "tall.png"],
        },
        {
            "system": "S",
            "query": "<image>c",
            "response": "d",
            "history": [["<image>a", "b"]],
            "images": ["wide.png", "tall.png"],
        },
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    )
    assert not loaded.rejected
    first, second, third = loaded.examples
    expected = turns(["First", None, "then ", None, " and?"], "one", "text", "two", system="Be brief.")
    expected[2]["loss"] = False
    assert first.messages == expected and [name[-8:] for name in first.images] == ["wide.png", "tall.png"]
    assert second.messages == turns([None, "a"], "b", [None, "c"], "d", system="S")
    assert third.messages == turns("Add.\n1 and 2", "3")


def test_tables_fill_what_a_row_lacks_with_null(pictures):
    filled = {"type": "image", "image": "wide.png", "text": None, "image_url": None}
    loaded = load_rows(
        pictures,
        FORMS["qwen"] | {"images": None, "messages": None, "system": None, "videos": None},
        {"images": ["wide.png"], "messages": [{"role": None, "from": "human", "content": None, "value": "<image>A?"}, ANSWER]},
        {"messages": [{"role": "user", "content": [filled, text("A?") | {"image": None}]}, ANSWER]},
    )
    assert not loaded.rejected and all(e.messages == turns([None, "A?"], "yes") for e in loaded.examples)
    (row,) = load_rows(pictures, {"image": "", "query": "A?", "response": "yes"}).examples  # Qwen's rows without a picture
    assert row.messages == turns("A?", "yes") and not row.images


def test_what_is_passed_over_is_noted(pictures):
    loaded = load_rows(pictures, {"query": "A?", "response": "yes", "rejected_response": "no"})
    assert loaded.notes == {"rejected_response ignored: only the answer is learnt": 1}


BAD = {
    "not JSON": '{"query": "a", "response": ',
    "not an object": "[1, 2]x"[1:2],
    "unknown form": {"text": "a"},
    "unknown role": {"messages": [{"role": "tool", "content": "a"}]},
    "no answer to learn": {"messages": [{"role": "user", "content": "a"}]},
    "image not found": {"query": "a", "response": "b", "images": ["none.png"]},
    "network address": {"query": "a", "response": "b", "images": ["https://x.org/a.png"]},
    "image outside the root": {"query": "a", "response": "b", "images": ["../secret.png"]},
    "images and <image> tags differ": {"query": "<image><image>a", "response": "b", "images": ["wide.png"]},
    "video or audio": {"query": "a", "response": "b", "videos": ["a.mp4"]},
    "text can't be encoded": {"query": "a", "response": "b\ud800"},
    "image is no path": {"query": "a", "response": "b", "images": [5]},
    "content is not text": {"query": 5, "response": "b"},
    "unsupported key": {"query": "a", "response": "b", "tools": "[{}]"},
    "image too large": {"query": "a", "response": "b", "images": ["data:;base64," + "A" * (MAX_EMBEDDED + 4)]},
    "unknown content part": {"messages": [{"role": "user", "content": [{"type": "audio"}]}, ANSWER]},
    "system turn is not first": {"messages": [ANSWER, {"role": "system", "content": "a"}]},
    "unknown loss switch": {"messages": [ANSWER | {"loss": "maybe"}]},
    "turns are not a list of objects": {"messages": {"role": "user"}},
    "history is not a list of pairs": {"query": "a", "response": "b", "history": ["c"]},
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_row_is_one_rejection(pictures, kind):
    good = json.dumps(FORMS["qwen"])
    bad = BAD[kind] if isinstance(BAD[kind], str) else json.dumps(BAD[kind])
    (pictures / "rows.jsonl").write_text("\n".join([good, "", bad, good]))
    loaded = load_examples(pictures / "rows.jsonl")
    assert [e.line for e in loaded.examples] == [1, 4]
    (rejection,) = loaded.rejected
    assert (rejection.line, rejection.kind) == (3, kind)
    assert str(rejection).startswith(f"{pictures / 'rows.jsonl'}:3: {kind}")


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"query": "a", "response": "b"}\n{"query": "\xff", "response": "b"}\n')
    loaded = load_examples(tmp_path / "rows.jsonl")
    assert len(loaded.examples) == 1 and "no UTF-8" in str(loaded.rejected[0])


def test_broken_list_keeps_what_came_before(tmp_path):
    (tmp_path / "rows.json").write_text('[{"query": "a", "response": "b"},\n {"query": "c", "respo')
    loaded = load_examples(tmp_path / "rows.json")
    assert len(loaded.examples) == 1
    assert loaded.rejected[0].line == 2 and "breaks off" in loaded.rejected[0].reason


keys = st.sampled_from(
    "messages conversations role from content value images image query response history system loss type text".split()
)
words = st.text(max_size=5) | st.sampled_from(["user", "gpt", "<image>", "wide.png"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(json_values, max_size=5))
def test_every_row_is_an_example_or_a_rejection(tmp_path, rows):
    loaded = load_rows(tmp_path, FORMS["qwen"], *rows)  # the first row shows that the file is JSON lines
    lines = sorted(entry.line for entry in [*loaded.examples, *loaded.rejected])
    assert lines == list(range(1, len(rows) + 2))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=60) | st.binary(max_size=20).map(lambda tail: b'[{"query": "a", "response": "b"},' + tail))
def test_no_bytes_crash_the_reader(tmp_path, raw):
    (tmp_path / "rows").write_bytes(raw)
    loaded = load_examples(tmp_path / "rows")
    assert loaded.examples or loaded.rejected or re.fullmatch(rb"[][\s\x1c-\x1f\0\xef\xbb\xbf\xfe\xff]*", raw)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(st.none() | texts.filter(bool), min_size=1, max_size=5),
    answer=texts.filter(str.strip),
    system=st.none() | texts.filter(bool),
)
def test_normal_form_round_trip(pictures, parts, answer, system):
    row = example(parts, answer, images=[pictures / "wide.png"] * parts.count(None), system=system)
    write_examples([row], pictures / "out.jsonl", pictures)
    loaded = load_examples(pictures / "out.jsonl")
    assert not loaded.rejected
    assert (loaded.examples[0].images, loaded.examples[0].messages) == (row.images, row.messages)
    assert str(pictures) not in (pictures / "out.jsonl").read_text()


# Paths


def test_image_paths(pictures, tmp_path_factory):
    (pictures / "sub dir").mkdir()
    (pictures / "wide.png").rename(pictures / "sub dir" / "wide.png")
    inside = str(pictures / "sub dir" / "wide.png")
    address = "file://" + inside.replace(" ", "%20")
    sources = ["sub dir/wide.png", "sub dir\\wide.png", "./sub dir/../sub dir/wide.png", inside, address, "sub dir/wide.png\n"]
    loaded = load_rows(pictures, *({"query": "a", "response": "b", "images": [source]} for source in sources))
    assert not loaded.rejected and {e.images for e in loaded.examples} == {(inside,)}
    Image.new("L", (40, 40)).save(pictures / "gr\u00fcn.png")
    loaded = load_rows(pictures, {"query": "a", "response": "b", "images": ["gru\u0308n.png"]})  # as macOS writes it
    assert loaded.examples[0].images == (str(pictures / "gr\u00fcn.png"),)
    link = tmp_path_factory.mktemp("link") / "root"
    link.symlink_to(pictures)
    loaded = load_rows(pictures, {"query": "a", "response": "b", "images": [inside]}, root=link)
    assert loaded.examples[0].images == (str(link / "sub dir" / "wide.png"),)


def test_outside_needs_permission(pictures, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "x.png"
    Image.new("L", (40, 40)).save(other)
    row = {"query": "a", "response": "b", "images": [str(other)]}
    assert load_rows(pictures, row).rejected[0].kind == "image outside the root"
    assert load_rows(pictures, row, outside=True).examples[0].images == (str(other),)
    windows = load_rows(pictures, row | {"images": ["C:\\data\\wide.png"]}, outside=True)
    assert "another machine" in windows.rejected[0].reason


def test_embedded_pictures(pictures):
    content = base64.b64encode((pictures / "wide.png").read_bytes()).decode()
    sources = [f"data:image/png;base64,{content}", content, {"bytes": content, "path": None}]
    loaded = load_rows(pictures, *({"query": "a", "response": "b", "images": [source]} for source in sources))
    assert not loaded.rejected
    for row in loaded.examples:
        assert load_image(row.images[0]).tobytes() == load_image(pictures / "wide.png").tobytes()
    broken = load_rows(pictures, {"query": "a", "response": "b", "images": ["data:image/png;base64,!!"]})
    assert broken.rejected[0].kind == "image is no path"


def test_embedded_pictures_are_kept_as_text_alone(tmp_path, tokenizer):
    Image.effect_noise((1200, 900), 90).save(tmp_path / "a.png")
    content = base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    rows = [{"query": f"<image>{i}?", "response": "b", "images": [content]} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    processor = ImageTextProcessor(Qwen2VLImageProcessorPil(max_pixels=9000), tokenizer, chat_template=CHAT_TEMPLATE)
    del rows
    tracemalloc.start()
    loaded = load_examples(tmp_path / "rows.jsonl")
    dataset = VisionLanguageDataset(loaded.examples, processor, max_length=4096)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset) == 6 and held < 6.5 * len(content) and peak < 14 * len(content)  # a row at a time
    assert torch.equal(dataset[0]["pixel_values"], dataset[5]["pixel_values"])


def test_dataset_info(pictures):
    turns_ = [{"who": "u", "says": "<image>A?"}, {"who": "a", "says": "yes"}]
    (pictures / "sub").mkdir()  # paths stay relative to the folder of dataset_info.json, as LLaMA-Factory has them
    (pictures / "sub" / "rows.json").write_text(json.dumps([{"talk": turns_, "pics": ["wide.png"]}, {"talk": [{"who": "x"}]}]))
    (pictures / "flat.json").write_text(json.dumps([{"q": "<image>A?", "a": "yes", "pics": ["wide.png"]}]))
    info = {
        "chat": {
            "file_name": "sub/rows.json",
            "formatting": "sharegpt",
            "columns": {"messages": "talk", "images": "pics"},
            "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "u", "assistant_tag": "a"},
        },
        "flat": {"file_name": "flat.json", "columns": {"prompt": "q", "response": "a", "images": "pics"}},
        "hub": {"hf_hub_url": "x/y"},
    }
    (pictures / "dataset_info.json").write_text(json.dumps(info))
    chat, flat = (load_examples(f"{pictures / 'dataset_info.json'}:{name}") for name in ("chat", "flat"))
    assert chat.examples[0].messages == flat.examples[0].messages == turns([None, "A?"], "yes")
    assert chat.examples[0].images == flat.examples[0].images == (str(pictures / "wide.png"),)
    assert [r.kind for r in chat.rejected] == ["unknown role"]
    with pytest.raises(ValueError, match="give one of chat, flat, hub"):
        load_examples(pictures / "dataset_info.json")
    with pytest.raises(ValueError, match="download it first"):
        load_examples(f"{pictures / 'dataset_info.json'}:hub")


def test_json_lines_are_read_one_at_a_time(tmp_path):
    """A file of pictures that are too large to be kept is never in memory as a whole."""
    row = json.dumps({"query": "a", "response": "b", "images": ["data:;base64,!" + "A" * 2**20]})
    (tmp_path / "rows.jsonl").write_text("\n".join([row] * 30))
    tracemalloc.start()
    loaded = load_examples(tmp_path / "rows.jsonl")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(loaded.rejected) == 30 and peak < 10 * 2**20


def test_written_rows_replace_a_file_only_as_a_whole(pictures, tmp_path_factory):
    other = tmp_path_factory.mktemp("elsewhere") / "x.png"
    (pictures / "out.jsonl").write_text("kept")
    with pytest.raises(ValueError, match="lies outside of the root"):
        write_examples([example("A?", "b"), example([None], "b", images=[other])], pictures / "out.jsonl", pictures)
    assert (pictures / "out.jsonl").read_text() == "kept" and not list(pictures.glob("*partial*"))


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no data file"):
        load_examples(tmp_path / "none.json")
