import pytest
import torch
from torch import nn

from vlftlib.ascend.kernels import classify, intercepts, table
from vlftlib.operators import ascend_fallbacks, operator_census


class Solve(nn.Module):
    def forward(self, x):
        return torch.linalg.solve(torch.eye(4) + x, x)


def well_conditioned():
    return (torch.arange(16.0).view(4, 4) / 100).requires_grad_()


def kinds(fn):
    return {(found.operator, found.kind) for found in ascend_fallbacks(fn)}


def test_census_leaves_views_out():
    x, w = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)

    def step():
        (x.view(1, 3, 4)[0] @ w.t()).relu().sum().backward()

    assert dict(operator_census(step).calls) == {
        "aten::mm": 2,
        "aten::relu": 1,
        "aten::sum": 1,
        "aten::ones_like": 1,
        "aten::threshold_backward": 1,
    }
    assert operator_census(step).total == 7  # the second time the gradient is added to


def test_tables():
    assert len(table()) == 3532 and {"matmul", "inverse", "scaled_dot_product_attention"} < intercepts()
    assert classify(torch.ops.aten.mm.default) == "native"
    assert classify(torch.ops.aten.linalg_inv_ex.default) == "cpu_fallback"
    assert classify(torch.ops.aten.linalg_qr.default) == "ai_cpu"
    assert classify(torch.ops.aten.block_diag.default) == "composite"
    assert classify(torch.ops.aten.diag_embed.default) == "native"  # made of others, though the table has no kernel for it


def test_fallbacks_name_operator_and_module_in_forward_and_backward():
    model = nn.Sequential(nn.Linear(4, 4), Solve())
    found = ascend_fallbacks(lambda: model(torch.eye(4)).sum().backward())
    names = {(fallback.operator, fallback.module) for fallback in found}
    assert ("aten::_linalg_solve_ex", "Sequential.1") in names
    assert ("aten::linalg_lu_solve", "Sequential.1") in names  # autograd's


def test_what_an_npu_computes_whole_is_no_fallback():
    assert kinds(lambda: torch.linalg.inv(well_conditioned())) == {("aten::linalg_inv_ex", "cpu_fallback")}
    assert kinds(lambda: torch.inverse(well_conditioned() + torch.eye(4)).sum().backward()) == set()
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    attention = nn.functional.scaled_dot_product_attention
    assert kinds(lambda: attention(q, q, q, is_causal=True).sum().backward()) == set()


def test_composites_are_taken_apart_also_without_autograd():
    with torch.inference_mode():
        assert kinds(lambda: torch.linalg.inv(torch.eye(3))) == {("aten::linalg_inv_ex", "cpu_fallback")}
        x = torch.randn(2, 3, 4)
        assert kinds(lambda: nn.functional.linear(x, torch.eye(4))) == set()


def test_results_are_unchanged_inside():
    x, results = well_conditioned(), []
    plain = nn.functional.layer_norm(x, (4,)).std(0)
    ascend_fallbacks(lambda: results.append(nn.functional.layer_norm(x, (4,)).std(0)))
    assert torch.equal(results[0], plain)


def test_float64_and_ai_cpu():
    assert kinds(lambda: torch.ones(3).double()) == {("aten::_to_copy", "float64")}
    assert kinds(lambda: torch.linalg.qr(torch.eye(3))) == {("aten::linalg_qr", "ai_cpu")}


def test_clean_code_has_none():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    assert ascend_fallbacks(lambda: model(torch.randn(3, 4)).logsumexp(-1).sum().backward()) == ()
