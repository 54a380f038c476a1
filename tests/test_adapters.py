"""adapters: modules by scope, what is put on them and trained, counts, files in PEFT's form, merging."""

import copy
import json
import logging

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from vlftlib import adapters, mapping, scopes
from vlftlib.adapters import (
    adapter_parameters,
    apply_lora,
    apply_oft,
    apply_recipe,
    check_merge,
    count_parameters,
    count_recipe,
    load_adapters,
    merge_adapters,
    save_adapters,
    select_modules,
    stage_parameters,
    unmerge_adapters,
)
from vlftlib.models import empty_model, full_size_config
from vlftlib.oft import OFTLinear
from vlftlib.recipes import RECIPES, TINY_BASE_OVERRIDES, get_recipe
from vlftlib.tiny_base import build_model, build_tokenizer


@pytest.fixture(scope="module")
def pristine():
    return build_model(build_tokenizer()).eval()


@pytest.fixture
def base(pristine):
    return copy.deepcopy(pristine)


@pytest.fixture(scope="module")
def inputs(pristine):
    """One picture of 8 x 8 patches and a few words."""
    torch.manual_seed(0)
    config = pristine.config
    image = [config.vision_start_token_id] + [config.image_token_id] * 16 + [config.vision_end_token_id]
    input_ids = torch.tensor([[5, 6, *image, 7, 8, 9]])
    return {
        "input_ids": input_ids,
        "mm_token_type_ids": (input_ids == config.image_token_id).int(),
        "pixel_values": torch.randn(64, 1176),
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
    }


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs).logits


def tiny_recipe(name, **overrides):
    return get_recipe(name, **TINY_BASE_OVERRIDES.get(name, {}) | overrides)


@torch.no_grad()
def disturb(model, amount=0.05):
    generator = torch.Generator().manual_seed(1)
    for item in adapter_parameters(model):
        item.parameter.add_(amount * torch.randn(item.parameter.shape, generator=generator))
    return model


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# finding modules


def test_scopes_are_exact_paths(pristine):
    vision = [f"model.visual.blocks.{i}" for i in range(4)]
    text = [f"model.language_model.layers.{i}" for i in range(3)]
    expected = {
        "vision.attention": [f"{block}.attn.{name}" for block in vision for name in ("qkv", "proj")],
        "vision.attention.output": [f"{block}.attn.proj" for block in vision],
        "vision.mlp": [f"{block}.mlp.{name}_proj" for block in vision for name in ("gate", "up", "down")],
        "vision.merger": ["model.visual.merger.mlp.0", "model.visual.merger.mlp.2"],
        "text.attention": [f"{layer}.self_attn.{name}_proj" for layer in text for name in "qkvo"],
        "text.mlp": [f"{layer}.mlp.{name}_proj" for layer in text for name in ("gate", "up", "down")],
    }
    assert {scope: select_modules(pristine, scope) for scope in scopes.SCOPES} == expected
    everything = select_modules(pristine, list(scopes.SCOPES))
    linear = {path for path, module in pristine.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(everything) == linear - {"lm_head"} and len(everything) == len(set(everything))
    last = expected["vision.mlp"][-3:] + expected["vision.merger"]
    assert select_modules(pristine, ["vision.mlp", "vision.merger"], 1) == last


def test_scopes_on_old_layouts_and_wrapped_models(base):
    paths = select_modules(base, list(scopes.SCOPES))
    old = torch.nn.Module()  # as transformers before 4.52 arranged it
    old.visual, old.model = base.model.visual, base.model.language_model
    rename = {"model.visual.": "visual.", "model.language_model.": "model."}
    for new_prefix, old_prefix in rename.items():
        paths = [old_prefix + path.removeprefix(new_prefix) if path.startswith(new_prefix) else path for path in paths]
    assert select_modules(old, list(scopes.SCOPES)) == paths
    before = select_modules(base, list(scopes.SCOPES))
    apply_oft(apply_lora(base, "vision.attention", r=2, alpha=4), "vision.merger", 64)
    assert select_modules(base, list(scopes.SCOPES)) == before
    wrapped = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(target_modules=["q_proj"]))
    assert select_modules(wrapped, list(scopes.SCOPES)) == [f"base_model.model.{path}" for path in before]


def test_scope_errors_list_what_there_is(pristine, caplog):
    listed = r"there is vision.attention \(8 modules\), .*text.mlp \(9 modules\)"
    for scope in ("attention", ["text.mlp", "text.head"], []):
        with pytest.raises(ValueError, match=listed):
            select_modules(pristine, scope)
    with pytest.raises(ValueError, match=r"'text.mlp' has no modules in this model; there is vision.attention \(8"):
        select_modules(torch.nn.ModuleDict({"visual": pristine.model.visual}), "text.mlp")
    for scope, count in (("text.mlp", 2), ("vision.mlp", 0)):
        with pytest.raises(ValueError, match=f"last_n_blocks is {count} for scope {scope}"):
            select_modules(pristine, scope, count)
    scopes._log_all_taken.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert select_modules(pristine, "vision.mlp", 6) == select_modules(pristine, "vision.mlp")
    assert "last_n_blocks is 6, the model has 4 vision blocks: all are taken" in caplog.text


# applying


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_starts_at_the_base_trains_its_adapters_and_counts(base, pristine, inputs, name):
    recipe = tiny_recipe(name)
    expected = count_recipe(base, recipe)
    assert apply_recipe(base, recipe) is base and type(base) is type(pristine)
    torch.testing.assert_close(logits(base, inputs), logits(pristine, inputs), rtol=0, atol=1e-5)
    items = adapter_parameters(base)
    assert trained(base) == {item.name for item in items} and {item.parameter.dtype for item in items} == {torch.float32}
    assert count_parameters(base) == expected
    assert expected.total == sum(p.numel() for p in pristine.parameters()) + expected.trainable
    assert not any(module.training for module in base.modules())
    base.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert [item.name for item in items if item.parameter.grad is None] == []
    assert all(p.grad is None for p in base.parameters() if not p.requires_grad)


def test_start_depends_on_seed_and_module_alone(base, pristine):
    torch.manual_seed(0)
    draw = torch.get_rng_state()
    apply_lora(base.half(), "text.attention", r=4, alpha=8)
    apply_oft(base, "vision.mlp", parametrization="householder", num_reflections=4)
    assert torch.equal(torch.get_rng_state(), draw)
    other = apply_oft(copy.deepcopy(pristine), "vision.mlp", parametrization="householder", num_reflections=4)
    apply_lora(other, ["text.mlp", "text.attention"], r=4, alpha=8)
    values = {item.name: item.parameter for item in adapter_parameters(other)}
    for item in adapter_parameters(base):
        assert item.parameter.dtype == torch.float32 and torch.equal(item.parameter, values[item.name])
    assert base.lm_head.weight.dtype == torch.float16
    again = adapter_parameters(apply_lora(copy.deepcopy(pristine), "text.attention", r=4, alpha=8, seed=1))
    assert not torch.equal(again[0].parameter, values[again[0].name])
    assert len({tuple(parameter.flatten()[:4].tolist()) for name, parameter in values.items() if "lora_A" in name}) == 21


def test_groups_keep_their_own_settings(base):
    apply_recipe(base, tiny_recipe("lora_dual"), max_dropout=0.07)
    layers = adapters.adapted_modules(base)
    vision, text = layers["model.visual.blocks.3.attn.qkv"], layers["model.language_model.layers.2.self_attn.v_proj"]
    assert (vision.scaling["default"], vision.lora_dropout["default"].p) == (4, 0.07)
    assert (text.scaling["default"], text.lora_dropout["default"].p) == (2, 0.05)
    assert not hasattr(base, "peft_config")


def test_scale_is_one_parameter_a_tower(base, inputs):
    apply_recipe(base, tiny_recipe("oft_dual"))
    scales = {name: p for name, p in base.named_parameters() if name.endswith("oft_scale")}
    assert len(scales) == 2 and all(p.dtype == torch.float32 and p.item() == 1 for p in scales.values())
    layers = adapters.adapted_modules(base)
    assert len({id(layer.oft_scale) for layer in layers.values()}) == 2
    base(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(p.grad.abs().item() > 0 for p in scales.values())


def test_stages(base):
    recipe = tiny_recipe("hybrid_staged")
    apply_recipe(base, recipe)
    alone, together = recipe.stages
    items = stage_parameters(base, alone)
    assert {item.method for item in items} == {"oft"} and {item.scope for item in items} == {"vision.merger"}
    assert trained(base) == {item.name for item in items}
    assert len(stage_parameters(base, together)) == len(trained(base)) == 2 + 24
    apply_recipe(plain := copy.deepcopy(base).requires_grad_(False), get_recipe("oft_vision"))
    assert all("visual.blocks" in name for name in trained(plain))  # adapters that were frozen stay so
    with pytest.raises(ValueError, match="the model has no lora adapters"):
        stage_parameters(apply_oft(build_model(build_tokenizer()), "vision.merger", 64), together)


def test_wrong_adapters_leave_the_model_unchanged(base, pristine):
    apply_lora(base, "vision.attention", r=2, alpha=4)
    names = [name for name, _ in base.named_modules()]
    wrong = [
        (lambda: apply_oft(base, "vision.attention.output", 64), "blocks.0.attn.proj has LoRA already"),
        (lambda: apply_lora(base, "vision.attention", r=2, alpha=4), "has LoRA already"),
        (lambda: apply_oft(base, "vision.mlp", 60), "60 doesn't divide its 128 inputs; the nearest that do: 8, 16, 32, 64"),
        (lambda: apply_oft(base, "vision.mlp", {"gate_proj": 64}), "mlp.up_proj: no block size, the mapping has gate_proj"),
        (lambda: apply_oft(base, "vision.merger", {"mlp": 64, "mlp.0": 64, "mlp.2": 64}), "block size for mlp: no such module"),
        (lambda: apply_oft(base, "vision.mlp", parametrization="householder", num_reflections=3), "an even number"),
        (lambda: apply_oft(base, "vision.mlp", parametrization="qr"), "parametrization 'qr'"),
        (lambda: apply_oft(base, "vision.mlp"), "block size None doesn't divide"),
        (lambda: apply_lora(base, "text.mlp", r=0, alpha=1), "r and alpha must be positive"),
        (lambda: apply_recipe(base, get_recipe("hybrid_staged", block_size=60)), "block size 60"),
        (lambda: apply_recipe(base, get_recipe("oft_dual")), "down_proj: block size 60 doesn't divide its 256 inputs"),
        (lambda: stage_parameters(base, get_recipe("oft_vision").stages[0]), "no oft adapters"),
        (lambda: save_adapters(pristine, "nowhere"), "no adapters to save"),
        (lambda: merge_adapters(pristine), "no adapters"),
    ]
    for act, message in wrong:
        with pytest.raises(ValueError, match=message):
            act()
    assert [name for name, _ in base.named_modules()] == names
    twice = get_recipe("lora_text_vision", adapters=get_recipe("lora_text").adapters * 2)
    with pytest.raises(ValueError, match="two adapters on model.language_model.layers.0.self_attn.k_proj"):
        apply_recipe(pristine, twice)
    with pytest.raises(ValueError, match="is a PeftModel"):
        apply_lora(peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])), "text.mlp", r=1, alpha=1)


# files

FOLDERS = {
    "lora_text": ["lora"],
    "lora_text_vision": ["lora"],
    "lora_dual": ["lora-r8-alpha16-dropout0.05", "lora-r8-alpha32-dropout0.1"],
    "oft_vision": ["oft-b64"],
    "oft_dual": ["hra", "oft-b64"],
    "hybrid_staged": ["lora", "oft-b256"],
}


@pytest.mark.parametrize("name", RECIPES)
def test_saved_folders_load_here_and_in_stock_peft(pristine, inputs, tmp_path, name):
    recipe = tiny_recipe(name, **{"scale": False} if name == "oft_dual" else {})
    model = disturb(apply_recipe(copy.deepcopy(pristine), recipe))
    changed = logits(model, inputs)
    assert (changed - logits(pristine, inputs)).abs().max() > 1e-2
    save_adapters(model, tmp_path / "adapters")
    assert [path.name for path in tmp_path.iterdir()] == ["adapters"]
    again = load_adapters(copy.deepcopy(pristine), tmp_path / "adapters")
    assert torch.equal(logits(again, inputs), changed) and count_parameters(again) == count_parameters(model)
    folders = sorted(path for path in (tmp_path / "adapters").iterdir() if path.is_dir())
    assert [path.name for path in folders] == FOLDERS[name]
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        ours = load_adapters(copy.deepcopy(pristine), folder)
        stock = peft.PeftModel.from_pretrained(copy.deepcopy(pristine), folder)
        torch.testing.assert_close(logits(ours, inputs), logits(stock, inputs), rtol=0, atol=1e-5)
        assert (logits(ours, inputs) - logits(pristine, inputs)).abs().max() > 1e-3


STOCK = {
    "lora": peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, alpha_pattern={"v_proj": 12}, rank_pattern={"q_proj": 2}),
    "exact": peft.OFTConfig(oft_block_size=32, use_cayley_neumann=False),
    "exact, blocks shared": peft.OFTConfig(oft_block_size=32, use_cayley_neumann=False, block_share=True),
    "exact, blocks adjusted": peft.OFTConfig(r=3, oft_block_size=0, use_cayley_neumann=False),
    "Neumann": peft.OFTConfig(oft_block_size=32),
    "Neumann, blocks shared": peft.OFTConfig(oft_block_size=32, num_cayley_neumann_terms=8, block_share=True),
    "Neumann, blocks adjusted": peft.OFTConfig(r=3, oft_block_size=0, num_cayley_neumann_terms=3),
    "hra": peft.HRAConfig(r=6),
    "gram_schmidt": peft.HRAConfig(r=4, apply_GS=True),
}


@pytest.fixture(scope="module")
def uneven(pristine):
    """A base whose vision MLPs have 45 inputs: no power of two, as the real ones' 3,420."""
    config = copy.deepcopy(pristine.config)
    config.vision_config.intermediate_size = 45
    torch.manual_seed(0)
    return type(pristine)(config).eval()


@pytest.mark.filterwarnings("ignore:PEFT's Neumann series", "ignore:Invalid `r`")
@pytest.mark.parametrize("name", STOCK)
def test_stock_peft_folders_load_here(pristine, uneven, inputs, tmp_path, name):
    base = uneven if "adjusted" in name else pristine
    config = copy.deepcopy(STOCK[name])
    config.target_modules = {"q_proj", "v_proj", "qkv", "down_proj"}
    stock = peft.get_peft_model(copy.deepcopy(base), config)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    stock.eval().save_pretrained(tmp_path / "stock")
    ours = load_adapters(copy.deepcopy(base), tmp_path / "stock")
    assert (logits(stock, inputs) - logits(base, inputs)).abs().max() > 1e-2
    torch.testing.assert_close(logits(ours, inputs), logits(stock, inputs), rtol=0, atol=1e-5)
    save_adapters(ours, tmp_path / "ours")
    again = load_adapters(copy.deepcopy(base), tmp_path / "ours")
    assert torch.equal(logits(again, inputs), logits(ours, inputs))

    if config.peft_type == "OFT":  # trains on as there, and goes back as what it was
        for model in (stock, ours):
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
        grads = {item.path: item.parameter.grad for item in adapter_parameters(ours)}
        for parameter_name, parameter in stock.named_parameters():
            if parameter.requires_grad:
                grad = grads.pop(parameter_name.removeprefix("base_model.model.").removesuffix(".oft_R.default.weight"))
                grad = grad if config.use_cayley_neumann else -grad
                assert (grad - parameter.grad).norm() < 1e-3 * parameter.grad.norm(), parameter_name
        assert not grads
        folders = {path.name: path for path in (tmp_path / "ours").iterdir() if path.is_dir()}
        for folder in folders.values():
            back = peft.PeftConfig.from_pretrained(folder)
            for field in ("use_cayley_neumann", "num_cayley_neumann_terms", "block_share", "module_dropout"):
                if field != "num_cayley_neumann_terms" or config.use_cayley_neumann:
                    assert getattr(back, field) == getattr(config, field), field
        if "adjusted" in name:
            assert len(folders) == 3 and any("-b15" in folder for folder in folders)
        else:
            (folder,) = folders.values()
            there = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)
            torch.testing.assert_close(logits(there, inputs), logits(stock, inputs), rtol=0, atol=1e-5)
    if config.peft_type != "LORA":
        assert check_merge(ours, inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}).passed
        changed = logits(ours, inputs)
        torch.testing.assert_close(logits(unmerge_adapters(merge_adapters(ours)), inputs), changed, rtol=0, atol=1e-4)


def test_a_neumann_series_that_is_no_rotation_is_said(base, pristine, tmp_path, recwarn):
    stock = peft.get_peft_model(base, peft.OFTConfig(oft_block_size=32, target_modules=["o_proj"]))
    for amount, said in ((0.002, 0), (0.1, 1)):
        with torch.no_grad():
            for parameter in stock.parameters():
                if parameter.requires_grad:
                    parameter.copy_(amount * torch.randn_like(parameter))
        stock.save_pretrained(tmp_path / str(amount))
        recwarn.clear()
        load_adapters(copy.deepcopy(pristine), tmp_path / str(amount))
        messages = [str(w.message) for w in recwarn if "is no rotation on 3 of 3 modules" in str(w.message)]
        assert len(messages) == said


def test_loading_into_adapted_layers_keeps_their_parameters(base, pristine, inputs, tmp_path):
    recipe = tiny_recipe("hybrid_staged")
    model = disturb(apply_recipe(base, recipe))
    save_adapters(model, tmp_path / "a")
    fresh = apply_recipe(copy.deepcopy(pristine), recipe)
    kept = [item.parameter for item in adapter_parameters(fresh)]
    logits(fresh, inputs)
    assert fresh in mapping._PLANS
    load_adapters(fresh, tmp_path / "a")
    assert fresh not in mapping._PLANS  # nor its norm bounds: no step led to these values
    assert all(item.parameter is parameter for item, parameter in zip(adapter_parameters(fresh), kept))
    assert torch.equal(logits(fresh, inputs), logits(model, inputs))
    with pytest.raises(ValueError, match="has StoredAdapter.*size=16"):
        load_adapters(apply_lora(copy.deepcopy(pristine), "text.attention", r=8, alpha=32), tmp_path / "a")
    with pytest.raises(ValueError, match="no values for the model's adapters on model.visual.blocks.0.mlp.down_proj"):
        load_adapters(apply_oft(fresh, "vision.mlp", 32), tmp_path / "a")
    alone = load_adapters(copy.deepcopy(pristine), tmp_path / "a" / "lora")
    assert torch.equal(logits(load_adapters(alone, tmp_path / "a" / "oft-b256"), inputs), logits(model, inputs))


def test_scale_other_than_one_is_kept_from_peft(base, pristine, inputs, tmp_path):
    model = disturb(apply_recipe(base, tiny_recipe("oft_dual", block_dropout=0.1)))
    save_adapters(model, tmp_path / "a")
    again = load_adapters(copy.deepcopy(pristine), tmp_path / "a")
    assert torch.equal(logits(again, inputs), logits(model, inputs))
    layers = adapters.adapted_modules(again).values()
    assert len({id(layer.oft_scale) for layer in layers}) == 2 and {layer.dropout for layer in layers} == {0.1}
    for folder in ("hra", "oft-b64"):
        with pytest.raises(ValueError, match="adapter_config.json"):
            peft.PeftModel.from_pretrained(copy.deepcopy(pristine), tmp_path / "a" / folder)
        with pytest.raises(FileNotFoundError, match="no adapters here"):
            load_adapters(copy.deepcopy(pristine), tmp_path / "a" / folder)


def test_a_model_inside_pefts_wrapper_computes_alike(base, inputs, monkeypatch):
    """LoRA by PEFT's own call on a model that has our OFT, and our OFT on the model inside a PeftModel."""
    model, mapped = disturb(apply_oft(base, "vision.merger", 64)), []
    before, original = logits(model, inputs), mapping.map_layers
    monkeypatch.setattr(mapping, "map_layers", lambda layers, *rest: mapped.append(len(layers)) or original(layers, *rest))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    oft = [item.parameter.requires_grad_(True) for item in adapter_parameters(model) if item.method == "oft"]  # PEFT froze them
    assert (logits(wrapped, inputs) - before).abs().max() > 1e-3
    grads = []
    for caller in (wrapped, model):
        mapped.clear()
        loss = caller(**inputs, labels=inputs["input_ids"]).loss
        assert sum(mapped) == len(oft)
        grads.append(torch.autograd.grad(loss, oft))
    assert all(torch.equal(one, two) and one.norm() > 0 for one, two in zip(*grads))
    apply_oft(wrapped.get_base_model(), "vision.attention.output", 32)
    apply_lora(wrapped.get_base_model(), "text.mlp", r=2, alpha=4)
    changed = logits(disturb(model), inputs)
    assert torch.equal(logits(wrapped, inputs), changed) and count_parameters(wrapped) == count_parameters(model)
    with pytest.raises(ValueError, match="q_proj has LoRA already"):
        apply_oft(wrapped.get_base_model(), "text.attention", 64)


def test_lora_inside_an_oft_layer_is_refused(base, inputs):
    wrapped = peft.get_peft_model(apply_oft(base, "vision.merger", 64), peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(TypeError, match="an adapter can't be put inside another's base_layer"):
        logits(wrapped, inputs)
    with pytest.raises(ValueError, match="visual.merger.mlp.0.base_layer is PEFT's Linear: an adapter can't be put inside"):
        save_adapters(base, "nowhere")


def test_older_layouts_keys_are_recognised(base, pristine, inputs, tmp_path):
    model = disturb(apply_recipe(base, tiny_recipe("lora_text_vision")))
    folder = save_adapters(model, tmp_path / "a") / "lora"
    old = {
        key.replace(".model.visual.", ".visual.").replace(".language_model.layers.", ".layers."): value
        for key, value in load_file(folder / "adapter_model.safetensors").items()
    }
    assert any(key.startswith("base_model.model.visual.") for key in old)
    assert any(key.startswith("base_model.model.model.layers.") for key in old)
    save_file(old, folder / "adapter_model.safetensors")
    assert torch.equal(logits(load_adapters(copy.deepcopy(pristine), folder), inputs), logits(model, inputs))
    config = folder / "adapter_config.json"
    settings = json.loads(config.read_text())
    # patterns that mean nothing in the new layout
    config.write_text(json.dumps(settings | {"target_modules": r"model\.layers\..*_proj|visual\..*(qkv|proj)"}))
    with pytest.raises(ValueError, match="names 21 modules without weights: .*mlp.down_proj"):
        load_adapters(copy.deepcopy(pristine), folder)
    config.write_text(json.dumps(settings | {"target_modules": r"model\.layers\..*[qkvo]_proj|visual\..*(qkv|attn.proj)"}))
    assert torch.equal(logits(load_adapters(copy.deepcopy(pristine), folder), inputs), logits(model, inputs))


def test_bad_folders_are_refused_and_change_nothing(base, pristine, tmp_path):
    folder = save_adapters(disturb(apply_recipe(base, tiny_recipe("lora_text"))), tmp_path / "a") / "lora"
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    good, settings = load_file(weights), json.loads(config.read_text())
    fresh = copy.deepcopy(pristine)

    def refused(message, error=ValueError, where=folder):
        with pytest.raises(error, match=message):
            load_adapters(fresh, where)

    refused("no adapters here", FileNotFoundError, tmp_path)
    strange = {key.replace(".layers.", ".blocks."): value for key, value in good.items()}
    foreign = {key.replace(".language_model.", ".vision_tower.encoder."): value for key, value in good.items()}
    first = sorted(good)[0]
    for tensors, message in (
        (strange, "12 of 12 modules aren't in this model's .*text.mlp: model.language_model.blocks.0.self_attn.k_proj"),
        (foreign, "12 of 12 modules aren't in this model's .*text.mlp: model.vision_tower.encoder.layers.0"),
        ({key: value for key, value in good.items() if key != first}, "k_proj has lora_B alone"),
        ({key: value for key, value in good.items() if ".0.self_attn.k_" not in key}, "1 modules without weights"),
        ({first: good[first], "base_model.model.lm_head.weight": good[first].clone()}, "not LORA weights: .*lm_head"),
        ({key: value[..., :-1].contiguous() for key, value in good.items()}, "has shapes"),
        ({}, "no tensor at all"),
    ):
        save_file(tensors, weights)
        refused(message)
    weights.write_bytes(b"garbage")
    refused("broken")
    weights.rename(folder / "adapter_model.bin")
    refused("pickled and not read", FileNotFoundError)
    save_file(good, weights)
    for change, message in (
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which has no counterpart here .only True or False"),
        ({"bias": "lora_only"}, "bias is 'lora_only', which has no counterpart here .only 'none'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"r": 8}, "has rank 32, adapter_config.json says 8"),
        ({"rank_pattern": {"v_proj": 2}}, "v_proj has rank 32, adapter_config.json says 2"),
        ({"exclude_modules": ["layers.0.self_attn.q_proj"]}, "weights for 1 modules that adapter_config.json doesn't name: .*q_pr"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, "weights for 11 modules that adapter_config.json doesn't"),
        ({"target_modules": [*settings["target_modules"], "lm_head"]}, "names 1 modules without weights: lm_head"),
        ({"field_of_the_future": 1}, "field_of_the_future is 1"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": "OFT", "use_cayley_neumann": True, "coft": True}, "coft is True"),
        ({"peft_type": "OFT"}, "no use_cayley_neumann: saved by a PEFT before 0.16"),
        ({"peft_type": "OFT", "use_cayley_neumann": True, "peft_version": "0.17.1"}, "with peft_version '0.17.1': before 0.18"),
        ({"peft_type": "OFT", "use_cayley_neumann": True, "num_cayley_neumann_terms": 0, "r": 0}, "not OFT weights"),
    ):
        config.write_text(json.dumps(settings | change))
        refused(message)
    assert not adapters.adapted_modules(fresh) and trained(fresh) == trained(pristine)
    config.write_text(json.dumps(settings))
    load_adapters(fresh, tmp_path / "a")
    other = copy.deepcopy(pristine)
    other.config.text_config.num_hidden_layers = 4
    with pytest.raises(ValueError, match="adapters of another base: text_config.num_hidden_layers 3 there, 4 here"):
        load_adapters(other, tmp_path / "a")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(
    "options, message",
    [
        ({"modules_to_save": ["merger"]}, "merger.modules_to_save.default.* can be trained and would be lost"),
        ({"bias": "all"}, "bias.* can be trained and would be lost"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"target_parameters": ["gate_proj.weight"]}, "target_parameters is"),
        ({"use_dora": True}, "use_dora is True"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens has an adapter outside the known scopes"),
    ],
)
def test_what_stock_peft_trains_is_saved_or_refused(base, tmp_path, options, message):
    """In a PeftModel, in the model inside, and in one that was loaded to answer, where nothing trains."""
    config = peft.LoraConfig(r=2, **{"target_modules": ["q_proj"]} | options)
    wrapped = peft.get_peft_model(base, config)
    for model in (wrapped, wrapped.get_base_model()):
        with pytest.raises(ValueError, match=message):
            save_adapters(model, tmp_path / "a")
    if "tokens" not in message:
        with pytest.raises(ValueError, match=next(iter(options))):
            save_adapters(wrapped.requires_grad_(False), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_what_a_folder_has_no_place_for_is_refused(base, tmp_path):
    apply_oft(base, "vision.merger", 64, scale=True)
    base.model.visual.merger.mlp[2].oft_scale = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="merger.mlp.2 has a scale of its own: the layers of a tower share one"):
        save_adapters(base, tmp_path / "a")
    base.model.visual.merger.mlp[2].oft_scale = base.model.visual.merger.mlp[0].oft_scale
    base.model.visual.blocks[0].attn.qkv.requires_grad_(True)
    with pytest.raises(ValueError, match="blocks.0.attn.qkv.bias, .*weight can be trained and would be lost, .*: freeze it first"):
        save_adapters(base, tmp_path / "a")
    base.model.visual.blocks[0].attn.qkv.requires_grad_(False)
    wrapped = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    wrapped.add_adapter("second", peft.LoraConfig(target_modules=["k_proj"]))
    with pytest.raises(ValueError, match="k_proj has the LoRA adapters second, active default: there can be one, active"):
        save_adapters(wrapped, tmp_path / "a")


def test_saving_replaces_whole_folders_or_nothing(base, tmp_path, monkeypatch):
    apply_recipe(base, tiny_recipe("hybrid_staged"))
    path = save_adapters(base, tmp_path / "a")
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vlftlib.peft_files.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_adapters(disturb(base), path)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    monkeypatch.undo()
    assert save_adapters(base, path) == path and list(tmp_path.iterdir()) == [path]
    assert {file for file in path.rglob("*") if file.is_file()} == set(before)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(FileExistsError, match="something other than adapters"):
        save_adapters(base, tmp_path / "mine")


# merging


@pytest.mark.parametrize("name", ["lora_dual", "oft_dual", "hybrid_staged"])
def test_merge_and_unmerge(base, pristine, inputs, name):
    model = disturb(apply_recipe(base, tiny_recipe(name)))
    changed = logits(model, inputs)
    weight = {path: layer.base_layer.weight.clone() for path, layer in adapters.adapted_modules(model).items()}
    assert merge_adapters(model) is model
    torch.testing.assert_close(logits(model, inputs), changed, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="already merged on model"):
        merge_adapters(model)
    assert unmerge_adapters(model) is model
    for path, layer in adapters.adapted_modules(model).items():
        torch.testing.assert_close(layer.base_layer.weight, weight[path], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="not merged on model"):
        unmerge_adapters(model)
    merge_adapters(model, remove=True)
    assert not adapters.adapted_modules(model) and model.state_dict().keys() == pristine.state_dict().keys()
    torch.testing.assert_close(logits(model, inputs), changed, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lora_dual", "oft_dual", "hybrid_staged"])
def test_check_merge_passes_a_merge_and_leaves_no_trace(base, inputs, name, dtype):
    model = disturb(apply_recipe(base.to(dtype), tiny_recipe(name))).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batch = inputs | {"attention_mask": torch.ones_like(inputs["input_ids"]), "labels": inputs["input_ids"]}
    checked = check_merge(model, batch)
    assert checked.passed and 0 < checked.difference < checked.bound < 0.2 * checked.largest
    assert model.training and not any(layer.merged for layer in adapters.adapted_modules(model).values())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_check_merge_puts_biases_back_too(base, inputs):
    wrapped = peft.get_peft_model(base, peft.LoraConfig(target_modules=["qkv"], lora_bias=True, init_lora_weights=False))
    disturb(base)
    before = {key: value.clone() for key, value in base.state_dict().items()}
    assert check_merge(wrapped.get_base_model(), inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}).passed
    assert all(torch.equal(value, before[key]) for key, value in base.state_dict().items())


def test_check_merge_finds_one_layer_that_was_forgotten(base, inputs, monkeypatch):
    model = disturb(apply_recipe(base, tiny_recipe("oft_vision")), 0.01)
    batch = inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}
    assert check_merge(model, batch).passed
    last = adapters.adapted_modules(model)["model.visual.blocks.3.attn.proj"]
    monkeypatch.setattr(last, "merge", lambda: setattr(last, "merged", True))
    checked = check_merge(model, batch)
    assert not checked.passed and "NOT within rounding" in str(checked)


# full size


@pytest.fixture(scope="module", params=["3B", "7B"])
def full_size(request):
    return request.param, empty_model(full_size_config(request.param))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_on_full_size_models(full_size, name):
    size, model = full_size
    hidden, layers, keys = {"3B": (2048, 36, 2 * 128), "7B": (3584, 28, 4 * 128)}[size]
    text_sizes = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]  # q, k, v, o
    vision_sizes = [(1280, 3840), (1280, 1280)]

    def lora(sizes, r):
        return sum(r * (inputs + outputs) for inputs, outputs in sizes)

    def blocks(inputs, size):
        return inputs // size * size * (size - 1) // 2

    merger = [(5120, 5120), (5120, hidden)]
    expected = {
        "lora_text": {"text.attention": layers * lora(text_sizes, 32)},
        "lora_text_vision": {"vision.attention": 6 * lora(vision_sizes, 32), "text.attention": layers * lora(text_sizes, 32)},
        "lora_dual": {
            "vision.attention": 32 * lora(vision_sizes, 8),
            "vision.merger": lora(merger, 8),
            "text.attention": layers * lora(text_sizes, 8),
        },
        "oft_vision": {"vision.attention": 32 * blocks(1280, 64)},
        "oft_dual": {
            "vision.mlp": 32 * (2 * blocks(1280, 64) + blocks(3420, 60)) + 1,
            "text.attention": layers * 4 * hidden * 8 + 1,
        },
        "hybrid_staged": {"vision.merger": 2 * blocks(5120, 256), "text.attention": layers * lora(text_sizes, 16)},
    }[name]
    counted = count_recipe(model, get_recipe(name))
    assert dict(counted.per_scope) == expected and counted.trainable == sum(expected.values())
    adapted = apply_recipe(copy.deepcopy(model), get_recipe(name))
    assert count_parameters(adapted) == counted
    assert {parameter.device.type for parameter in adapted.parameters()} == {"meta"}
    if name == "lora_text_vision":
        numbers = {int(path.split(".")[3]) for path in adapters.adapted_modules(adapted) if ".visual." in path}
        assert numbers == set(range(26, 32))
    base_size = {"3B": 3_754_622_976, "7B": 8_292_166_656}[size]
    assert counted.total - counted.trainable == base_size


def test_reported_shares(full_size):
    """Report A's 0.4 % is r 32 on the text model's attention of 3B; its 0.9 % with vision is neither model's."""
    size, model = full_size
    shares = [f"{count_recipe(model, get_recipe(name)).share:.2%}" for name in ("lora_text", "lora_text_vision")]
    assert shares == {"3B": ["0.39%", "0.43%"], "7B": ["0.24%", "0.26%"]}[size]


def test_count_repr_is_one_line(base):
    apply_recipe(base, tiny_recipe("oft_vision"))
    assert repr(count_parameters(base)) == "16,128 of 1,665,664 parameters trained (0.97%: vision.attention 16,128)"
    assert all(isinstance(layer, OFTLinear) for layer in adapters.adapted_modules(base).values())
