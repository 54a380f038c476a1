"""The maps against float64 references, over norms, block sizes, spectra and precision switches."""

import warnings

import pytest
import torch
from torch.autograd import gradcheck

from vlftlib.orthogonal import (
    MAX_ITERATIONS,
    cayley,
    cayley_iterations,
    cayley_neumann,
    full_precision,
    householder,
    orthogonality_error,
    pack_skew,
    qr,
    unpack_skew,
)

NORMS = [0, 1e-6, 1e-3, 0.1, 0.5, 1, 2, 4, 7, 10]
f64 = torch.float64


def skew_of(kind: str, size: int, norm: float, seed: int = 0) -> torch.Tensor:
    """Two float32 skew-symmetric matrices of one spectral norm: random, of rank two, or with all eigenvalues +-i norm."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, size, size, dtype=f64, generator=generator)
    if kind == "random":
        skew = noise - noise.mT
    elif kind == "rank two":
        skew = noise[:, :, :1] @ noise[:, :, 1:2].mT
        skew = skew - skew.mT
    else:
        quarters = [torch.tensor([[0.0, 1], [-1, 0]], dtype=f64)] * (size // 2)
        turn = torch.block_diag(*quarters, torch.zeros(size % 2, size % 2, dtype=f64))
        basis = torch.linalg.qr(noise).Q
        skew = basis @ turn @ basis.mT
    skew = (skew / torch.linalg.matrix_norm(skew, 2)[:, None, None] * norm).float()
    return (skew - skew.mT) / 2


def exact(skew: torch.Tensor) -> torch.Tensor:
    identity = torch.eye(skew.shape[-1], dtype=f64)
    return (identity + skew.double()) @ torch.linalg.inv(identity - skew.double())


@pytest.fixture(params=["float32", "autocast", "medium", "per backend"])
def precision(request):
    """The switches that would spoil float32 products: bf16 autocast, the global precision and torch 2.9's own per backend."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if request.param == "per backend" and not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has one precision for all backends")
    before = torch.get_float32_matmul_precision()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=request.param == "autocast"):
        if request.param == "medium":
            torch.set_float32_matmul_precision("medium")
        if request.param == "per backend":
            matmul.fp32_precision = "bf16"
        yield request.param
        if request.param == "per backend":
            assert matmul.fp32_precision == "bf16"  # the map puts it back
            matmul.fp32_precision = "ieee"
        else:
            assert torch.get_float32_matmul_precision() == ("medium" if request.param == "medium" else before)
            torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", ["random", "rank two", "equal"])
@pytest.mark.parametrize("size", [2, 3, 16, 64, 256])
def test_cayley_is_the_exact_rotation(kind, size):
    for norm in NORMS:
        skew = skew_of(kind, size, norm)
        rotation = cayley(skew)
        assert rotation.dtype == torch.float32
        assert orthogonality_error(rotation) < 2e-6, norm
        assert (rotation - exact(skew)).abs().max() < 2e-6, norm


def test_cayley_under_lower_precision(precision):
    for norm in NORMS:
        skew = skew_of("random", 64, norm).requires_grad_()
        rotation = cayley(skew)
        assert rotation.dtype == torch.float32
        assert orthogonality_error(rotation) < 2e-6, norm
        probe = torch.randn(rotation.shape)
        (grad,) = torch.autograd.grad(rotation, skew, probe)
        free = skew.detach().double().requires_grad_()
        identity = torch.eye(64, dtype=f64)
        (want,) = torch.autograd.grad((identity + free) @ torch.linalg.inv(identity - free), free, probe.double())
        assert (grad - want).norm() <= 1e-5 * want.norm(), norm


def test_cayley_starts_at_the_identity_bit_for_bit():
    assert torch.equal(cayley(torch.zeros(3, 64, 64)), torch.eye(64).expand(3, 64, 64))


def test_cayley_of_bfloat16_is_computed_in_float32():
    assert orthogonality_error(cayley(skew_of("random", 64, 3).bfloat16())) < 2e-6


def test_cayley_turns_the_way_that_is_written():
    angle = 2 * torch.atan(torch.tensor(0.5))  # Q = [[0, t], [-t, 0]] turns by 2 atan t
    rotation = cayley(torch.tensor([[0, 0.5], [-0.5, 0]]))
    assert torch.allclose(rotation, torch.tensor([[angle.cos(), angle.sin()], [-angle.sin(), angle.cos()]]), atol=1e-7)


@pytest.mark.parametrize("size", [2, 16, 64, 256])
@pytest.mark.parametrize("value", [1e2, 1e4, 1e6])
def test_cayley_stays_finite(size, value):
    count = size * (size - 1) // 2
    packed = torch.stack([torch.full((count,), value), value * torch.randn(count, generator=torch.Generator().manual_seed(0))])
    packed.requires_grad_()
    rotation = cayley(unpack_skew(packed, size))
    rotation.square().sum().backward()
    assert rotation.isfinite().all() and packed.grad.isfinite().all()
    assert rotation.abs().max() < 1.1


@pytest.mark.parametrize("norm", [0.2, 3, 10])
def test_cayley_gradient(norm):
    packed = pack_skew(skew_of("random", 5, norm).double()).requires_grad_()
    assert gradcheck(lambda packed: cayley(unpack_skew(packed, 5)), packed)


def test_cayley_uses_matrix_products_only():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        names: set = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    skew = skew_of("random", 16, 3).requires_grad_()
    with Seen() as seen:
        cayley(skew).sum().backward()
    assert "bmm" in seen.names
    lapack = [name for name in seen.names - {"linalg_vector_norm"} if any(word in name for word in ("linalg", "inv", "solve"))]
    assert not lapack


def test_iterations_follow_from_the_norm():
    counts = [cayley_iterations(norm) for norm in (0, 0.1, 1, 10, 1e6)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[1] <= 1 and counts[3] <= 6 and counts[4] == MAX_ITERATIONS
    assert cayley_iterations(1, f64) > cayley_iterations(1)
    assert cayley_iterations(float("nan")) == MAX_ITERATIONS  # of one block: the others of its batch are mapped all the same


def test_one_broken_block_spoils_no_other():
    skew = torch.stack([skew_of("random", 16, 3)[0], torch.full((16, 16), float("nan"))])
    rotations = cayley(skew)
    assert orthogonality_error(rotations[:1]) < 2e-6 and rotations[1].isnan().all()


def test_skew_packing_is_row_major_and_reversible():
    skew = unpack_skew(torch.tensor([1.0, 2, 3, 4, 5, 6]), 4)
    assert skew[0].tolist() == [0, 1, 2, 3] and skew[1].tolist() == [-1, 0, 4, 5]
    assert torch.equal(skew, -skew.mT)
    assert pack_skew(skew).tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="5 values are no strict upper triangle of a 4 x 4 matrix: that has 6"):
        unpack_skew(torch.zeros(5), 4)


def dense(factors):
    left, right = factors
    return torch.eye(left.shape[-2], dtype=left.dtype) - left @ right.mT


@pytest.mark.parametrize("count", [2, 4, 6, 10, 16])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_householder_is_the_product_of_its_reflections(count, leading):
    vectors = torch.randn(*leading, 20, count, dtype=f64, generator=torch.Generator().manual_seed(0))
    want = torch.eye(20, dtype=f64).expand(*leading, 20, 20)
    for column in vectors.split(1, dim=-1):
        want = want @ (torch.eye(20, dtype=f64) - 2 * column @ column.mT / column.square().sum(-2, keepdim=True))
    assert torch.allclose(dense(householder(vectors)).mT, want, atol=1e-13)


@pytest.mark.parametrize("spread", [0, 1e-7, 1e-4, 1e-2, 1, 100])
def test_householder_is_orthogonal(spread, precision):
    generator = torch.Generator().manual_seed(0)
    for base in (torch.ones(512, 16), torch.randn(512, 8, generator=generator).repeat_interleave(2, 1)):
        vectors = base + spread * torch.randn(512, 16, generator=generator)
        left, right = householder(vectors)
        assert left.dtype == right.dtype == torch.float32
        assert orthogonality_error(dense((left.double(), right.double()))) < 1e-6


def test_householder_starts_at_the_identity_with_a_gradient():
    vectors = torch.randn(512, 8, generator=torch.Generator().manual_seed(0)).repeat_interleave(2, 1).requires_grad_()
    rotation = dense(householder(vectors))
    assert torch.equal(rotation, torch.eye(512))
    rotation[0, 1].backward()
    assert (vectors.grad.abs().amax(0) > 0).all()


def test_householder_change_survives_rounding_to_bfloat16():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(64, 8, generator=generator).repeat_interleave(2, 1) + 1e-4 * torch.randn(64, 16, generator=generator)
    left, right = householder(vectors)
    change = left @ right.mT
    rounded = left.bfloat16().float() @ right.bfloat16().float().mT
    assert (rounded - change).norm() < 0.01 * change.norm()


def test_householder_gradient():
    assert gradcheck(householder, torch.randn(2, 7, 6, dtype=f64).requires_grad_())
    pairs = torch.randn(7, 2, dtype=f64).repeat_interleave(2, 1) + 1e-3 * torch.randn(7, 4, dtype=f64)
    assert gradcheck(householder, pairs.requires_grad_())


@pytest.mark.parametrize("value", [1e-6, 1e6])
def test_householder_ignores_lengths(value):
    vectors = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(dense(householder(vectors * value)), dense(householder(vectors)), atol=1e-6)


def test_householder_refuses_an_odd_number():
    with pytest.raises(ValueError, match="even and positive, got 3"):
        householder(torch.ones(4, 3))


def test_qr_is_a_rotation_and_starts_at_the_identity():
    first, second = torch.randn(2, 3, 10, 4, dtype=f64, generator=torch.Generator().manual_seed(0))
    rotation = qr(first, second)
    assert orthogonality_error(rotation) < 1e-14
    assert torch.allclose(torch.linalg.det(rotation), torch.ones(3, dtype=f64))
    assert torch.equal(qr(first.float(), torch.zeros(3, 10, 4)), torch.eye(10).expand(3, 10, 10))
    assert orthogonality_error(qr(first.float(), second.float())) < 1e-5
    assert gradcheck(qr, (first[0].requires_grad_(), second[0].requires_grad_()))


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 8])
def test_neumann_is_peft_s_series(terms):
    oft = pytest.importorskip("peft.tuners.oft.layer")
    packed = 0.01 * torch.randn(3, 28, generator=torch.Generator().manual_seed(0))
    module = oft.OFTRotationModule(3, 28, 8, in_features=24)
    want = module._cayley_batch(packed, 8, True, terms)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.allclose(cayley_neumann(unpack_skew(packed, 8), terms), want, atol=1e-6)


def test_neumann_warns_where_it_is_no_rotation():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cayley_neumann(skew_of("random", 64, 0.1))
    with pytest.warns(UserWarning, match="is no rotation"):
        cayley_neumann(skew_of("random", 64, 0.5))
    with pytest.raises(ValueError, match="at least 1 term, got 0"):
        cayley_neumann(torch.zeros(2, 2), 0)


def test_a_precision_that_is_inherited_stays_inherited():
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has one precision for all backends")
    skew, before = skew_of("random", 64, 3), torch.backends.mkldnn.fp32_precision
    own = matmul.fp32_precision
    try:
        matmul.fp32_precision, torch.backends.mkldnn.fp32_precision = "none", "bf16"
        assert orthogonality_error(cayley(skew)) < 2e-6
        assert matmul.fp32_precision == "bf16"
        torch.backends.mkldnn.fp32_precision = "ieee"
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision, torch.backends.mkldnn.fp32_precision = own, before


def test_full_precision_is_restored_after_an_error(precision):
    with pytest.raises(KeyError), full_precision(torch.device("cpu")):
        raise KeyError
