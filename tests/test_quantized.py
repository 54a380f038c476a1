"""A base in 4 or 8 bits by bitsandbytes, on its CPU path: loaded, trained on through the Trainer, saved, not merged into."""

import shutil

import pytest
import torch

from vlftlib.__main__ import main
from vlftlib.adapters import adapter_parameters, apply_recipe, count_parameters, load_adapters, merge_adapters, save_adapters
from vlftlib.dataset import VisionLanguageCollator, VisionLanguageDataset
from vlftlib.models import TINY_BASE, load_model
from vlftlib.reading import write_examples
from vlftlib.recipes import get_recipe
from vlftlib.runs import load_run
from vlftlib.stock_folder import write_merged
from vlftlib.trainer import TrainConfig, train

pytest.importorskip("bitsandbytes", reason="bitsandbytes holds the base in 4 and 8 bits")
QUICK = dict(batch_size=4, gradient_accumulation_steps=1, learning_rate=1e-2)


@pytest.fixture
def batch(processor, examples):
    batch = VisionLanguageCollator(processor)([VisionLanguageDataset(examples, processor)[i] for i in range(2)])
    return {name: value for name, value in batch.items() if name != "row"}


@torch.no_grad()
def logits(model, batch):
    return model.eval()(**batch).logits


@pytest.mark.parametrize("weights", ["4bit", "8bit"])
@pytest.mark.parametrize("name", ["oft_vision", "lora_text_vision"])
def test_a_recipe_trains_on_quantised_weights(name, weights, processor, examples, batch, tmp_path):
    model = load_model(TINY_BASE, weights=weights)
    assert count_parameters(model).total == count_parameters(load_model(TINY_BASE)).total
    packed = {key: value.clone() for key, value in model.state_dict().items()}
    start = logits(model, batch)
    config, parts = TrainConfig(max_steps=6, eval_steps=(2, 4)), {"validation": examples[:2]}
    run = train(model, processor, get_recipe(name, **QUICK), examples, tmp_path / "run", evaluate_on=parts, config=config)
    assert run.outcome == "completed" and run.setup["model"]["weights"] == weights
    assert sum(entry["loss"] for entry in run.history[-2:]) < sum(entry["loss"] for entry in run.history[:2])
    changed = logits(model, batch)
    assert (changed - start).abs().max() > 0.1
    after = {key.replace(".base_layer.", "."): value for key, value in model.state_dict().items()}
    assert [key for key, value in packed.items() if not torch.equal(after[key], value)] == []
    again = load_adapters(load_model(TINY_BASE, weights=weights), tmp_path / "run" / "adapters")
    torch.testing.assert_close(logits(again, batch), changed, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="is quantised: load the base in full precision and merge into that"):
        merge_adapters(again)


def test_gradients_on_4bit_weights_are_those_on_the_dequantised(batch):
    """Also after an inference, which would repack them on some CPUs; no gradient passes a repacked layer."""
    from bitsandbytes.functional import dequantize_4bit

    quantised, plain = load_model(TINY_BASE, weights="4bit"), load_model(TINY_BASE)
    for path, module in quantised.named_modules():
        if type(module).__name__ == "Linear4bit":
            plain.get_submodule(path).weight.data = dequantize_4bit(module.weight.data, module.weight.quant_state)
    grads = []
    for model in (quantised, plain):
        logits(model, batch)
        apply_recipe(model, get_recipe("hybrid_staged"), max_dropout=0.0)
        with torch.no_grad():
            for item in adapter_parameters(model):
                item.parameter.add_(torch.linspace(-0.02, 0.02, item.parameter.numel()).view_as(item.parameter))
        logits(model, batch)
        model.train()(**batch).loss.backward()
        grads.append({item.name: item.parameter.grad for item in adapter_parameters(model)})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[1].items():
        assert (grads[0][name] - grad).norm() < 1e-3 * grad.norm(), name


def test_4bit_weights_on_the_command_line(draw_examples, tmp_path, capsys):
    for name in ("train", "validation", "test"):
        (tmp_path / name).mkdir()
        write_examples(draw_examples(tmp_path / name, 2), tmp_path / f"{name}.jsonl", tmp_path)
    data = ["--data", str(tmp_path), "--device", "cpu"]
    quick = ["--set", "batch_size=2", "--set", "gradient_accumulation_steps=1", "--max-steps", "2"]
    out = ["--output", str(tmp_path / "run")]
    assert main(["train", "--recipe", "oft_vision", *data, "--weights", "4bit", *quick, *out]) == 0
    assert main(["train", "--recipe", "oft_vision", *data, "--weights", "8bit", *quick, *out]) == 1
    words = ["--adapters", str(tmp_path / "run" / "adapters"), "--splits", "test", "--output", str(tmp_path / "again")]
    assert main(["evaluate", *data, "--weights", "4bit", *words]) == 0
    trained, again = load_run(tmp_path / "run"), load_run(tmp_path / "again")
    assert trained.setup["model"]["weights"] == again.setup["model"]["weights"] == "4bit"
    assert again.evaluation()["accuracy"] == trained.evaluation()["accuracy"]


def test_a_base_saved_in_4bit_is_loaded_as_it_is(batch, tmp_path):
    model = load_model(TINY_BASE, weights="4bit")
    model.save_pretrained(tmp_path / "small")
    torch.testing.assert_close(logits(load_model(tmp_path / "small"), batch), logits(model, batch), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="quantised already: load it without weights='8bit'"):
        load_model(tmp_path / "small", weights="8bit")
    save_adapters(apply_recipe(model, get_recipe("oft_vision")), tmp_path / "adapters")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"):
        shutil.copy(TINY_BASE / name, tmp_path / "small")
    with pytest.raises(ValueError, match="is quantised: load the base in full precision and merge into that"):
        write_merged(tmp_path / "small", tmp_path / "adapters", tmp_path / "merged")
    assert write_merged(TINY_BASE, tmp_path / "adapters", tmp_path / "merged").passed
