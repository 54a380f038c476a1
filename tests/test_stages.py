"""stages: where they end, what trains in them, how fast; every tensor in one optimizer group."""

import pytest
import torch

from vlftlib.adapters import adapter_parameters, apply_recipe, stage_parameters
from vlftlib.models import TINY_BASE, load_model
from vlftlib.recipes import OFT, RECIPES, TINY_BASE_OVERRIDES, LoRA, Recipe, Stage, get_recipe
from vlftlib.stages import describe_groups, parameter_groups, plan_stages, settings_of, stage_schedule
from vlftlib.trainer import RecipeTrainer, TrainConfig, train


def staged(*stages, **values):
    values = dict(learning_rate=1.0, chosen=(), stages=stages) | values
    return Recipe("x", "r", "s", (LoRA(("text.attention",), r=2, alpha=2),), **values)


def lora(**values):
    return Stage(("lora",), **values)


@pytest.mark.parametrize(
    "stages, per_epoch, max_steps, ends",
    [
        ([lora()], 7, None, [21]),
        ([lora()], 7, 5, [5]),
        ([lora(share=1 / 3), lora(share=2 / 3)], 3, None, [3, 9]),
        ([lora(share=0.01), lora(share=0.99)], 9, 10, [1, 10]),  # each at least one step
        ([lora(epochs=1), lora()], 50, None, [50, 150]),
        ([lora(epochs=1), lora()], 50, 6, [2, 6]),  # shortened, in proportion
        ([lora(epochs=1), lora(epochs=1), lora(epochs=1)], 3, None, [3, 6, 9]),
        ([lora(steps=10), lora(share=0.5), lora()], 10, None, [10, 25, 30]),
        ([lora(), lora(steps=4)], 10, 20, [16, 20]),
        ([lora(steps=4), lora(steps=5)], 10, None, [4, 9]),
    ],
)
def test_where_stages_end(stages, per_epoch, max_steps, ends):
    spans = plan_stages(staged(*stages), per_epoch, max_steps)
    assert [span.end for span in spans] == ends and [span.start for span in spans] == [0, *ends[:-1]]


def test_stages_that_do_not_fit_a_run():
    with pytest.raises(ValueError, match="leave -5 of 15 steps to the one without a length"):
        plan_stages(staged(lora(steps=20), lora()), 5)
    with pytest.raises(ValueError, match="its stages have 9 steps in all, max_steps is 10"):
        plan_stages(staged(lora(steps=4), lora(steps=5)), 5, 10)


def test_schedule_warms_up_and_decays_in_each_stage():
    stages = lora(share=0.5), lora(share=0.5, learning_rate=0.1, scheduler="constant")
    recipe = staged(*stages, warmup_ratio=0.25, scheduler="linear")
    factor = stage_schedule(recipe, plan_stages(recipe, 0, 16))
    first = [1 / 3, 2 / 3, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    second = [0.1 / 3, 0.2 / 3] + 6 * [0.1]
    assert [factor(step) for step in range(16)] == pytest.approx(first + second)
    cosine = staged(lora(), warmup_ratio=0.0)
    factor = stage_schedule(cosine, plan_stages(cosine, 0, 4))
    assert [factor(step) for step in range(4)] == pytest.approx([1, 0.8535534, 0.5, 0.1464466])


def test_settings_by_the_longest_word():
    towers = {
        "vision": {"learning_rate": 0.5, "weight_decay": 0.1},
        "vision.merger": {"learning_rate": 0.1, "adam_beta2": 0.9},
        "vision.attention.output": {"learning_rate": 0.3},
    }
    recipe = get_recipe("lora_dual", learning_rate=1.0, towers=towers)
    own = dict(learning_rate=1.0, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95)
    assert settings_of("model.language_model.layers.0.self_attn.q_proj", recipe) == own
    vision = own | dict(learning_rate=0.5, weight_decay=0.1)
    assert settings_of("model.visual.blocks.3.attn.qkv", recipe) == vision
    assert settings_of("model.visual.blocks.3.attn.proj", recipe) == vision | dict(learning_rate=0.3)
    assert settings_of("model.visual.merger.mlp.0", recipe) == vision | dict(learning_rate=0.1, adam_beta2=0.9)


@pytest.mark.parametrize("name", RECIPES)
def test_every_trainable_tensor_is_in_exactly_one_group(name, base):
    scopes = [scope for adapter in get_recipe(name).adapters for scope in adapter.scope]
    towers = {scope: {"learning_rate": 0.1 / (i + 1), "weight_decay": 0.1} for i, scope in enumerate(scopes)}
    recipe = get_recipe(name, **TINY_BASE_OVERRIDES[name] | {"towers": towers})
    apply_recipe(base, recipe)
    groups = parameter_groups(base, recipe)
    assert len(groups) == len(scopes)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    trainable = [id(parameter) for parameter in base.parameters() if parameter.requires_grad]
    assert sorted(grouped) == sorted(trainable) and len(set(grouped)) == len(grouped)
    assert sum(group["tensors"] for group in describe_groups(base, recipe)) == len(trainable)


def train_and_peek(model, processor, recipe, examples, output, monkeypatch, steps):
    """Train; the adapters' values before each step, and the optimizer."""
    values, seen = [], []

    class Peek(RecipeTrainer):
        def training_step(self, *words, **options):
            values.append({item.name: item.parameter.detach().clone() for item in adapter_parameters(self.model)})
            seen[:] = [self.optimizer]
            return super().training_step(*words, **options)

    monkeypatch.setattr("vlftlib.trainer.RecipeTrainer", Peek)
    run = train(model, processor, recipe, examples, output, config=TrainConfig(max_steps=steps))
    values.append({item.name: item.parameter.detach().clone() for item in adapter_parameters(model)})
    return run, values, seen[0]


def test_rates_and_betas_reach_the_optimizer(base, processor, examples, tmp_path, monkeypatch):
    towers = {"vision.merger": {"learning_rate": 2e-4, "adam_beta1": 0.8}, "text": {"weight_decay": 0.1}}
    steady = dict(warmup_ratio=0, scheduler="constant")
    recipe = get_recipe("lora_dual", batch_size=4, gradient_accumulation_steps=1, towers=towers, **steady)
    run, _, optimizer = train_and_peek(base, processor, recipe, examples, tmp_path, monkeypatch, 1)
    of = {id(p): (g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups for p in g["params"]}
    wanted = {
        "vision.attention": (1e-4, 0, (0.9, 0.95)),
        "vision.merger": (2e-4, 0, (0.8, 0.95)),
        "text.attention": (1e-4, 0.1, (0.9, 0.95)),
    }
    assert all(of[id(item.parameter)] == wanted[item.scope] for item in adapter_parameters(base))
    assert [(group["scopes"], group["learning_rate"]) for group in run.setup["optimizer_groups"]] == [
        (["vision.attention"], 1e-4),
        (["vision.merger"], 2e-4),
        (["text.attention"], 1e-4),
    ]


def test_a_stage_trains_its_adapters_alone(base, processor, examples, tmp_path, monkeypatch):
    recipe = get_recipe("hybrid_staged", batch_size=2, gradient_accumulation_steps=1, learning_rate=1e-2)
    run, values, _ = train_and_peek(base, processor, recipe, examples, tmp_path, monkeypatch, 6)
    methods = {item.name: item.method for item in adapter_parameters(base)}

    def changed(first, second):
        return {methods[name] for name in methods if not torch.equal(values[first][name], values[second][name])}

    assert changed(0, 2) == {"oft"} and changed(2, 6) == {"oft", "lora"}
    assert [(stage["train"], stage["first_step"], stage["last_step"]) for stage in run.setup["stages"]] == [
        (["oft"], 1, 2),
        (["lora", "oft"], 3, 6),
    ]


def test_stages_by_scope(base):
    adapters = OFT(("vision.merger",), block_size=64), LoRA(("vision.attention", "text.attention"), r=2, alpha=2)
    stages = Stage(("vision.attention.output", "vision.merger"), share=0.5), Stage(("oft", "lora"))
    apply_recipe(base, Recipe("x", "r", "s", adapters, learning_rate=1.0, chosen=(), stages=stages))
    first = {item.path.split(".", 2)[2] for item in stage_parameters(base, stages[0])}
    assert first == {f"blocks.{i}.attn.proj" for i in range(4)} | {"merger.mlp.0", "merger.mlp.2"}
    assert len(stage_parameters(base, stages[1])) == len(adapter_parameters(base))


def test_first_vision_blocks_rest_until_a_given_point(processor, examples, tmp_path, monkeypatch):
    """Report C's freeze: nothing in these blocks changes, no graph is built there, and later all of it trains."""
    stages = [{"train": "oft", "frozen_blocks": 3, "frozen_share": 0.5}]
    recipe = get_recipe("oft_dual", **TINY_BASE_OVERRIDES["oft_dual"] | dict(batch_size=2, stages=stages))
    model, graphs = load_model(TINY_BASE), []
    model.model.visual.blocks[2].register_forward_hook(lambda block, x, y: graphs.append(y.requires_grad))
    run, values, _ = train_and_peek(model, processor, recipe, examples, tmp_path, monkeypatch, 4)
    assert run.setup["stages"][0]["frozen_until_step"] == 2
    assert graphs[:4] == [False, False, True, True]
    for name in values[0]:
        resting = any(f"blocks.{i}." in name for i in range(3)) and not name.endswith("oft_scale")
        assert torch.equal(values[0][name], values[2][name]) == resting, name
        assert not torch.equal(values[2][name], values[4][name]), name
    with pytest.raises(ValueError, match="in the first 4 blocks, frozen"):
        vision_alone = apply_recipe(load_model(TINY_BASE), get_recipe("oft_vision"))
        stage_parameters(vision_alone, Stage(("oft",)), frozen_blocks=4)
