import json

import pytest
import torch

from vlftlib.adapters import adapter_parameters, apply_recipe, load_adapters
from vlftlib.models import TINY_BASE, load_model
from vlftlib.recipes import LoRA, Recipe, Stage, get_recipe
from vlftlib.runs import load_run
from vlftlib.trainer import RecipeTrainer, TrainConfig, learning_rate_of, stage_ends, stage_schedule, train

QUICK = dict(batch_size=4, gradient_accumulation_steps=1)


def weights(model):
    return {item.name: item.parameter.detach().clone() for item in adapter_parameters(model)}


def stop_at(monkeypatch, step: int, error: BaseException):
    """Raise in the training step after `step` optimizer steps are done."""
    original = RecipeTrainer.training_step

    def training_step(self, *words, **options):
        if self.state.global_step == step:
            raise error
        return original(self, *words, **options)

    monkeypatch.setattr(RecipeTrainer, "training_step", training_step)


@pytest.mark.parametrize("name", ["lora_text_vision", "oft_vision"])
def test_a_run_trains_its_adapters_and_records_it(name, base, processor, examples, tmp_path):
    before = {key: value.clone() for key, value in base.state_dict().items()}
    recipe = get_recipe(name, learning_rate=1e-2, batch_size=4, gradient_accumulation_steps=2)
    parts = {"validation": examples[:2]}
    run = train(base, processor, recipe, examples, tmp_path, evaluate_on=parts, config=TrainConfig(max_steps=5))

    assert run == load_run(tmp_path) and run.outcome == "completed"
    assert [entry["step"] for entry in run.history] == [1, 2, 3, 4, 5]
    assert all(entry["images"] == 8 and entry["tokens"] == 8 * 63 for entry in run.history)
    assert run.history[-1]["loss"] < run.history[0]["loss"]
    assert run.evaluation("validation")["examples"] == 2 and run.evaluation("validation")["step"] == 5
    assert run.setup["forward_dtype"] == "float32"
    assert run.setup["recipe"]["overrides"] == dict(learning_rate=1e-2, batch_size=4, gradient_accumulation_steps=2)
    assert run.measured["operators_per_step"] > 500 and run.measured["peak_memory_bytes"] > 2**20
    assert run.measured["trainable_parameters"] == sum(item.parameter.numel() for item in adapter_parameters(base))
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2

    after = base.state_dict()
    for key, value in before.items():
        own = after.get(key, after.get(key.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")))
        assert torch.equal(own, value), f"the base's {key} has changed"
    again = load_adapters(load_model(TINY_BASE), tmp_path / "adapters")
    for key, value in weights(base).items():
        assert torch.allclose(weights(again)[key], value, rtol=0, atol=1e-7), key


def test_a_run_is_the_same_again(processor, examples, tmp_path):
    recipe = get_recipe("oft_vision", **QUICK)
    models = [load_model(TINY_BASE) for _ in range(2)]
    for i, model in enumerate(models):
        train(model, processor, recipe, examples, tmp_path / str(i), config=TrainConfig(max_steps=2))
    first, second = map(weights, models)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_resume_goes_on_exactly(processor, examples, tmp_path, monkeypatch):
    """With dropout, accumulation and a stop in the middle of an epoch."""
    recipe = get_recipe("lora_text", batch_size=2, gradient_accumulation_steps=2, dropout=0.1)
    config = TrainConfig(max_steps=5, save_steps=2)
    whole, broken, resumed = (load_model(TINY_BASE) for _ in range(3))
    run = train(whole, processor, recipe, examples, tmp_path / "whole", config=config)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            train(broken, processor, recipe, examples, tmp_path / "broken", config=config)
    assert load_run(tmp_path / "broken").outcome == "interrupted at step 3"
    again = train(resumed, processor, recipe, examples, tmp_path / "broken", config=config, resume=True)
    assert again.outcome == "completed"
    assert [entry["loss"] for entry in again.history] == [entry["loss"] for entry in run.history]
    assert all(torch.equal(value, weights(whole)[key]) for key, value in weights(resumed).items())


def test_a_failure_is_recorded_and_raised(base, processor, examples, tmp_path, monkeypatch):
    stop_at(monkeypatch, 1, OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        train(base, processor, get_recipe("oft_vision", **QUICK), examples, tmp_path, config=TrainConfig(max_steps=3))
    run = load_run(tmp_path)
    assert run.outcome == "failed at step 1: OSError: [Errno 28] No space left on device" and len(run.history) == 1


def test_earlier_results_are_not_overwritten(base, processor, examples, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(FileExistsError, match="holds a run already"):
        train(base, processor, get_recipe("oft_vision"), examples, tmp_path)
    assert (tmp_path / "run.json").read_text() == "{}"


def test_nothing_to_train_on(base, processor, examples, tmp_path):
    with pytest.raises(ValueError, match="no example to train on$"):
        train(base, processor, get_recipe("oft_vision"), [], tmp_path)
    with pytest.raises(ValueError, match="all 16 were rejected, the first: .*too many tokens: 63, limit 20"):
        train(base, processor, get_recipe("oft_vision"), examples, tmp_path, config=TrainConfig(max_length=20))


def test_a_stage_trains_its_methods_alone(base, processor, examples, tmp_path):
    recipe = get_recipe("hybrid_staged", batch_size=2, gradient_accumulation_steps=1, learning_rate=1e-2)
    states = {}

    class Peek(RecipeTrainer):
        def training_step(self, *words, **options):
            states[self.state.global_step] = weights(self.model)
            return super().training_step(*words, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vlftlib.trainer.RecipeTrainer", Peek)
        train(base, processor, recipe, examples, tmp_path, config=TrainConfig(max_steps=6))
    methods = {item.name: item.method for item in adapter_parameters(base)}

    def changed(first, second):
        return {methods[name] for name in methods if not torch.equal(states[first][name], states[second][name])}

    assert changed(0, 2) == {"oft"} and changed(2, 5) == {"oft", "lora"}


def test_every_tensor_is_in_one_group_with_its_rate(base, processor, examples, tmp_path):
    recipe = get_recipe("lora_dual", **QUICK)
    seen = {}

    class Peek(RecipeTrainer):
        def create_optimizer(self, model=None):
            seen["optimizer"] = super().create_optimizer(model)
            return seen["optimizer"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vlftlib.trainer.RecipeTrainer", Peek)
        train(base, processor, recipe, examples, tmp_path, config=TrainConfig(max_steps=1))
    rates = {id(p): group["initial_lr"] for group in seen["optimizer"].param_groups for p in group["params"]}
    items = adapter_parameters(base)
    assert len(rates) == len(items) == sum(len(group["params"]) for group in seen["optimizer"].param_groups)
    merger = [item for item in items if item.scope == "vision.merger"]
    assert merger and all(rates[id(item.parameter)] == 2e-4 for item in merger)
    assert all(rates[id(item.parameter)] == 1e-4 for item in items if item.scope != "vision.merger")


def test_rates_by_the_longest_word():
    recipe = get_recipe("lora_dual", learning_rate=1.0, learning_rates={"vision": 0.5, "vision.merger": 0.1, "text.mlp": 0.2})
    scopes = ("text.attention", "text.mlp", "vision.attention.output", "vision.merger")
    assert [learning_rate_of(scope, recipe) for scope in scopes] == [1.0, 0.2, 0.5, 0.1]


def staged(*shares, **values):
    lora = LoRA(("text.attention",), r=2, alpha=2)
    stages = tuple(Stage(("lora",), share) for share in shares)
    return Recipe("x", "r", "s", (lora,), learning_rate=1.0, chosen=(), stages=stages, **values)


@pytest.mark.parametrize("shares, steps, ends", [((1.0,), 7, (7,)), ((1 / 3, 2 / 3), 9, (3, 9)), ((0.01, 0.99), 10, (1, 10))])
def test_stage_ends(shares, steps, ends):
    assert stage_ends(staged(*shares), steps) == ends


def test_schedule_warms_up_and_decays_in_each_stage():
    factor = stage_schedule(staged(0.5, 0.5, warmup_ratio=0.25, scheduler="linear"), (8, 16))
    stage = [1 / 3, 2 / 3, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert [factor(step) for step in range(16)] == pytest.approx(stage + stage)
    cosine = stage_schedule(staged(1.0, warmup_ratio=0.0), (4,))
    assert [cosine(step) for step in range(4)] == pytest.approx([1, 0.8535534, 0.5, 0.1464466])


def test_checkpoints_hold_no_base(base, processor, examples, tmp_path):
    recipe = get_recipe("oft_vision", **QUICK)
    train(base, processor, recipe, examples, tmp_path, config=TrainConfig(max_steps=4, save_steps=1))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    files = {path.name: path.stat().st_size for path in (tmp_path / "checkpoint-4").iterdir()}
    assert files["trainable.safetensors"] < 100_000 and not any("model" in name for name in files)
    assert len(json.loads((tmp_path / "checkpoint-4" / "history.json").read_text())) == 4


def test_gradient_checkpointing_changes_no_result(processor, examples, tmp_path):
    recipe, results = get_recipe("oft_vision", **QUICK), []
    for on in (False, True):
        model = load_model(TINY_BASE)
        config = TrainConfig(max_steps=1, gradient_checkpointing=on)
        train(model, processor, recipe, examples, tmp_path / str(on), config=config)
        results.append(weights(model))
    assert all(torch.allclose(results[0][name], results[1][name], atol=1e-6) for name in results[0])


def test_a_recipe_that_does_not_fit_leaves_the_model(base):
    with pytest.raises(ValueError):
        apply_recipe(base, get_recipe("oft_vision", block_size=50))
    assert not adapter_parameters(base)
