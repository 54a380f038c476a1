import json

import pytest

from vlftlib.check import check_examples
from vlftlib.dataset import VisionLanguageDataset
from vlftlib.demos import make_demos
from vlftlib.models import TINY_BASE, load_model
from vlftlib.reading import load_examples
from vlftlib.recipes import get_recipe
from vlftlib.trainer import TrainConfig, train


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return make_demos(tmp_path_factory.mktemp("demos"))


# Rows, pictures a row and learnt turns a row, by data set.
EXPECTED = {
    "dataset_info.json:bricks": (12, [2] * 12, 2),
    "dataset_info.json:bricks_alpaca": (12, [1] * 12, 1),
    "dataset_info.json:bricks_text": (3, [0] * 3, 1),
    "qwen_demo.json": (12, [2, 1, 0] * 4, 1),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_demo_rows_are_all_used_and_learnt(demos, processor, name):
    rows, pictures, learnt_turns = EXPECTED[name]
    loaded = load_examples(demos / name)
    report = check_examples(loaded, processor, max_length=4096, progress=False)
    assert len(report.examples) == rows and not report.rejected
    assert [len(example.images) for example in report.examples] == pictures
    dataset, raw = VisionLanguageDataset(report.examples, processor), json.loads((demos / EXPECTED_FILE[name]).read_text())
    for index, row in enumerate(raw):
        labels = dataset[index]["labels"]
        answers = processor.tokenizer.decode(labels[labels != -100])
        assert answers == "".join(f"{answer}<|im_end|>" for answer in answers_of(row)) and len(answers_of(row)) == learnt_turns


EXPECTED_FILE = {name: f"{name.partition(':')[2]}.json" if ":" in name else name for name in EXPECTED}


def answers_of(row):
    if "output" in row:
        return [row["output"]]
    turns = row.get("messages") or row["conversations"]
    return [turn.get("content", turn.get("value")) for turn in turns if turn.get("role", turn.get("from")) in ("assistant", "gpt")]


@pytest.mark.parametrize("name", ["dataset_info.json:bricks", "qwen_demo.json"])
def test_demos_are_trained_on(demos, processor, tmp_path, name):
    """Batches of pictures and texts mixed; the loss halves within thirty steps."""
    examples = load_examples(demos / name).examples
    recipe = get_recipe("lora_text_vision", batch_size=4, gradient_accumulation_steps=1, learning_rate=3e-3)
    run = train(load_model(TINY_BASE), processor, recipe, examples, tmp_path, config=TrainConfig(max_steps=30))
    losses = [entry["loss"] for entry in run.history]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3]), losses
    assert sum(entry["images"] for entry in run.history[:3]) == sum(len(example.images) for example in examples)
