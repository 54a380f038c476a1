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
    assert get_recipe("hybrid_staged", **TINY_BASE_OVERRIDES["hybrid_staged"]).stages[0] == Stage(("oft",), epochs=1)
    assert get_recipe("lora_dual").towers == {"vision.merger": {"learning_rate": 2e-4}}
    assert get_recipe("oft_dual").stages == (Stage(("oft",), frozen_blocks=3, frozen_share=0.25),)
    assert all(len(get_recipe(name).stages) == 1 for name in RECIPES if name != "hybrid_staged")


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_complete_and_plain(name):
    recipe = get_recipe(name, num_epochs=1)
    assert recipe.name == name and recipe.report.startswith("Report ") and recipe.precision is None
    fields = {f.name for f in dataclasses.fields(Recipe)}
    in_adapters = {f.name for adapter in recipe.adapters for f in dataclasses.fields(adapter)}
    in_stages = {f.name for f in dataclasses.fields(Stage)}
    assert set(recipe.chosen) <= fields | in_adapters | in_stages
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
    plain = [{"train": "oft", "steps": 50, "learning_rate": 1e-3}, {"train": ["lora", "vision.merger"], "scheduler": "constant"}]
    first, second = get_recipe("hybrid_staged", stages=plain).stages
    assert first == Stage(("oft",), steps=50, learning_rate=1e-3)
    assert second == Stage(("lora", "vision.merger"), scheduler="constant")
    again = json.loads(json.dumps(dataclasses.asdict(get_recipe("oft_dual"))["stages"]))  # as a run record holds them
    assert get_recipe("oft_dual", stages=again).stages == get_recipe("oft_dual").stages


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
        ("lora_text", {"stages": (Stage(("lora",), 0.5),)}, r"make 0.5 of the run: 1 is right"),
        ("lora_text", {"stages": (Stage(("lora",), 0.5), Stage(("lora",), epochs=2))}, r"\(of 3\) make 1.17 of the run: 1 is"),
        ("lora_text", {"stages": (Stage(("lora",), epochs=3), Stage(("lora",)))}, "nothing is left for the stage without"),
        ("lora_text", {"stages": (Stage(("lora",)),) * 2}, "2 stages have no length"),
        ("lora_text", {"stages": (Stage(("lora",), steps=9), Stage(("lora",), 0.5))}, "then one stage must have no length"),
        ("lora_text", {"stages": (Stage(("oft",)),)}, r"trains \('oft',\), and 'oft' means none .*: lora on text.attention"),
        ("hybrid_staged", {"stages": (Stage(("oft",)),)}, "no stage trains lora on text.attention"),
        ("hybrid_staged", {"stages": (Stage(("oft", "lora"), frozen_blocks=3),)}, "freezes 3 vision blocks, and none has"),
        ("lora_text", {"stages": ({"train": ["lora"], "length": 3},)}, "no 'length' here; it has train, share, epochs, steps"),
        ("lora_text", {"stages": ({"train": ["lora"], "share": 0.5, "steps": 3},)}, "{'share': 0.5, 'steps': 3}: give one"),
        ("lora_text", {"stages": ({"train": ["text.attn"]},)}, "stage's train is .* lora, oft, vision, text, vision.attention,"),
        ("lora_text", {"stages": ({"train": "lora", "frozen_share": 2},)}, "frozen_share is 2, it must be a number above 0"),
        ("lora_text", {"stages": "half"}, "stages is 'half', it must be a tuple of stages, as {'train'"),
        ("lora_text", {"stages": (Stage(("lora",), learning_rate=1e-3),), "learning_rate": 0}, "no ratio to the recipe's, 0"),
        ("lora_dual", {"towers": {"vision": 1e-3}}, "it must be a mapping from tower or scope to learning_rate, weight_decay"),
        ("lora_dual", {"towers": {"merger": {"learning_rate": 1e-3}}}, "towers has no 'merger': there are vision, text,"),
        ("lora_dual", {"towers": {"text": {"lr": 1e-3}}}, r"towers\['text'\] has no 'lr': a tower has learning_rate,"),
        ("lora_dual", {"towers": {"text": {"adam_beta2": 1.5}}}, r"towers\['text'\]'s adam_beta2 is 1.5, it must be"),
        ("lora_text", {"towers": {"vision": {"learning_rate": 1e-3}}}, "'vision', which means none of its adapters"),
    ],
)
def test_wrong_requests_name_what_is_right(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        get_recipe(name, **overrides)
