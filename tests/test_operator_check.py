import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from vlftlib.adapters import apply_recipe
from vlftlib.models import TINY_BASE, load_model
from vlftlib.operator_check import check_operators, choose_attention, compare_attention
from vlftlib.operators import ascend_fallbacks
from vlftlib.recipes import RECIPES, TINY_BASE_OVERRIDES, get_recipe
from vlftlib.short_model import build_shell, random_inputs
from vlftlib.tiny_base import build_model, build_tokenizer


@pytest.fixture(scope="module")
def model():
    return build_model(build_tokenizer())


@pytest.fixture(autouse=True)
def timed_once(monkeypatch):
    monkeypatch.setattr("vlftlib.operator_check.TIMED_RUNS", 1)


def part(report, name, precision="float32"):
    return next(result for result in report.results if result.part == name and result.precision == precision)


def test_every_part_passes_on_the_cpu(model):
    before = copy.deepcopy(model.state_dict())
    report = check_operators(model, "cpu")
    assert report.failures == () and {result.precision for result in report.results} == {"float32", "bf16"}
    parts = {result.part for result in report.results}
    assert {"model.visual.patch_embed", "model.visual.blocks.0.attn", "model.visual.blocks.1.attn"} < parts
    assert {"model.visual.merger", "model.language_model.layers.0.self_attn", "lm_head", "whole model"} < parts
    assert all(result.error == 0 for result in report.results if result.precision == "float32")
    assert all(result.fallbacks == () and result.seconds > 0 for result in report.results)
    assert "0 of 34 failed" in str(report)
    # The model itself is as it was.
    after = model.state_dict()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters()) and len(model.model.visual.blocks) == 4


def test_adapted_layers_are_kinds_of_their_own(model):
    adapted = inject_adapter_in_model(
        LoraConfig(r=4, target_modules=["model.visual.blocks.3.attn.qkv", "model.language_model.layers.2.self_attn.q_proj"]),
        copy.deepcopy(model),
    )
    shell, names = build_shell(adapted, torch.bfloat16)
    assert [len(shell.model.visual.blocks), len(shell.model.language_model.layers)] == [3, 2]
    assert names["model.visual.blocks.2.attn.qkv"] == "model.visual.blocks.3.attn.qkv"
    lora = shell.model.visual.blocks[2].attn.qkv
    assert lora.base_layer.weight.dtype == torch.bfloat16 and lora.lora_A["default"].weight.dtype == torch.float32
    report = check_operators(adapted, "cpu", ["bf16"])
    assert report.failures == () and part(report, "model.language_model.layers.2.self_attn.q_proj", "bf16")


class Broken(nn.Module):
    """A part that fails on the device under test alone, which is told by its weights being rounded."""

    def __init__(self, inner, fault):
        super().__init__()
        self.inner, self.fault = inner, fault

    def forward(self, x):
        y = self.inner(x)
        return self.fault(y) if self.inner.down_proj.weight.dtype == torch.bfloat16 else y


def raise_error(x):
    x.cos()
    raise RuntimeError("aclnnCos failed\nmore lines")


@pytest.mark.parametrize(
    "fault, problem, operator",
    [
        (lambda x: (x - x.detach()).log() * 0, "NaN in output 0", "aten::mul.Tensor"),
        (raise_error, "RuntimeError: aclnnCos failed", "aten::cos"),
        (lambda x: x + 3, "in output 0, at most 0.1 is right", ""),
    ],
)
def test_a_failing_part_is_named_with_its_operator(model, fault, problem, operator):
    broken = copy.deepcopy(model)
    broken.model.visual.blocks[0].mlp = Broken(broken.model.visual.blocks[0].mlp, fault)
    report = check_operators(broken, "cpu", ["bf16"])
    result = part(report, "model.visual.blocks.0.mlp", "bf16")
    assert problem in result.problem and result.operator == operator
    assert {result.part for result in report.failures} <= {"model.visual.blocks.0.mlp", "whole model"}
    assert "FAILED" in str(report)


def test_a_part_without_an_npu_kernel_is_named(model):
    slow = copy.deepcopy(model)
    slow.model.visual.merger.mlp.append(Solve())
    fallbacks = part(check_operators(slow, "cpu", ["float32"]), "model.visual.merger").fallbacks
    assert fallbacks == ("aten::_linalg_solve_ex", "aten::linalg_lu_solve")


class Solve(nn.Module):
    def forward(self, x):
        return torch.linalg.solve(2 * torch.eye(x.shape[-1]), x, left=False)


def test_attention_that_drops_the_mask_or_gives_nan_is_found_before_training(model, monkeypatch):
    right = nn.functional.scaled_dot_product_attention

    def without_mask(q, k, v, attn_mask=None, **options):
        return right(q, k, v, **options)

    def with_nan(q, k, v, attn_mask=None, **options):
        return right(q, k, v, attn_mask=attn_mask, **options) * float("nan")

    assert "sdpa" in [result.part for result in compare_attention(model, "cpu").results if result.passed]
    for wrong in (without_mask, with_nan):
        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", wrong)
        report = compare_attention(model, "cpu")
        assert report.recommended == "eager"
        assert {result.part: result.passed for result in report.results}["sdpa"] is False
    changed = copy.deepcopy(model)
    assert choose_attention(changed, "auto", "float32") == "eager" == changed.config._attn_implementation
    assert choose_attention(changed, "sdpa", "float32") == "sdpa" == changed.config._attn_implementation


def test_a_model_is_loaded_with_the_attention_that_agrees(monkeypatch):
    right = nn.functional.scaled_dot_product_attention
    assert load_model(TINY_BASE, attention="auto").config._attn_implementation in ("sdpa", "eager")
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", lambda *words, **options: right(*words, **options) * torch.nan)
    assert load_model(TINY_BASE, attention="auto").config._attn_implementation == "eager"


def test_no_attention_at_all_is_an_error(model, monkeypatch):
    monkeypatch.setattr("vlftlib.operator_check.ATTENTIONS", ("flash_attention_2",))
    with pytest.raises(RuntimeError, match="(?s)no attention implementation agrees.*flash_attention_2"):
        choose_attention(copy.deepcopy(model), "auto", "float32")


def test_precision_is_checked(model):
    with pytest.raises(ValueError, match="must be one of float32, bf16, fp16"):
        check_operators(model, "cpu", ["half"])
    with pytest.raises(ValueError, match="fp16"):
        check_operators(model, "cpu", ["fp16"])


def test_a_training_step_and_a_generation_have_no_fallback(model):
    inputs = random_inputs(model.config, 0)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step():
        model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    assert ascend_fallbacks(step) == ()
    model.gradient_checkpointing_disable()
    model.eval().zero_grad()
    prompt = {name: value for name, value in inputs.items() if name not in ("labels", "use_cache")}
    assert ascend_fallbacks(lambda: model.generate(**prompt, max_new_tokens=3)) == ()


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_has_a_fallback_in_its_training_step_or_its_answers(name):
    model = build_model(build_tokenizer())
    inputs = random_inputs(model.config, 0)
    apply_recipe(model, get_recipe(name, **TINY_BASE_OVERRIDES.get(name, {})))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)

    def step():
        model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    assert trained and ascend_fallbacks(step) == ()
    prompt = {name: value for name, value in inputs.items() if name not in ("labels", "use_cache")}
    model.eval()
    assert ascend_fallbacks(lambda: model.generate(**prompt, max_new_tokens=2)) == ()
