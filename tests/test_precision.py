"""The comparison of precisions: drift against float32, what a recommendation hangs on."""

import json

import pytest
import torch

from vlftlib.models import TINY_BASE, load_model
from vlftlib.precision import measure_precision, recommend
from vlftlib.recipes import get_recipe
from vlftlib.trainer import RecipeTrainer


def row(precision, drift=0.0, seconds=1.0, skipped=0, outcome="completed"):
    made = dict(precision=precision, outcome=outcome, losses=[1.0] * 10, loss_drift=drift, skipped=skipped)
    return made | (dict(step_time_s=seconds) if seconds else {})


@pytest.mark.parametrize(
    "rows, recommended, reason",
    [
        ([row("float32"), row("bf16", 0.01, 0.5), row("fp16", 0.01, 0.4)], "fp16", "0.40 of float32's time"),
        ([row("float32"), row("bf16", 0.01, 0.5), row("fp16", 0.01, 0.4, skipped=3)], "bf16", "fp16 skipped 3 of 10 steps"),
        ([row("float32"), row("bf16", 0.2, 0.5), row("fp16", None, 0.4, outcome="diverged at step 9: x")], "float32", "fp16 diverged"),
        ([row("float32"), row("bf16", 0.2, 0.5)], "float32", "bf16 drifts by 20% of the loss"),
        ([row("float32"), row("bf16", 0.01, 1.2)], "float32", "bf16, the fastest of the others, takes 1.20"),
        ([row("float32", seconds=None), row("bf16", 0.02, None), row("fp16", 0.01, None)], "fp16", "the chip must say"),
    ],
)
def test_recommendation(rows, recommended, reason):
    name, said = recommend(rows)
    assert name == recommended and reason in said


def measure(processor, examples, tmp_path, **options):
    recipe = get_recipe("lora_text", batch_size=4, gradient_accumulation_steps=1, learning_rate=1e-3)
    load = lambda policy: load_model(TINY_BASE, dtype=policy.dtype)  # noqa: E731
    return measure_precision(load, processor, recipe, examples, device=torch.device("cpu"), output=tmp_path, **options)


def test_the_same_steps_in_each_precision(processor, examples, tmp_path):
    found = measure(processor, examples, tmp_path, steps=4)
    full, half = found.rows
    assert [full["precision"], half["precision"]] == ["float32", "bf16"]  # the CPU trains in no other
    assert full["loss_drift"] == full["weight_drift"] == 0 and full["outcome"] == half["outcome"] == "completed"
    assert 1e-4 < half["loss_drift"] < 0.1 and 1e-3 < half["weight_drift"] < 1  # bf16 has 8 bits
    assert full["step_time_s"] > 0 and full["skipped"] == half["skipped"] == 0
    record = json.loads(found.path.read_text())
    assert record["settings"]["recommended"] == found.recommended in ("float32", "bf16") and record["results"] == list(found.rows)
    assert "recommended on cpu" in str(found) and "bf16" in str(found)


def test_a_run_that_breaks_off_is_a_result(processor, examples, tmp_path, monkeypatch):
    original = RecipeTrainer._guard

    def spoil(self):
        if self.args.bf16 and self.state.global_step == 1:
            self.losses[-1] = self.losses[-1] * torch.nan
        original(self)

    monkeypatch.setattr(RecipeTrainer, "_guard", spoil)
    found = measure(processor, examples, tmp_path, steps=3)
    assert found.rows[1]["outcome"].startswith("diverged at step 2") and found.rows[1]["loss_drift"] is None
    assert found.recommended == "float32" and "bf16 diverged" in found.reason
