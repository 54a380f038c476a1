"""Maps from free parameters to orthogonal matrices, and the sign convention of this package.

What is unusual here:
- A rotation R acts on input features from the right, y = W (x R), so a merged weight is W R^T. The Cayley map is
  R = (I + Q)(I - Q)^-1 with Q skew-symmetric; PEFT's exact path computes the transpose of that, its Neumann series doesn't.
- The Cayley map is matrix products only. LAPACK operators (inverse, solve, qr) fall back to the CPU on Ascend, and the
  batched LU has failed on some x86 machines.
- Householder reflections come in pairs written by their difference, so that the small change R - I stays accurate in
  bf16 and is exactly zero at the start.
"""

import math
import warnings
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_ITERATIONS = 12  # reached at a spectral norm of about 1,000; above it the map stays finite but is no longer orthogonal
NEUMANN_ERROR = 1e-3


@contextmanager
def full_precision(device: torch.device):
    """Matrix products as written inside: autocast off, and no TF32 or bf16 in place of float32.

    torch 2.9 has a precision per backend, which may be set whatever mixture of old and new switches the user chose; before
    that there is the global switch alone.
    """
    backends = [b for b in (torch.backends.cuda.matmul, torch.backends.mkldnn) if hasattr(b, "fp32_precision")]
    backends = [getattr(b, "matmul", b) for b in backends]
    with torch.autocast(device.type, enabled=False):
        if backends:
            before = [_own_precision(backend) for backend in backends]
            try:
                for backend in backends:
                    backend.fp32_precision = "ieee"
                yield
            finally:
                for backend, precision in zip(backends, before):
                    backend.fp32_precision = precision
        else:
            before = torch.get_float32_matmul_precision()
            try:
                torch.set_float32_matmul_precision("highest")
                yield
            finally:
                torch.set_float32_matmul_precision(before)


def _own_precision(backend) -> str:
    """A backend's own setting, "none" where it inherits (which reads as what it inherits); it inherits from here on."""
    precision, backend.fp32_precision = backend.fp32_precision, "none"
    return "none" if backend.fp32_precision == precision else precision


@lru_cache(maxsize=32)
def _upper_positions(block_size: int, device: torch.device) -> Tensor:
    """Flat positions of the strict upper triangle in a (block_size, block_size) matrix, row by row."""
    rows, columns = torch.triu_indices(block_size, block_size, 1, device=device)
    return rows * block_size + columns


def unpack_skew(packed: Tensor, block_size: int) -> Tensor:
    """Skew-symmetric matrices from their strict upper triangles.

    Args:
        packed: (..., block_size * (block_size - 1) / 2), the strict upper triangle row by row.
        block_size: rows of one matrix.

    Returns:
        (..., block_size, block_size) with Q^T = -Q.

    Raises:
        ValueError: the last dimension is no such triangle.
    """
    if packed.shape[-1] != block_size * (block_size - 1) // 2:
        raise ValueError(
            f"{packed.shape[-1]} values are no strict upper triangle of a {block_size} x {block_size} matrix: "
            f"that has {block_size * (block_size - 1) // 2}"
        )
    upper = packed.new_zeros(*packed.shape[:-1], block_size * block_size)
    upper = upper.index_copy(-1, _upper_positions(block_size, packed.device), packed)
    upper = upper.unflatten(-1, (block_size, block_size))
    return upper - upper.mT


def pack_skew(skew: Tensor) -> Tensor:
    """The strict upper triangles of skew-symmetric matrices, row by row: the inverse of `unpack_skew`."""
    return skew.flatten(-2).index_select(-1, _upper_positions(skew.shape[-1], skew.device))


def cayley_iterations(norm: float, dtype: torch.dtype = torch.float32) -> int:
    """Iterations that `cayley` needs at a spectral norm of Q: 1 at 0.1, 3 at 1, 6 at 10, MAX_ITERATIONS at 1,000 and for NaN."""
    error, count = norm**2 / (2 + norm**2), 0
    while not error <= math.sqrt(torch.finfo(dtype).eps) and count < MAX_ITERATIONS:
        error, count = error**2 / (2 - error**2), count + 1
    return count


def cayley_inverse(skew: Tensor, norm_bound=None) -> Tensor:
    """(I - Q)^-1 of skew-symmetric Q by matrix products alone.

    With G = Q^T Q, (I - Q)^-1 = (I + Q)(I + G)^-1. The spectrum of I + G lies in [1, 1 + |G|], so its inverse comes from
    the product form of Newton's iteration, rescaled at every step for the interval that is left (each step divides the
    condition number by about four). A last Newton step on I - Q itself, whose condition number is only the root of that of
    I + G, removes the rounding errors of the first part.

    Args:
        skew: (N, b, b) float32 or float64, skew-symmetric.
        norm_bound: maps the device's bounds on |G|, shape (N, 1, 1), to one number on the host that is not below the
            largest squared norm; None reads them, which waits for the device.

    Returns:
        (N, b, b), the inverses.
    """
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    gram = skew.mT @ skew
    # two bounds on |G|: the first is the tighter one for random Q, the second for Q of low rank
    bound = torch.minimum(
        torch.linalg.vector_norm(gram, ord=1, dim=-1, keepdim=True).amax(-2, keepdim=True),
        torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True),
    )
    largest = bound.max().item() if norm_bound is None else norm_bound(bound)
    error, start = bound / (2 + bound), 2 / (2 + bound)
    residual = error * identity - start * gram  # I - start * (I + G), without its cancellation
    estimate = None
    for left in range(cayley_iterations(math.sqrt(largest), skew.dtype) - 1, -1, -1):
        rescale = 2 / (2 - error**2)
        if estimate is None:
            estimate = (start * rescale) * (identity + residual)
        else:
            estimate = rescale * (estimate + estimate @ residual)
        if left:
            residual = (1 - rescale) * identity + rescale * (residual @ residual)
            error = error**2 / (2 - error**2)
    inverse = start * (identity + skew) if estimate is None else estimate + skew @ estimate
    return inverse + inverse @ (identity - inverse + skew @ inverse)


class _Cayley(torch.autograd.Function):
    @staticmethod
    def forward(ctx, skew):
        with full_precision(skew.device):
            inverse = cayley_inverse(skew)
        ctx.save_for_backward(inverse)
        return 2 * inverse - torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors  # R = 2 M - I and dM = M dQ M
        with full_precision(inverse.device):
            return 2 * inverse.mT @ grad @ inverse.mT


def cayley(skew: Tensor) -> Tensor:
    """Cayley map R = (I + Q)(I - Q)^-1 (Cayley 1846), by matrix products alone, in float32 or float64.

    The identity, bit for bit, at Q = 0. |R^T R - I| is at most 1e-5 in float32 up to a spectral norm of 10.

    Args:
        skew: (..., b, b), skew-symmetric; lower precision is converted to float32.

    Returns:
        (..., b, b), rotations with determinant +1.
    """
    skew = skew if skew.dtype == torch.float64 else skew.float()
    return _Cayley.apply(skew.reshape(-1, *skew.shape[-2:])).reshape(skew.shape)


def cayley_neumann(skew: Tensor, terms: int = 5) -> Tensor:
    """PEFT's truncated Neumann series for the Cayley map: I + 2Q + ... + 2Q^(terms-2) + Q^(terms-1). Only to read its files.

    It is orthogonal to first orders only; a warning tells when the largest |R^T R - I| passes 1e-3.

    Args:
        skew: (..., b, b), skew-symmetric.
        terms: PEFT's `num_cayley_neumann_terms`, 5 by default there.

    Returns:
        (..., b, b), nearly orthogonal.

    Raises:
        ValueError: fewer than one term.
    """
    skew = skew if skew.dtype == torch.float64 else skew.float()
    result = neumann_change(skew, terms) + torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    error = orthogonality_error(result)
    if error > NEUMANN_ERROR:
        warnings.warn(f"this {terms}-term Cayley-Neumann series is no rotation: |R^T R - I| is {error:.1e}", stacklevel=2)
    return result


def neumann_change(skew: Tensor, terms: int) -> Tensor:
    """`cayley_neumann` without its identity and its warning, for which the device must be waited for."""
    if terms < 1:
        raise ValueError(f"cayley_neumann needs at least 1 term, got {terms}")
    # as PEFT does it: two terms keep the last one's factor 2, and three are computed like four
    weights = {1: [], 2: [2]}.get(terms, [2] * max(terms - 2, 2) + [1])
    result, power = torch.zeros_like(skew), None
    with full_precision(skew.device):
        for weight in weights:
            power = skew if power is None else power @ skew
            result = result + weight * power
    return result


def householder(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Product of reflections in compact form, R = I - P U^T with R^T = H_1 H_2 ... H_k and H_i = I - 2 v_i v_i^T / |v_i|^2.

    Compact WY representation (Schreiber and Van Loan 1989), built by joining neighbours, which needs no inverse. Each pair
    (v, w) is written by v and d = w - v: H_v H_w = I - [v d] T [v d]^T with T = [[2|d|^2, 2|d|^2 - 2], [2, 2]]. All of R - I
    is then of the size of d, rounding P and U to bf16 costs a relative error only, and equal vectors give exactly I.
    The order is that of PEFT's HRA, so its `hra_u` are these vectors.

    Args:
        vectors: (..., in_features, k), k even; the lengths of the columns don't matter.

    Returns:
        P and U, each (..., in_features, k), float32 or float64.

    Raises:
        ValueError: an odd number of reflections.
    """
    count = vectors.shape[-1]
    if count % 2 or not count:
        raise ValueError(f"the number of reflections must be even and positive, got {count}: an odd one can't start as I")
    vectors = vectors if vectors.dtype == torch.float64 else vectors.float()
    with full_precision(vectors.device):
        # a division by the largest entry first keeps the squares of entries up to 1e30 finite
        vectors = vectors / vectors.detach().abs().amax(-2, keepdim=True).clamp_min(torch.finfo(vectors.dtype).tiny)
        unit = torch.nn.functional.normalize(vectors, dim=-2)
        first, change = unit[..., 0::2], unit[..., 1::2] - unit[..., 0::2]
        basis = torch.stack([first, change], -1).flatten(-2)  # v_1 d_1 v_2 d_2 ...
        overlap = basis.mT @ basis
        square = change.square().sum(-2)
        two = torch.full_like(square, 2)
        blocks = torch.stack([2 * square, 2 * square - 2, two, two], -1).unflatten(-1, (2, 2))  # (..., k / 2, 2, 2)
        core = _block_diagonal(blocks)
        size = 2
        while size < count:  # (I - U T U^T)(I - V S V^T) has the corner - T (U^T V) S
            core = _join(core, overlap, size)
            size *= 2
        return basis @ core.mT, basis


def _block_diagonal(blocks: Tensor) -> Tensor:
    """(..., m, s, s) to (..., m s, m s) with the blocks on the diagonal."""
    return torch.diag_embed(blocks.movedim(-3, -1)).movedim((-4, -3, -2, -1), (-3, -1, -4, -2)).flatten(-4, -3).flatten(-2)


def _join(core: Tensor, overlap: Tensor, size: int) -> Tensor:
    """Fill the corners that join neighbouring diagonal blocks of `size` rows into blocks of twice as many."""
    index = torch.arange(core.shape[-1], device=core.device) // size
    corner = (index[:, None] + 1 == index[None, :]) & (index[:, None] % 2 == 0)
    return core - (core @ (overlap * corner) @ core) * corner


def qr(first: Tensor, second: Tensor) -> Tensor:
    """The orthogonal factor, with positive diagonal of the other, of I + A B^T - B A^T.

    What Report A's dense variant meant: its own product Q_r Q_r^T is a projector of rank r, not a rotation. Adding a
    skew-symmetric matrix to I keeps the determinant positive, so this is always a rotation, the identity at B = 0. For
    completeness: QR runs on the CPU or the AI CPU on Ascend, and the matrix is dense.

    Args:
        first: A, (..., d, r).
        second: B, (..., d, r), zero at the start.

    Returns:
        (..., d, d), float32 or float64, determinant +1.
    """
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    first, second = first.to(wide), second.to(wide)
    with full_precision(first.device):
        product = first @ second.mT
        matrix = torch.eye(first.shape[-2], dtype=wide, device=first.device) + product - product.mT
        factor, triangle = torch.linalg.qr(matrix)
        return factor * triangle.diagonal(dim1=-2, dim2=-1).detach().sign().unsqueeze(-2)


def orthogonality_error(rotation: Tensor) -> float:
    """The largest |R^T R - I| over all matrices of (..., d, d), computed in float64 on the CPU; waits for the device."""
    rotation = rotation.detach().to("cpu", torch.float64)
    return (rotation.mT @ rotation - torch.eye(rotation.shape[-1], dtype=torch.float64)).abs().max().item()
