"""Gradient checkpointing of both towers: what is kept shrinks, the gradients stay."""

import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from vlftlib.adapters import adapter_parameters, apply_recipe
from vlftlib.memory import checkpoint_blocks
from vlftlib.recipes import LoRA, OFT, Recipe
from vlftlib.tiny_base import build_model, build_tokenizer

ADAPTERS = {
    "lora": (LoRA(("vision.attention", "vision.mlp", "text.attention"), r=4, alpha=8),),
    "oft": (OFT(("vision.attention", "vision.mlp", "text.attention"), block_size=32),),
    "householder": (OFT(("vision.attention", "vision.mlp"), parametrization="householder", num_reflections=4, scale=True),),
}


def quantize(model: torch.nn.Module) -> None:
    """Both towers' linear layers in 4 bits, as transformers quantises them."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes makes the 4-bit base")
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and path != "lm_head":
            features = module.in_features, module.out_features, module.bias is not None
            layer = bitsandbytes.nn.Linear4bit(*features, quant_type="nf4", compute_dtype=torch.float32)
            layer.load_state_dict(module.state_dict())
            model.set_submodule(path, layer.to("cpu"))


def make(method: str, four_bits: bool, checkpointed: bool):
    model = build_model(build_tokenizer())
    if four_bits:
        quantize(model)
    apply_recipe(model, Recipe("r", "", "", ADAPTERS[method], learning_rate=1e-3, chosen=()))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for item in adapter_parameters(model):  # away from the start, where LoRA's A and OFT's products have no gradient
            if item.parameter.ndim:
                item.parameter.add_(0.05 * torch.randn(item.parameter.shape, generator=generator))
    if checkpointed:
        checkpoint_blocks(model)
    return model.train()


def batch_for(model) -> dict[str, torch.Tensor]:
    """Two examples of a picture of 8 x 8 patches, one padded."""
    config = model.config
    ids = torch.tensor([[config.vision_start_token_id] + [config.image_token_id] * 16 + [*range(7)]] * 2)
    attended = torch.ones_like(ids)
    attended[0, -3:] = 0
    pixels = torch.randn(128, 1176, generator=torch.Generator().manual_seed(1))
    kinds = (ids == config.image_token_id).long()
    pictures = dict(pixel_values=pixels, image_grid_thw=torch.tensor([[1, 8, 8]] * 2), mm_token_type_ids=kinds)
    return dict(input_ids=ids, attention_mask=attended, labels=ids, **pictures)


def vision_bytes(model, batch) -> int:
    """Bytes that the vision blocks keep: tensors saved in their forward, each storage once, and inputs of checkpointed ones."""
    before = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *batch.values())}
    kept, visual = {}, model.model.visual

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in before:
            kept[storage._cdata] = weakref.ref(storage)  # checkpointing also saves what a frozen block drops at once
        return tensor

    def keep_input(module, args, output):
        if module.gradient_checkpointing and output.requires_grad:
            keep(args[0])

    for block in visual.blocks:
        block.register_forward_hook(keep_input)
    hooks = saved_tensors_hooks(keep, lambda tensor: tensor)
    visual.blocks[0].register_forward_pre_hook(lambda module, args: hooks.__enter__())
    visual.blocks[-1].register_forward_hook(lambda module, args, output: hooks.__exit__(None, None, None))
    loss = model(**batch).loss
    assert loss.isfinite()
    return sum(storage.nbytes() for reference in kept.values() if (storage := reference()) is not None)


@pytest.mark.parametrize("four_bits", [False, True], ids=["", "4-bit"])
@pytest.mark.parametrize("method", ADAPTERS)
def test_vision_blocks_keep_little_more_than_their_inputs(method, four_bits):
    whole, plain = (make(method, four_bits, checkpointed) for checkpointed in (True, False))
    assert all(block.gradient_checkpointing for block in (*whole.model.visual.blocks, *whole.model.language_model.layers))
    batch = batch_for(whole)
    inputs = len(whole.model.visual.blocks) * 128 * 128 * 4
    kept, kept_without = vision_bytes(whole, batch), vision_bytes(plain, batch)
    print(f"{method}: {kept:,} bytes with, {kept_without:,} without")
    assert inputs <= kept <= 1.1 * inputs and kept_without > 10 * kept


@pytest.mark.parametrize("four_bits", [False, True], ids=["", "4-bit"])
@pytest.mark.parametrize("method", ADAPTERS)
def test_gradients_are_the_same(method, four_bits):
    grads = []
    for checkpointed in (False, True):
        model = make(method, four_bits, checkpointed)
        loss = model(**batch_for(model)).loss
        loss.backward()
        grads.append({item.name: item.parameter.grad for item in adapter_parameters(model)} | {"loss": loss.detach()})
    plain, recomputed = grads
    assert plain.keys() == recomputed.keys() and any(".visual." in name for name in plain)
    for name, grad in plain.items():
        assert grad is not None and grad.abs().max() > 0, f"{name} has no gradient"
        assert torch.equal(grad, recomputed[name]), name


def test_blocks_below_the_first_adapter_take_no_part():
    model = build_model(build_tokenizer())
    apply_recipe(model, Recipe("r", "", "", (OFT(("vision.merger",), block_size=32),), learning_rate=1e-3, chosen=()))
    checkpoint_blocks(model.train())
    assert vision_bytes(model, batch_for(model)) == 0


def test_reentrant_checkpointing_is_refused_with_oft():
    model = make("oft", False, False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(RuntimeError, match="use_reentrant"):
        model(**batch_for(model)).loss.backward()
