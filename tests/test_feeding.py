"""From examples to training steps: the order of rows, whoever prepares them, and what happens when one turns out bad."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from PIL import Image

from vlftlib import trainer
from vlftlib.dataset import BadRow, LengthGroupedOrder
from vlftlib.devices import platform_policy
from vlftlib.forms import Example
from vlftlib.models import TINY_BASE, load_model
from vlftlib.reading import load_examples
from vlftlib.recipes import get_recipe
from vlftlib.runs import load_run
from vlftlib.trainer import RecipeTrainer, TrainConfig, train
from vlftlib.watch import Watch


def question_of_length(words):
    ask = {"role": "user", "content": [{"type": "text", "text": "word " * words}]}
    return Example((), [ask, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}], "rows", words)


@pytest.fixture
def seen(monkeypatch):
    """The rows of every micro-batch in their order."""
    rows, count = [], Watch.count
    monkeypatch.setattr(Watch, "count", lambda self, inputs, batch: (rows.append(batch), count(self, inputs, batch))[1])
    return rows


def use_workers(monkeypatch, workers, start_method=None):
    policy = replace(platform_policy(torch.device("cpu")), workers=workers, start_method=start_method)
    monkeypatch.setattr(trainer, "platform_policy", lambda *_: policy)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_workers_change_nothing(processor, examples, tmp_path, monkeypatch, seen):
    """None and four give the same rows in the same order, losses and weights, over more than an epoch."""
    runs, orders, ends = [], [], []
    for workers in (0, 4):
        use_workers(monkeypatch, workers)
        model = load_model(TINY_BASE)
        recipe = get_recipe("oft_vision", batch_size=3, gradient_accumulation_steps=1)
        run = train(model, processor, recipe, examples, tmp_path / str(workers), config=TrainConfig(max_steps=8))
        runs.append([entry["loss"] for entry in run.history])
        orders.append(list(seen))
        ends.append({name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad})
        seen.clear()
    assert orders[0] == orders[1] and sorted(sum(orders[0][:6], [])) == list(range(16)) and len(orders[0][5]) == 1
    assert runs[0] == runs[1]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_order_by_length():
    lengths = [(7 * i) % 101 for i in range(101)]
    order = LengthGroupedOrder(lengths, 4, seed=3, epoch=lambda: 0)
    rows = list(order)
    assert Counter(rows) == Counter(range(101)) and len(order) == 101 and list(order) == rows
    spread = [max(part) - min(part) for part in ([lengths[row] for row in rows[i : i + 4]] for i in range(4, 100, 4))]
    assert sorted(spread)[len(spread) // 2] <= 20 and lengths[rows[0]] == 100  # the longest comes first: see if it fits
    assert list(LengthGroupedOrder(lengths, 4, seed=3, epoch=lambda: 1)) != rows
    assert list(LengthGroupedOrder(lengths, 4, seed=4, epoch=lambda: 0)) != rows


def test_grouped_training_pads_less_and_resumes_exactly(processor, tmp_path, monkeypatch, seen):
    """Stopped in the second epoch, it goes on with the rows that were next."""
    lengths = [1 + (5 * i) % 13 for i in range(48)]
    examples = [question_of_length(length) for length in lengths]
    recipe = get_recipe("lora_text", batch_size=4, gradient_accumulation_steps=1)
    config = TrainConfig(max_steps=17, save_steps=1, group_by_length=True)
    whole = train(load_model(TINY_BASE), processor, recipe, examples, tmp_path / "whole", config=config)
    rows = list(seen)
    assert sorted(sum(rows[:12], [])) == list(range(48)) and not set(map(tuple, rows[:12])) & set(map(tuple, rows[12:]))
    spread = [max(batch) - min(batch) for batch in ([lengths[row] for row in batch] for batch in rows)]
    assert sum(spread) / len(spread) < 5  # of 12; four at random differ by 7.6
    seen.clear()
    step = RecipeTrainer.training_step

    def stop(self, *words, **options):
        if self.state.global_step == 14:
            raise KeyboardInterrupt
        return step(self, *words, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RecipeTrainer, "training_step", stop)
        with pytest.raises(KeyboardInterrupt):
            train(load_model(TINY_BASE), processor, recipe, examples, tmp_path / "broken", config=config)
    with pytest.raises(ValueError, match="another config.group_by_length: True there, False here"):
        other = replace(config, group_by_length=False)
        train(load_model(TINY_BASE), processor, recipe, examples, tmp_path / "broken", config=other, resume=True)
    again = train(load_model(TINY_BASE), processor, recipe, examples, tmp_path / "broken", config=config, resume=True)
    assert seen == rows
    assert [entry["loss"] for entry in again.history] == [entry["loss"] for entry in whole.history]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_picture_broken_behind_its_header_stops_the_run_by_name(processor, tmp_path, monkeypatch, workers):
    Image.effect_noise((64, 64), 80).convert("RGB").save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:2000])
    rows = [{"query": "<image>What?", "response": "this", "images": [name]} for name in ("whole.jpg", "cut.jpg")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    use_workers(monkeypatch, workers)
    recipe = get_recipe("oft_vision", batch_size=1, gradient_accumulation_steps=1)
    examples = load_examples(tmp_path / "rows.jsonl").examples
    with pytest.raises(BadRow) as fault:
        train(load_model(TINY_BASE), processor, recipe, examples, tmp_path / "run", config=TrainConfig(max_steps=3))
    message = f"{tmp_path / 'rows.jsonl'}:2: image broken: {tmp_path / 'cut.jpg'}: "
    assert str(fault.value).startswith(message) and str(fault.value).endswith("; python -m vlftlib check finds such rows")
    assert f"BadRow: {message}" in load_run(tmp_path / "run").outcome
