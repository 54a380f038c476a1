"""OFTLinear against a dense float64 reference, and against everything that wraps, copies, compiles or recomputes a model."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from vlftlib import mapping, rotating
from vlftlib.mapping import batch_rotations
from vlftlib.oft import OFTLinear
from vlftlib.orthogonal import cayley, householder, neumann_change, orthogonality_error, unpack_skew

f64 = torch.float64
FORMS = {"cayley": {"block_size": 8}, "householder": {"parametrization": "householder", "num_reflections": 4}}
PEFT_FORMS = FORMS | {  # and those that only PEFT's files have
    "blocks shared": {"block_size": 8, "block_share": True},
    "neumann": {"parametrization": "cayley_neumann", "neumann_terms": 5, "block_size": 8},
    "neumann, blocks shared": {"parametrization": "cayley_neumann", "neumann_terms": 3, "block_size": 8, "block_share": True},
}
SIDES = {"input side": 3, "weight side": 60}  # tokens in each of two sequences, on a layer of 16 output features


def adapted(form="cayley", *, features=(24, 16), size=0.3, seed=0, dtype=torch.float32, **options) -> OFTLinear:
    torch.manual_seed(seed)
    layer = OFTLinear(nn.Linear(*features, dtype=dtype), **PEFT_FORMS[form], **options)
    if dtype == f64:
        layer.double()
    with torch.no_grad():
        layer.oft_R.add_(size * torch.randn_like(layer.oft_R))
        if layer.oft_scale is not None:
            layer.oft_scale.fill_(1.3)
    return layer


def reference(layer: OFTLinear, x: torch.Tensor) -> torch.Tensor:
    """s W (x R) + b by a dense R and torch's own derivatives."""
    if layer.parametrization != "householder":
        skew = unpack_skew(layer.oft_R, layer.block_size).expand(layer.num_blocks, -1, -1)
        if layer.neumann_terms is None:
            rotation = torch.block_diag(*cayley(skew))
        else:
            rotation = torch.block_diag(*(torch.eye(layer.block_size, dtype=f64) + neumann_change(skew, layer.neumann_terms)))
            rotation = rotation.to(skew.dtype)
    else:
        left, right = householder(layer.oft_R)
        rotation = torch.eye(layer.in_features, dtype=left.dtype) - left @ right.mT
    scale = 1 if layer.oft_scale is None else layer.oft_scale
    return scale * (x @ rotation) @ layer.base_layer.weight.mT + layer.base_layer.bias


def network(form="cayley", **options) -> nn.Sequential:
    layers = [adapted(form, features=(16, 16), seed=seed, **options) for seed in range(3)]
    return nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])


def gradients(model, x, run=None) -> list[torch.Tensor]:
    model.zero_grad()
    (run or model)(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad]


@pytest.fixture
def maps(monkeypatch) -> list[int]:
    """The number of layers in each map that was computed."""
    calls, original = [], mapping.map_layers
    monkeypatch.setattr(mapping, "map_layers", lambda layers, *rest: calls.append(len(layers)) or original(layers, *rest))
    return calls


# ---- values and gradients


@pytest.mark.parametrize("tokens", SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("form", PEFT_FORMS)
def test_forward_and_backward_equal_the_dense_reference(form, scale, tokens):
    layer = adapted(form, scale=scale, dtype=f64)
    x = torch.randn(2, tokens, 24, dtype=f64, requires_grad=True)
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    assert len(inputs) == 2 + scale
    probe = torch.randn(2, tokens, 16, dtype=f64)
    y, want = layer(x), reference(layer, x)
    assert torch.allclose(y, want, atol=1e-13)
    for ours, theirs in zip(torch.autograd.grad(y, inputs, probe), torch.autograd.grad(want, inputs, probe)):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("form", PEFT_FORMS)
def test_gradcheck(form, tokens):
    layer = adapted(form, features=(16, 4), scale=True, dtype=f64)
    x = torch.randn(2 if tokens == 3 else 6, 16, dtype=f64, requires_grad=True)

    def run(x, parameter, scale):
        return torch.func.functional_call(layer, {"oft_R": parameter, "oft_scale": scale}, (x,))

    inputs = (x, layer.oft_R.detach().requires_grad_(), layer.oft_scale.detach().requires_grad_())
    assert gradcheck(run, inputs, fast_mode=tokens > 3)  # slow on 24 outputs


@pytest.mark.parametrize("form", FORMS)
def test_both_sides_agree_in_float32(form):
    layer = adapted(form, features=(256, 64), scale=True)
    x = torch.randn(65, 256)  # one token more than there are output features: weight side
    weight_side = layer(x)
    assert type(weight_side.grad_fn).__name__ == "LinearOfRotatedWeightBackward"
    input_side = torch.cat([layer(part) for part in x.split(13)])
    assert torch.allclose(weight_side, input_side, atol=1e-5)
    one = torch.autograd.grad(weight_side.sum(), [layer.oft_R, layer.oft_scale])
    two = torch.autograd.grad(input_side.sum(), [layer.oft_R, layer.oft_scale])
    for a, b in zip(one, two):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 24), (2, 3, 4, 24), (0, 24)])
@pytest.mark.parametrize("form", PEFT_FORMS)
def test_any_leading_dimensions(form, shape):
    layer = adapted(form)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], 16)
    assert torch.allclose(y, reference(layer, x), atol=1e-5)
    y.sum().backward()
    assert x.grad.shape == shape and layer.oft_R.grad is not None


def test_strided_input():
    layer = adapted()
    x = torch.randn(24, 60)
    assert torch.allclose(layer(x.mT), layer(x.mT.contiguous()))


@pytest.mark.parametrize("tokens", SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_the_start_is_the_base_layer_bit_for_bit(form, dtype, tokens):
    torch.manual_seed(0)
    base = nn.Linear(24, 16, dtype=dtype)
    x = torch.randn(2, tokens, 24, dtype=dtype)
    want = base(x)
    layer = OFTLinear(base, **FORMS[form], scale=True)
    assert torch.equal(layer(x), want)
    layer(x).float().square().sum().backward()
    assert layer.oft_R.grad.dtype == torch.float32 and layer.oft_R.grad.abs().max() > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("tokens", [8, 200])
def test_bfloat16_follows_float32(form, autocast, tokens):
    exact = adapted(form, features=(256, 64), size=0.02)
    layer = copy.deepcopy(exact)
    if not autocast:
        layer.base_layer.bfloat16()
    x = torch.randn(tokens, 256)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x if autocast else x.bfloat16())
    assert y.dtype == torch.bfloat16 and layer.oft_R.dtype == torch.float32
    y.float().square().sum().backward()
    want = exact(x)
    want.square().sum().backward()
    assert (y - want).norm() < 0.01 * want.norm()
    assert (layer.oft_R.grad - exact.oft_R.grad).norm() < 0.05 * exact.oft_R.grad.norm()
    if not autocast:
        assert layer(x).dtype == torch.bfloat16  # a float32 input is kept in the base's dtype only


def test_leaving_autocast_maps_again_in_full_precision():
    layer = adapted()
    batch_rotations(layer)
    x = torch.randn(5, 24)
    with torch.no_grad():
        before = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert not torch.equal(layer(x).float(), before)
        assert torch.equal(layer(x), before)


def test_float32_products_are_not_reduced_in_the_map():
    layer = adapted(features=(256, 16), size=0.1)
    before = layer.rotation()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer.rotation(), before)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert before.shape == (32, 8, 8) and before.dtype == torch.float32 and orthogonality_error(before) < 1e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", SIDES.values(), ids=SIDES)
def test_nothing_of_token_size_is_saved_beyond_the_input(form, tokens):
    layer = adapted(form, features=(64, 16), scale=True)
    x = torch.randn(100 * tokens // 60 + 1, 64, requires_grad=True)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t):
        layer(x)
    held = [x, *layer.parameters()]
    saved = [t for pointer, t in saved.items() if pointer not in {h.untyped_storage().data_ptr() for h in held}]
    limit = 64 * (8 if form == "cayley" else 2 * 4) * 4
    assert sum(t.untyped_storage().nbytes() for t in saved) <= limit


# ---- options


def test_parameters():
    layer = OFTLinear(nn.Linear(24, 16), block_size=8, scale=True)
    assert (layer.num_blocks, layer.in_features, layer.out_features, layer.merged) == (3, 24, 16, False)
    trainable = {name: tuple(p.shape) for name, p in layer.named_parameters() if p.requires_grad}
    assert trainable == {"oft_R": (3, 28), "oft_scale": ()}
    assert OFTLinear(nn.Linear(24, 16), block_size=8).oft_scale is None
    assert OFTLinear(nn.Linear(24, 16), parametrization="householder", num_reflections=6).oft_R.shape == (24, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 64}, r"64 does not divide 3420 input features; nearest valid sizes: \[45, 57, 60, 76, 90, 95\]"),
        ({"block_size": 1}, "block_size 1 does not divide"),
        ({}, "cayley takes block_size"),
        ({"block_size": 60, "num_reflections": 2}, "cayley takes block_size"),
        ({"block_size": 60, "dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"parametrization": "householder", "num_reflections": 3}, "must be even .* got 3"),
        ({"parametrization": "householder", "block_size": 60}, "householder takes num_reflections"),
        ({"parametrization": "cayley_neumann", "block_size": 60}, "neumann_terms is None: cayley_neumann takes it"),
        ({"block_size": 60, "neumann_terms": 5}, "neumann_terms is 5: .* cayley was asked for"),
        ({"parametrization": "householder", "num_reflections": 2, "block_share": True}, "block_share is for blocks"),
        ({"parametrization": "qr", "block_size": 60}, '"cayley" or "householder", got \'qr\''),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        OFTLinear(nn.Linear(3420, 4), **options)


def test_only_linear_layers_of_known_weights():
    with pytest.raises(TypeError, match="adapts an nn.Linear, got Conv2d"):
        OFTLinear(nn.Conv2d(3, 3, 1), block_size=2)
    whole = nn.Linear(4, 4)
    whole.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match="not on torch.int8"):
        OFTLinear(whole, block_size=2)


@pytest.mark.parametrize("tokens", SIDES.values(), ids=SIDES)
def test_dropout_replaces_whole_blocks_by_the_identity(tokens):
    layer = adapted(dropout=0.5, features=(64, 16), scale=True, dtype=f64)
    x = torch.eye(64, dtype=f64).repeat(tokens // 16 + 1, 1)[: max(64, tokens)]
    layer.base_layer = nn.Linear(64, 64, bias=False, dtype=f64)
    nn.init.eye_(layer.base_layer.weight)
    layer.base_layer.requires_grad_(False)
    layer.out_features = 64
    full, counts = layer.rotation(), 0
    for _ in range(20):
        y = layer(x)[:64]
        for index, block in enumerate(full):
            part = y[8 * index : 8 * index + 8, 8 * index : 8 * index + 8] / 1.3
            dropped = torch.allclose(part, torch.eye(8, dtype=f64), atol=1e-12)
            assert dropped or torch.allclose(part, block, atol=1e-12)
            counts += dropped
    assert 50 < counts < 110  # of 160, by a fair coin
    layer.eval()
    assert torch.allclose(layer(x)[:64], 1.3 * torch.block_diag(*full), atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_dropout_gradient(form):
    layer = adapted(form, features=(16, 4), dropout=0.5, scale=True, dtype=f64)
    x = torch.randn(2, 16, dtype=f64, requires_grad=True)

    def run(x, parameter, scale):
        torch.manual_seed(3)
        return torch.func.functional_call(layer, {"oft_R": parameter, "oft_scale": scale}, (x,))

    assert gradcheck(run, (x, layer.oft_R.detach().requires_grad_(), layer.oft_scale.detach().requires_grad_()))


def test_dropout_is_the_same_when_checkpointing_computes_again():
    model = network(dropout=0.5)
    x = torch.randn(4, 16)
    batch_rotations(model)
    torch.manual_seed(1)
    want = gradients(model, x)
    blocks = nn.ModuleList(model)
    root = Checkpointed(blocks)
    batch_rotations(root)
    torch.manual_seed(1)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients(root, x), want))


def test_a_shared_scale_gets_the_sum_of_its_layers_gradients():
    model = network(scale=True)
    model[2].oft_scale = model[0].oft_scale
    batch_rotations(model)
    x = torch.randn(5, 16)
    gradients(model, x)
    shared = model[0].oft_scale.grad.clone()
    h = 1e-2
    values = []
    for step in (h, -h):
        with torch.no_grad():
            model[0].oft_scale.add_(step)
            values.append(model(x).square().sum().item())
            model[0].oft_scale.sub_(step)
    assert shared.item() == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-2)


# ---- merging


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("form", PEFT_FORMS)
def test_merge_and_unmerge(form, scale, dtype):
    layer = adapted(form, scale=scale)
    layer.base_layer.to(dtype)
    x, weight = torch.randn(5, 24, dtype=dtype), layer.base_layer.weight.clone()
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    want = layer(x)
    layer.merge()
    assert layer.merged and torch.allclose(layer(x), want, atol=tolerance)
    assert torch.equal(layer(x), layer.base_layer(x))
    with pytest.raises(RuntimeError, match="merged already"):
        layer.merge()
    layer.unmerge()
    assert torch.allclose(layer.base_layer.weight, weight, atol=tolerance)
    assert torch.allclose(layer(x), want, atol=tolerance)
    with pytest.raises(RuntimeError, match="not merged"):
        layer.unmerge()


@pytest.mark.parametrize("form", FORMS)
def test_merge_works_part_by_part(form, monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not func.is_view and func.overloadpacket is not torch.ops.aten.copy_:
                self.made = max(self.made, result.numel())
            return result

    monkeypatch.setattr("vlftlib.oft.ROWS_AT_ONCE", 16)
    layer = adapted(form, features=(64, 200))
    layer.base_layer.bfloat16()
    for rewrite in (layer.merge, layer.unmerge):
        with Largest() as largest:
            rewrite()
        assert largest.made <= max(200 * 8, 16 * 64)


# ---- one map for a model


def test_one_map_for_all_layers_of_one_block_size(maps):
    model = network()
    model.append(adapted(features=(16, 4)))
    batch_rotations(model)
    x = torch.randn(5, 16)
    gradients(model, x)
    assert maps == [4]
    model[4] = OFTLinear(nn.Linear(16, 16), block_size=4)
    model.append(adapted("householder", features=(4, 4)))
    batch_rotations(model)
    model(x)
    assert sorted(maps[1:]) == [1, 1, 3]


@pytest.mark.parametrize("form", PEFT_FORMS)
def test_the_batch_changes_nothing(form):
    model = network(form)
    x = torch.randn(5, 16)
    want = model(x)
    want_grads = gradients(model, x)
    batch_rotations(model)
    assert torch.allclose(model(x), want, atol=1e-6)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(gradients(model, x), want_grads))


def test_registering_twice_maps_once(maps):
    model = network()
    batch_rotations(model)
    batch_rotations(model)
    model(torch.randn(5, 16))
    assert maps == [3] and len(model._forward_pre_hooks) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_maps_are_kept_until_a_parameter_changes(maps, mode):
    model = network()
    batch_rotations(model)
    x = torch.randn(5, 16)
    with mode():
        for _ in range(4):
            before = model(x)
    assert maps == [3]
    with torch.no_grad():
        model[2].oft_R.mul_(1.5)
        after = model(x)
    assert maps == [3, 3] and not torch.allclose(before, after)
    model.load_state_dict({name: 0 * value for name, value in model.state_dict().items()})
    with torch.no_grad():
        model(x)
    assert maps == [3, 3, 3]
    with torch.no_grad():
        model[0](x)  # alone, nothing changed
    assert maps == [3, 3, 3]


def test_training_renews_what_is_kept(maps):
    model = network()
    batch_rotations(model)
    x = torch.randn(5, 16)
    with torch.no_grad():
        model(x)
    gradients(model, x)
    model[0].oft_R.data.zero_()  # as a fused optimizer would, past the version counter
    with torch.no_grad():
        y = model(x)
    assert maps == [3, 3, 3]
    assert torch.allclose(model[0](x), model[0].base_layer(x), atol=1e-6) and y.isfinite().all()


def test_frozen_rotations_are_kept_in_training_too(maps):
    model = network().requires_grad_(False)
    model.append(nn.Linear(16, 1))
    batch_rotations(model)
    for _ in range(3):
        model(torch.randn(5, 16, requires_grad=True)).sum().backward()
    assert maps == [3]


def test_kept_in_inference_mode_still_serves_a_backward():
    model = network().requires_grad_(False)
    batch_rotations(model)
    x = torch.randn(5, 16)
    with torch.inference_mode():
        model(x)
    x.requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None


def test_a_layer_called_alone_maps_for_itself(maps):
    model = network()
    batch_rotations(model)
    x = torch.randn(5, 16)
    gradients(model, x)
    model[0](x).sum().backward()
    model[0](x).sum().backward()  # the graph of the first is gone
    assert maps == [3, 1, 1]


def test_two_forwards_before_one_backward():
    model = network()
    batch_rotations(model)
    one, two = torch.randn(2, 5, 16)
    want = [a + b for a, b in zip(gradients(model, one), gradients(model, two))]
    model.zero_grad()
    (model(one).square().sum() + model(two).square().sum()).backward()
    assert all(torch.allclose(p.grad, w, rtol=1e-4, atol=1e-5) for p, w in zip(_trainable(model), want))


def test_a_failed_forward_leaves_no_layer_open():
    model = network()
    batch_rotations(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(5, 3))
    assert not any(layer.slot.open for layer in model if isinstance(layer, OFTLinear))


def test_copies_and_pickles_after_a_forward():
    model = network("cayley", scale=True)
    batch_rotations(model)
    x = torch.randn(5, 16)
    want = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), want)
        twin(x).sum().backward()
        assert all(p.grad is not None for p in _trainable(twin)) and all(p.grad is None for p in _trainable(model))
    assert {name.rpartition(".")[2] for name in model.state_dict()} == {"weight", "bias", "oft_R", "oft_scale"}


def test_a_frozen_tower_whose_input_needs_no_gradient():
    model = network()
    model[0] = adapted("householder", features=(16, 16))
    batch_rotations(model)
    x = torch.randn(40, 16)
    assert not x.requires_grad
    assert all(grad.abs().max() > 0 for grad in gradients(model, x))


class OnDevice:
    """The norms of an accelerator, as a `NormBound` reads them."""

    device, dtype = torch.device("cuda"), torch.float32

    def __init__(self, norm):
        self.norm = norm

    def amax(self):
        return self

    def sqrt(self):
        return self

    def item(self):
        return self.norm


@pytest.fixture
def late(monkeypatch):
    """A norm bound of a device, whose `arrive` brings what was sent to the host."""
    bound, full = mapping.NormBound(), torch.full
    monkeypatch.setattr(torch, "full", lambda *args, pin_memory=False, **options: full(*args, **options))
    monkeypatch.setattr(bound, "_send", lambda largest: bound.arriving.fill_(-1) and setattr(bound, "sent_norm", largest.norm))
    bound.arrive = lambda: bound.arriving.fill_(bound.sent_norm)
    return bound


def test_the_norm_bound_keeps_a_margin_for_each_step_since(late):
    assert late(OnDevice(0.5)) == pytest.approx(2.0**2)  # read at once: twice that and one
    late.arrive()
    assert late(OnDevice(0.6)) == pytest.approx(2.0**2)
    assert late(OnDevice(0.7)) == pytest.approx(4.0**2)  # nothing new: a step more of margin
    late.arrive()
    assert late(OnDevice(0.8)) == pytest.approx((4 * 0.6 + 2) ** 2)  # of two steps ago
    late.arrive()
    assert late(OnDevice(0.9)) == pytest.approx((2 * 0.8 + 1) ** 2)
    late.arriving.fill_(9)
    with pytest.warns(UserWarning, match="jumped to a norm of 9 where at most 2.6 was expected"):
        late(OnDevice(9))


def test_a_norm_bound_that_hears_nothing_or_nan_stays_a_number(late):
    bounds = [late(OnDevice(0.5)) for _ in range(3000)]
    assert bounds == sorted(bounds) and bounds[-1] < float("inf")
    late.arriving.fill_(float("nan"))
    late(OnDevice(0.5))
    late.arrive()
    assert late(OnDevice(0.5)) == pytest.approx(2.0**2)  # parameters that were mended are believed


@pytest.mark.parametrize("by", ["load_state_dict", "batch_rotations"])
def test_norm_bounds_begin_anew_after_parameters_were_set(by, maps):
    model = network()
    batch_rotations(model)
    x = torch.randn(5, 16)
    gradients(model, x)
    with torch.no_grad():
        model(x)
        for layer in (model[0], model[2], model[4]):
            layer.oft_R.data.add_(3 * torch.randn_like(layer.oft_R))  # past the version counter
    bounds = {*mapping._PLANS[model].norm_bounds.values(), *(layer.slot.norm_bound for layer in model[::2])}
    if by == "load_state_dict":
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    else:
        batch_rotations(model)
    maps.clear()
    with torch.no_grad():
        y = model(x)
    assert maps == [3] and torch.allclose(y, nn.Sequential(*copy.deepcopy(model))(x), atol=1e-5)
    assert bounds.isdisjoint({*mapping._PLANS[model].norm_bounds.values(), *(layer.slot.norm_bound for layer in model[::2])})


def test_rotations_stay_orthogonal_over_large_steps():
    model = network()
    batch_rotations(model)
    optimizer = torch.optim.AdamW(_trainable(model), lr=0.1)
    x = torch.randn(20, 16)
    for _ in range(50):
        gradients(model, x)
        optimizer.step()
    for layer in (model[0], model[2], model[4]):
        assert torch.linalg.matrix_norm(unpack_skew(layer.oft_R, 8), 2).max() > 2
        assert orthogonality_error(layer.rotation()) < 2e-6
        assert orthogonality_error(layer.slot.factors[0].detach() + torch.eye(8)) < 2e-6


# ---- what wraps a model


class Checkpointed(nn.Module):
    def __init__(self, blocks, **options):
        super().__init__()
        self.blocks, self.options = blocks, {"use_reentrant": False, **options}

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return x


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("form", PEFT_FORMS)
def test_checkpointing(form, batched, early_stop, maps):
    model = network(form)
    x = torch.randn(5, 16, requires_grad=True)
    want = gradients(model, x)
    root = Checkpointed(nn.ModuleList(model))
    if batched:
        batch_rotations(root)
    maps.clear()
    with set_checkpoint_early_stop(early_stop):
        for _ in range(2):
            assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(gradients(root, x), want))
    assert maps == ([3, 3] if batched else [1] * 6)  # the second pass maps nothing again


def test_checkpointing_of_a_part_called_alone_between():
    model = network()
    root = Checkpointed(nn.ModuleList(model))
    batch_rotations(root)
    x = torch.randn(5, 16, requires_grad=True)
    want = gradients(root, x)
    root.zero_grad()
    y = root(x)
    checkpoint(root.blocks[0], x, use_reentrant=False).sum().backward()
    root.zero_grad()
    y.square().sum().backward()
    assert all(torch.allclose(p.grad, w, rtol=1e-4, atol=1e-5) for p, w in zip(_trainable(root), want))


def test_checkpointing_the_whole_model():
    model = network()
    batch_rotations(model)
    x = torch.randn(5, 16, requires_grad=True)
    want = gradients(model, x)
    again = gradients(model, x, lambda x: checkpoint(model, x, use_reentrant=False))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(again, want))


def test_reentrant_checkpointing_is_refused():
    root = Checkpointed(nn.ModuleList(network()), use_reentrant=True)
    batch_rotations(root)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        root(torch.randn(5, 16, requires_grad=True))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on inputs without gradient
        root(torch.randn(5, 16))  # harmless without training


def test_a_part_under_no_grad_is_not_mistaken_for_checkpointing():
    model = network()

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            with torch.no_grad():
                x = self.model[0](x)
            return self.model[2](x)

    half = Half()
    batch_rotations(half)
    half(torch.randn(5, 16)).sum().backward()
    assert model[0].oft_R.grad is None and model[2].oft_R.grad is not None


@pytest.mark.parametrize("batched", [True, False])
def test_compile(batched):
    torch._dynamo.reset()
    model = network("cayley", scale=True)
    model[2] = adapted("householder", features=(16, 16))
    if batched:
        batch_rotations(model)
    x = torch.randn(40, 16, requires_grad=True)
    want, want_grads = model(x), gradients(model, x)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    assert torch.allclose(compiled(x), want, atol=1e-6)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(gradients(model, x, compiled), want_grads))
    frames = counter.frame_count
    with torch.no_grad():
        model[0].oft_R.mul_(10)  # other iteration counts
    gradients(model, x, compiled)
    assert counter.frame_count == frames
    assert torch.allclose(compiled(x), model(x), atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tokens_are_summed_in_parts_alike(dtype):
    x, dx = torch.randn(2, 2 * rotating.TOKENS_AT_ONCE + 7, 32).to(dtype)
    want = torch.einsum("tni,tnj->nij", x.double().unflatten(1, (4, 8)), dx.double().unflatten(1, (4, 8)))
    total = rotating._outer(x, dx, 4)
    assert total.shape == (4, 8, 8) and (total - want).norm() < (1e-5 if dtype == torch.float32 else 5e-3) * want.norm()


# ---- base weights in 4 and 8 bits


def quantized(bits: int, features=(64, 32)) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    plain = nn.Linear(*features)
    if bits == 4:
        layer = bitsandbytes.nn.Linear4bit(*features, quant_type="nf4")
    else:
        layer = bitsandbytes.nn.Linear8bitLt(*features, has_fp16_weights=False)
    layer.load_state_dict(plain.state_dict())
    return layer.to("cpu")  # quantises


def plain_twin(layer: OFTLinear) -> OFTLinear:
    from bitsandbytes.functional import dequantize_4bit

    weight = layer.base_layer.weight
    plain = nn.Linear(layer.in_features, layer.out_features)
    plain.weight.data, plain.bias = dequantize_4bit(weight.data, weight.quant_state), layer.base_layer.bias
    twin = OFTLinear(plain, block_size=layer.block_size)
    twin.load_state_dict({"oft_R": layer.oft_R.detach()}, strict=False)
    return twin


@pytest.mark.parametrize("tokens", [3, 40])
def test_four_bits_equal_their_dequantised_weight(tokens):
    layer = OFTLinear(quantized(4), block_size=8)
    nn.init.normal_(layer.oft_R, std=0.3)
    twin = plain_twin(layer)
    x = torch.randn(tokens, 64)
    ours = gradients(layer, x)
    assert torch.allclose(layer(x), twin(x), atol=1e-5)
    assert torch.allclose(ours[0], gradients(twin, x)[0], rtol=1e-4, atol=1e-4)
    layer.eval()
    with torch.no_grad():
        for count in (1, tokens, 40):  # bitsandbytes' own inference on CPUs would repack the weight on the way
            assert torch.allclose(layer(x[:count]), twin(x[:count]), atol=1e-5)


def test_four_bits_after_an_evaluation_of_the_base():
    base = quantized(4).eval()
    x = torch.randn(40, 64)
    with torch.no_grad():
        want = base(x)
    layer = OFTLinear(base, block_size=8)
    assert torch.allclose(layer(x), want, atol=0.05)
    assert torch.allclose(layer(x[:3]), want[:3], atol=0.05)


@pytest.mark.parametrize("tokens", [3, 40])
def test_eight_bits(tokens):
    layer = OFTLinear(quantized(8), block_size=8)
    nn.init.normal_(layer.oft_R, std=0.3)
    torch.manual_seed(0)
    twin = OFTLinear(nn.Linear(64, 32), block_size=8)
    twin.load_state_dict({"oft_R": layer.oft_R.detach()}, strict=False)
    x = torch.randn(tokens, 64)
    y, want = layer(x), twin(x)
    assert (y - want).norm() < 0.02 * want.norm()
    one, two = gradients(layer, x)[0], gradients(twin, x)[0]
    assert (one - two).norm() < 0.05 * two.norm()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_not_saved_dequantised_and_not_merged_into(bits):
    layer = OFTLinear(quantized(bits), block_size=8)
    x = torch.randn(40, 64)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    own = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}
    assert all(t.numel() <= 64 * 8 for t in saved if t.untyped_storage().data_ptr() not in own)
    with pytest.raises(TypeError, match=f"cannot merge into a {bits}-bit weight .* full precision"):
        layer.merge()


# ---- more than one process, and real widths


def _sharded(rank: int, size: int, port: int, form: str, checkpointed: bool):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        calls, original = [], mapping.map_layers
        mapping.map_layers = lambda layers, *rest: calls.append(len(layers)) or original(layers, *rest)
        blocks = [nn.Sequential(*(adapted(form, features=(16, 16), seed=10 * i + j) for j in range(2))) for i in range(2)]
        root = Checkpointed(nn.ModuleList(blocks)) if checkpointed else nn.Sequential(*blocks)
        torch.manual_seed(5)
        x = torch.randn(40, 16, requires_grad=checkpointed)
        batch_rotations(root)
        want = dict(zip([n for n, p in root.named_parameters() if p.requires_grad], gradients(root, x)))
        for block in blocks:
            fully_shard(block)
        fully_shard(root)
        optimizer = torch.optim.SGD(_trainable(root), lr=1e-3)
        for step in range(2):
            root.zero_grad()
            calls.clear()
            root(x).square().sum().backward()
            assert set(calls) == {2}, calls  # each unit maps what it holds
            if step == 0:
                for name, parameter in root.named_parameters():
                    if parameter.requires_grad:
                        assert torch.allclose(parameter.grad.full_tensor(), want[name], rtol=1e-3, atol=1e-4), name
            with torch.no_grad():
                before = root(x)
                optimizer.step()
                assert not torch.equal(root(x), before)  # nothing stale is kept
    finally:
        dist.destroy_process_group()


def _replicated(rank: int, size: int, port: int):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        model = network(scale=True)
        batch_rotations(model)
        torch.manual_seed(5)
        x = torch.randn(size, 5, 16)
        want = gradients(model, x)
        wrapped = nn.parallel.DistributedDataParallel(model)
        model.zero_grad()
        (wrapped(x[rank]).square().sum() * size).backward()
        assert all(torch.allclose(p.grad, w, rtol=1e-3, atol=1e-4) for p, w in zip(_trainable(model), want))
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_fully_shard(form, checkpointed):
    torch.multiprocessing.spawn(_sharded, (2, _free_port(), form, checkpointed), nprocs=2)


@pytest.mark.slow
def test_distributed_data_parallel():
    torch.multiprocessing.spawn(_replicated, (2, _free_port()), nprocs=2)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["block 60", "block 256", "householder"])
def test_a_step_at_the_widths_of_7b(form):
    options = {"parametrization": "householder", "num_reflections": 16}
    options = options if form == "householder" else {"block_size": int(form.split()[1])}
    features = (3420, 1280) if form == "block 60" else (5120, 3584)  # the vision MLP's down_proj, the merger's output
    torch.manual_seed(0)
    model = nn.Sequential(*(OFTLinear(nn.Linear(*features, dtype=torch.bfloat16), **options) for _ in range(2)))
    model.insert(1, nn.Linear(features[1], features[0], dtype=torch.bfloat16).requires_grad_(False))
    batch_rotations(model)
    x = torch.randn(1, 200, features[0], dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(_trainable(model), lr=1e-4)
    before = model(x).float().square().mean()
    before.backward()
    optimizer.step()
    with torch.no_grad():
        assert model(x).float().square().mean() < before


def _trainable(model):
    return [p for p in model.parameters() if p.requires_grad]
