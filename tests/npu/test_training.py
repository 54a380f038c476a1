"""Every recipe trained on the genuine torch_npu, in fp16 with loss scaling and in bf16, against the CPU."""

import dataclasses
import json
from pathlib import Path

import pytest
from first_steps import first_steps

from vlftlib import rehearsal
from vlftlib.reading import write_examples
from vlftlib.recipes import RECIPES, TINY_BASE_OVERRIDES, get_recipe
from vlftlib.runs import load_run
from vlftlib.trainer import TrainConfig, train

CACHE = Path(__file__).parents[2] / rehearsal.CACHE
QUICK = ("lora_text_vision", "oft_vision")
SETUP = """
    import functools, torch
    from pathlib import Path
    from vlftlib import trainer
    from vlftlib.adapters import load_adapters, merge_adapters
    from vlftlib.evaluation import ask
    from vlftlib.forms import Example
    from vlftlib.models import TINY_BASE, load_model, load_processor
    from vlftlib.recipes import get_recipe
    from vlftlib.runs import load_run
    from vlftlib.trainer import TrainConfig, train

    # Without workers: starting them takes longer than the steps.
    trainer.platform_policy = functools.partial(trainer.platform_policy, workers=0)
    folder = Path(FOLDER)
    examples = [Example(**fields) for fields in json.loads((folder / "examples.json").read_text())]
    processor = load_processor(TINY_BASE)
"""


@pytest.fixture
def train_on_npu(on_npu, examples, tmp_path):
    """Runs code with `examples`, `processor` and `folder` at hand."""
    (tmp_path / "examples.json").write_text(json.dumps([dataclasses.asdict(example) for example in examples[:8]]))
    return lambda code: on_npu(SETUP.replace("FOLDER", repr(str(tmp_path))) + code)


def sizes(name):
    """No dropout: its masks come from each device's own stream, and can't agree."""
    dropout = {"dropout": 0.0} if "lora" in name or "hybrid" in name else {}
    blocks = {key: value for key, value in TINY_BASE_OVERRIDES[name].items() if key == "block_size"}
    return dict(batch_size=4, gradient_accumulation_steps=1) | dropout | blocks


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES])
def test_a_recipe_trains_on_the_npu_as_on_the_cpu(name, base, processor, examples, train_on_npu, tmp_path):
    recipe = get_recipe(name, precision="bf16", **sizes(name))
    base.set_attn_implementation("eager")  # the stand-in's SDPA rounds between its steps, the CPU's doesn't
    on_cpu = train(base, processor, recipe, examples[:8], tmp_path / "cpu", config=TrainConfig(max_steps=3))
    found = train_on_npu(
        f"""
    for precision in ("bf16", "fp16"):
        recipe = get_recipe({name!r}, precision=precision, **{sizes(name)!r})
        model, output = load_model(TINY_BASE, device="npu:0", attention="eager"), folder / precision
        run = train(model, processor, recipe, examples, output, config=TrainConfig(max_steps=3))
        found[precision] = [entry["loss"] for entry in run.history]
        found["times"] = [key for key in (*run.measured, *run.history[0]) if key.endswith("_s")]
        found[precision + " dtype"], found["environment"] = run.setup["forward_dtype"], run.setup["environment"]
        found[precision + " policy"] = run.setup["policy"]
    again = load_adapters(load_model(TINY_BASE, device="npu:0"), output / "adapters")
    picture = examples[0].images[:1]
    before = [answer for _, answer in ask(again, processor, picture, "What is it?")]
    found["merged"] = before == [answer for _, answer in ask(merge_adapters(again), processor, picture, "What is it?")]
    """
    )
    losses = [entry["loss"] for entry in on_cpu.history]
    assert found["bf16"][0] == pytest.approx(losses[0], rel=1e-3)
    # A later loss carries what the updates before it rounded, and that differs from one processor's bf16 to another's.
    assert found["bf16"] == pytest.approx(losses, abs=0.02 * max(losses))
    assert found["fp16"] == pytest.approx(losses, abs=0.02 * max(losses))
    assert (found["bf16 dtype"], found["fp16 dtype"]) == ("bfloat16", "float16")
    assert found["fp16 policy"]["loss_scale"] == 2**16 and found["fp16 policy"]["optimizer"] == "adamw_torch"
    assert found["environment"]["device"] == "npu (rehearsal)" and found["times"] == [] and found["merged"] is True


@pytest.mark.slow
def test_adapters_order_and_losses_are_the_same_on_cpu_and_npu(on_npu, examples, tmp_path):
    """With the NPU's two workers, started by spawn, and the CPU's one. Dropout is off: its masks come from the device's stream."""
    (tmp_path / "examples.json").write_text(json.dumps([dataclasses.asdict(example) for example in examples[:10]]))
    on_cpu = first_steps("cpu", str(tmp_path))
    # The workers import the script anew, so it must not train by being imported.
    found = on_npu(
        f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from first_steps import first_steps
    if __name__ == "__main__":
        found.update(first_steps("npu:0", {str(tmp_path)!r}))
    """
    )
    assert found["start"] == on_cpu["start"] and found["rows"] == on_cpu["rows"] and len(set(found["rows"])) == 10
    assert found["losses"] == pytest.approx(on_cpu["losses"], rel=1e-4)


@pytest.mark.slow
def test_the_command_line_gives_no_times(draw_examples, tmp_path):
    for seed, (name, count) in enumerate((("train", 4), ("validation", 2), ("test", 2))):
        (tmp_path / name).mkdir()
        write_examples(draw_examples(tmp_path / name, count, seed), tmp_path / f"{name}.jsonl", tmp_path)
    tuned, evaluated = tmp_path / "tuned", tmp_path / "evaluated"
    shared = ["--data", str(tmp_path), "--device", "npu", "--attention", "eager"]
    quick = ["--recipe", "oft_vision", "--max-steps", "1", "--set", "batch_size=2"]
    for words in (
        ["train", *shared, *quick, "--output", str(tuned)],
        ["evaluate", *shared, "--adapters", str(tuned / "adapters"), "--splits", "test", "--output", str(evaluated)],
    ):
        done = rehearsal.rehearse(["-m", "vlftlib", *words], cache=CACHE, capture=True)
        assert done.returncode == 0, done.stderr[-3000:]
    for folder in (tuned, evaluated):
        run, text = load_run(folder), (folder / "run.json").read_text()
        assert run.setup["environment"]["device"] == "npu (rehearsal)" and run.evaluation("test")["examples"] == 2
        text = text.replace('"frozen_share":', "").replace('"block_share":', "")  # of a stage and of an adapter: settings
        assert not any(f'{unit}":' in text for unit in ("_s", "_per_second", "_share"))
    assert load_run(tuned).history[0]["loss_scale"] == 2**16
    assert load_run(tuned).evaluation("test")["accuracy"] == load_run(evaluated).evaluation("test")["accuracy"]


@pytest.mark.slow
def test_precisions_are_compared_without_times(tmp_path):
    words = ["benchmark", "precision", "--quick", "--device", "npu", "--attention", "eager", "--set", "batch_size=4"]
    done = rehearsal.rehearse(["-m", "vlftlib", *words, "--output", str(tmp_path)], cache=CACHE, capture=True)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "precision.json").read_text())
    rows = {row["precision"]: row for row in record["results"]}
    assert list(rows) == ["float32", "bf16", "fp16"] and record["environment"]["device"] == "npu (rehearsal)"
    assert all(row["outcome"] == "completed" and "step_time_s" not in row for row in rows.values())
    assert 0 < rows["fp16"]["loss_drift"] < rows["bf16"]["loss_drift"] < 0.1  # 11 bits against 8
    assert rows["fp16"]["last_loss_scale"] == 2**16 and rows["bf16"]["last_loss_scale"] is None
    assert f"recommended on npu (rehearsal), Ascend910B2: {record['settings']['recommended']}" in done.stdout


@pytest.mark.slow
def test_notebook_04_runs_on_the_npu(tmp_path, monkeypatch):
    monkeypatch.setenv("DEVICE", "npu")
    monkeypatch.setenv("STEPS", "10")
    executor = Path(__file__).parents[2] / "notebooks" / "execute.py"
    words = [str(executor), "04", "--output", str(tmp_path), "--timeout", "1200"]
    done = rehearsal.rehearse(words, cache=CACHE, capture=True)
    assert done.returncode == 0, done.stderr[-3000:]
    text = (tmp_path / "04_oft_on_ascend.ipynb").read_text()
    assert "'npu (rehearsal)', 'float16', 16128" in text and "4 layers, all orthogonal" in text
