"""One training step of every recipe at the real widths of the 7B model, two blocks a tower."""

import pytest
import torch
from test_plan import batch_for, narrow
from transformers import Qwen2_5_VLForConditionalGeneration

from vlftlib.adapters import adapter_parameters, apply_recipe
from vlftlib.recipes import RECIPES, get_recipe


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_of_the_7b(name):
    torch.manual_seed(0)
    config = narrow("7B")
    model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    apply_recipe(model, get_recipe(name))
    batch = batch_for(config, examples=2, text_tokens=16)
    batch["pixel_values"] = torch.randn(batch["pixel_values"].shape, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([item.parameter for item in adapter_parameters(model)], lr=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        before = model.eval()(**batch).loss
    before.backward()
    idle = [item.name for item in adapter_parameters(model) if item.parameter.grad is None]
    assert not idle, f"no gradient: {idle}"
    optimizer.step()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        after = model(**batch).loss
    assert torch.isfinite(after) and after < before
