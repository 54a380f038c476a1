"""What is refused before a run is sharded; the sharding itself is in test_distributed."""

from types import SimpleNamespace

import pytest
import torch

from vlftlib.adapters import apply_recipe
from vlftlib.forms import Example
from vlftlib.recipes import get_recipe
from vlftlib.sharding import check_sharding, is_sharded, whole_adapters


def accelerator(version: int | None):
    plugin = {} if version is None else {"fsdp_plugin": SimpleNamespace(fsdp_version=version)}
    return SimpleNamespace(state=SimpleNamespace(**plugin), device=torch.device("cpu"), num_processes=2)


@pytest.mark.parametrize(
    "version, recipe, asked, message",
    [
        (None, "oft_vision", True, "FSDP was asked for, on cpu with 2 process.* between several accelerators only"),
        (1, "oft_vision", True, "set fsdp_version: 2"),
        (2, "oft_dual", True, "whole tower shares model.visual.*oft_scale: use DDP"),
        (2, "oft_vision", True, "rows.jsonl line 7 has no picture"),
        (None, "oft_dual", False, None),
    ],
)
def test_refusals(version, recipe, asked, message, base, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(asked).lower())
    apply_recipe(base, get_recipe(recipe, **({"block_size": 64} if recipe == "oft_dual" else {})))
    examples = [Example(("a.png",), [], "rows.jsonl", 6), Example((), [], "rows.jsonl", 7)]
    if message is None:
        check_sharding(accelerator(version), base, examples)
        return
    with pytest.raises(ValueError, match=message):
        check_sharding(accelerator(version), base, examples)


def test_a_model_in_one_piece_is_left_alone(base):
    apply_recipe(base, get_recipe("oft_vision"))
    before = dict(base.named_parameters())
    with whole_adapters(base):
        assert all(before[name] is parameter for name, parameter in base.named_parameters())
    assert not is_sharded(base)
