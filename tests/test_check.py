import json
import tracemalloc

import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vlftlib.__main__ import main
from vlftlib.awkward import awkward_files
from vlftlib.check import check_examples
from vlftlib.dataset import VisionLanguageDataset, load_examples
from vlftlib.images import load_image
from vlftlib.models import ImageTextProcessor
from vlftlib.tiny_base import CHAT_TEMPLATE, build_tokenizer


@pytest.fixture(scope="module")
def processor():
    images = Qwen2VLImageProcessorPil(min_pixels=4 * 28 * 28, max_pixels=16 * 28 * 28)
    return ImageTextProcessor(images, build_tokenizer(), chat_template=CHAT_TEMPLATE)


def write_rows(folder, rows):
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return load_examples(folder / "rows.jsonl")


def noise(path, size=(60, 40)):
    Image.effect_noise(size, 90).convert("RGB").save(path)


def test_awkward_folder(processor, tmp_path):
    files = awkward_files(tmp_path)
    report = check_examples(load_examples(tmp_path / "rows.jsonl"), processor, processes=1, progress=False)
    readable = [file for file in files if file.quarters]
    assert len(report.examples) == len(readable) + 2 and len(report.sizes) == len(readable)
    kinds = report.as_dict()["rejected"]
    for kind in {file.rejection for file in files if file.rejection}:
        assert kinds[kind] == sum(file.rejection == kind for file in files)
    assert len(report.rejected) == len(files) - len(readable) + 7
    assert [r.line for r in report.rejected] == sorted(r.line for r in report.rejected)
    # Turned and resaved forms of one scene are copies (the lossless ones: it is too flat for steady hashes).
    plain = report.duplicates.pictures[str(tmp_path / "plain.png")]
    for name in ("turned.png", "turned.tiff", "palette.png", "animated.webp", "profile.png", "pages.tiff"):
        assert report.duplicates.pictures[str(tmp_path / name)] == plain, name
    assert report.duplicates.pictures[str(tmp_path / "grey.png")] != plain
    assert not report.duplicates.conflicts
    for example in report.examples:  # what the report calls usable is usable
        for image in example.images:
            load_image(image)


def test_figures(processor, tmp_path):
    noise(tmp_path / "a.png")
    noise(tmp_path / "b.png", (300, 20))
    rows = [
        {"query": "<image>What?", "response": "colour: red, kind: a", "images": ["a.png"]},
        {"query": "<image>What?", "response": "colour: red, kind: b", "images": ["b.png"]},
        {"query": "<image>What?", "response": "colour: blue, kind: b", "images": ["b.png"]},
        {"query": "<image>What?", "response": "colour: red, kind: a", "images": ["a.png"]},
        {"query": "<image>What?", "response": "colour: red, kind: a", "images": ["none.png"]},
    ]
    report = check_examples(write_rows(tmp_path, rows), processor, processes=1, progress=False)
    items = VisionLanguageDataset(report.examples, processor)
    assert report.tokens == [len(items[i]["input_ids"]) for i in range(4)]
    assert report.learnt_tokens == [int((items[i]["labels"] != -100).sum()) for i in range(4)]
    assert report.sizes == [(60, 40), (300, 20)]
    assert report.attributes == {"colour": {"red": 3, "blue": 1}, "kind": {"a": 2, "b": 2}}
    assert report.duplicates.repeated == [(0, 3)] and report.duplicates.conflicts == [(1, 2)]
    assert report.bad_share == 0.2
    assert report.verdict == "usable, but 20.0% of the rows are rejected, 1 label conflicts, 1 repeated rows"
    content = json.loads(json.dumps(report.as_dict()))
    file = str(tmp_path / "rows.jsonl")
    assert content["conflicts"] == [[f"{file}:2", f"{file}:3"]] and content["rejected"] == {"image not found": 1}
    text = str(report)
    for part in ("5 rows, 4 usable, 2 pictures", f"e.g. {file}:5", "colour: red 75%, blue 25%", "label conflict", "verdict"):
        assert part in text


def test_the_command_writes_what_it_checked(tmp_path, capsys):
    """Rows of three names for one picture and of 40 others: written without repetitions, whole and in parts."""
    for i in range(40):
        noise(tmp_path / f"{i}.png")
    Image.open(tmp_path / "0.png").save(tmp_path / "copy.png", compress_level=1)
    names = [f"{i}.png" for i in range(40)] + ["copy.png", "0.png"]
    rows = [{"query": "<image>What?", "response": "kind: a", "images": [name]} for name in names]
    rows += [{"query": "<image>What?", "response": "kind: b", "images": ["none.png"]}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    command = ["check", str(tmp_path / "rows.json"), "--json", "--drop-repeated", "--figure", str(tmp_path / "f" / "x.png")]
    command += ["--write", str(tmp_path / "out.jsonl"), "--split", str(tmp_path / "parts")]
    assert main(command) == 1  # 1 bad row of 43 is more than the usual 1 %
    assert main([*command, "--allowed", "0.05"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out[: out.index("\n}\n") + 2])
    assert (report["rows"], report["usable"], report["picture_groups"]) == (43, 42, 1)
    assert len(report["repeated"][0]) == 3 and sum(count for *_, count in report["token_histogram"]) == 42
    assert Image.open(tmp_path / "f" / "x.png").width > 600
    written = load_examples(tmp_path / "out.jsonl")
    assert [e.picture_names for e in written.examples] == [[name] for name in names[:40]] and not written.rejected
    assert f"--root {tmp_path}" in err
    parts = {name: load_examples(tmp_path / "parts" / f"{name}.jsonl", tmp_path) for name in ("train", "validation", "test")}
    names = [name for part in parts.values() for e in part.examples for name in e.picture_names]
    assert sorted(names) == sorted(f"{i}.png" for i in range(40))
    report = check_examples(parts, processes=1, progress=False)
    assert report.verdict == "good" and not report.leaks


def test_leaks_are_named(tmp_path, capsys):
    for name in "abc":
        Image.effect_noise((12, 8), 90).resize((240, 160), Image.Resampling.BICUBIC).save(tmp_path / f"{name}.png")
    Image.open(tmp_path / "a.png").resize((360, 240), Image.Resampling.BICUBIC).save(tmp_path / "larger.png")
    for part, names in {"train": "ab", "validation": "c", "test": ["larger"]}.items():
        rows = [{"query": "<image>What?", "response": "x", "images": [f"{name}.png"]} for name in names]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"in more than one part: train {tmp_path}/train.jsonl:1, test {tmp_path}/test.jsonl:1" in out
    assert "verdict: usable, but 1 pictures occur in more than one part" in out
    assert main(["check", str(tmp_path), "--write", str(tmp_path / "out.jsonl")]) == 1
    assert "3 parts: --write and --split take one file" in capsys.readouterr().err


def test_length_limit(processor, tmp_path):
    rows = [{"query": "A?", "response": "b"}, {"query": "A?" * 100, "response": "b"}]
    report = check_examples(write_rows(tmp_path, rows), processor, max_length=60, progress=False)
    assert [r.kind for r in report.rejected] == ["too many tokens"] and len(report.examples) == 1
    with pytest.raises(ValueError, match="give the processor"):
        check_examples(report.examples, max_length=60)


def test_nothing_usable(tmp_path):
    report = check_examples(write_rows(tmp_path, [{"a": 1}]), progress=False)
    assert report.verdict == "unusable: no row can be trained on" and report.bad_share == 1
    assert check_examples([], progress=False).bad_share == 1
    assert "verdict: unusable" in str(report)


@pytest.mark.slow
def test_memory_of_a_row(tmp_path):
    noise(tmp_path / "a.png")
    rows = []
    for i in range(20_000):
        answer = f"colour: red, defect: none, number: A{i:05d}"
        turns = [{"from": "human", "value": f"<image>\nWhat is the {i}th?"}, {"from": "gpt", "value": answer}]
        rows.append({"image": "a.png", "conversations": turns})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    del rows
    tracemalloc.start()
    loaded = load_examples(tmp_path / "rows.json")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(loaded.examples) == 20_000 and held / 20_000 < 4096
