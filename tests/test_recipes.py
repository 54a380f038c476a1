"""recipes: the reports' values, overrides and their errors."""

import dataclasses
import json

import pytest

from vlftlib.recipes import LoRA, OFT, RECIPES, TINY_BASE_OVERRIDES, Recipe, Stage, get_recipe


def test_reported_values():
    text, vision = get_recipe("lora_text_vision").adapters
    assert text == LoRA(("text.attention",), r=32, alpha=64, dropout=0.05)
    assert vision == LoRA(("vision.attention",), r=32, alpha=64, dropout=0.05, last_n_blocks=6)
    assert get_recipe("lora_text").adapters == (text,)
    assert get_recipe("lora_text").learning_rate == 2e-4 and get_recipe("oft_vision").learning_rate == 1e-4
    assert get_recipe("oft_vision").adapters == (OFT(("vision.attention.output",), block_size=64),)
    vision, text = get_recipe("lora_dual").adapters
    assert (vision.r, vision.alpha, vision.dropout) == (8, 32, 0.1) and (text.r, text.alpha, text.dropout) == (8, 16, 0.05)
    assert get_recipe("lora_dual").adam_beta2 == get_recipe("oft_dual").adam_beta2 == 0.95
    hybrid = get_recipe("hybrid_staged")
    assert hybrid.adapters[0] == OFT(("vision.merger",), block_size=256)
    assert hybrid.adapters[1] == LoRA(("text.attention",), r=16, alpha=32, dropout=0.05)
    assert hybrid.stages == (Stage(("oft",), 1 / 3), Stage(("lora", "oft"), 2 / 3)) and hybrid.num_epochs == 3


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_complete_and_plain(name):
    recipe = get_recipe(name, num_epochs=1)
    assert recipe.name == name and recipe.report.startswith("Report ") and recipe.precision is None
    fields = {f.name for f in dataclasses.fields(Recipe)}
    in_adapters = {f.name for adapter in recipe.adapters for f in dataclasses.fields(adapter)}
    assert set(recipe.chosen) <= fields | in_adapters
    plain = json.loads(json.dumps(dataclasses.asdict(recipe), allow_nan=False))
    assert plain["overrides"] == {"num_epochs": 1} and {adapter.method for adapter in recipe.adapters} <= {"lora", "oft"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.learning_rate = 1.0


def test_overrides_reach_the_adapters_that_use_them():
    recipe = get_recipe("hybrid_staged", r=8, dropout=0.02, block_size=128, learning_rate=3e-4)
    oft, lora = recipe.adapters
    assert oft == OFT(("vision.merger",), block_size=128) and (lora.r, lora.dropout) == (8, 0.02)
    assert recipe.learning_rate == 3e-4 and recipe.overrides["r"] == 8
    blocks, reflections = get_recipe("oft_dual", **TINY_BASE_OVERRIDES["oft_dual"]).adapters
    assert blocks.block_size == 64 and reflections.block_size is None
    text, vision = get_recipe("lora_text_vision", last_n_blocks=2).adapters
    assert text.last_n_blocks is None and vision.last_n_blocks == 2
    assert get_recipe("lora_text", scope="text.mlp").adapters[0].scope == ("text.mlp",)
    together = get_recipe("hybrid_staged", stages=(Stage(("lora", "oft"), 1.0),))
    assert len(together.stages) == 1 and get_recipe("hybrid_staged").overrides == {}


@pytest.mark.parametrize(
    "name, overrides, message",
    [
        ("lora", {}, "unknown recipe 'lora': there are lora_text, "),
        ("lora_text", {"block_size": 64}, "has no 'block_size': it has scope, r, alpha, dropout, "),
        ("lora_text", {"last_n_blocks": 2}, "has no 'last_n_blocks'"),
        ("lora_text_vision", {"scope": "text.mlp"}, "has no 'scope'"),
        ("oft_vision", {"lr": 1e-4}, "has no 'lr': it has .*learning_rate"),
        ("lora_text", {"r": 0}, "r is 0, it must be an integer of at least 1"),
        ("lora_text", {"learning_rate": "1e-4"}, "learning_rate is '1e-4', it must be a number from 0 to 1"),
        ("lora_text", {"precision": "half"}, "one of None, float32, bf16, fp16"),
        ("oft_vision", {"block_size": {"proj": 1}}, "block_size is .* at least 2"),
        ("oft_dual", {"num_reflections": 3}, "an even integer"),
        ("hybrid_staged", {"stages": (Stage(("oft",), 0.5),)}, r"shares are \[0.5\]"),
        ("lora_text", {"stages": (Stage(("oft",), 1.0),)}, r"trains \('oft',\)"),
    ],
)
def test_wrong_requests_name_what_is_right(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        get_recipe(name, **overrides)
