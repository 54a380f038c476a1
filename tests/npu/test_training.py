"""Every recipe trained on the genuine torch_npu, in fp16 with loss scaling and in bf16, against the CPU."""

import dataclasses
import json

import pytest

from vlftlib.recipes import RECIPES, TINY_BASE_OVERRIDES, get_recipe
from vlftlib.trainer import TrainConfig, train

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
    assert found["bf16"] == pytest.approx(losses, abs=3e-3)  # bf16 has 8 bits: what a step rounds, the next ones carry on
    assert found["fp16"] == pytest.approx(losses, abs=0.02 * max(losses))
    assert (found["bf16 dtype"], found["fp16 dtype"]) == ("bfloat16", "float16")
    assert found["fp16 policy"]["loss_scale"] == 2**16 and found["fp16 policy"]["optimizer"] == "adamw_torch"
    assert found["environment"]["device"] == "npu (rehearsal)" and found["times"] == [] and found["merged"] is True
