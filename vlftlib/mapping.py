"""From OFT parameters to rotations: all layers of a model in one batch a forward.

Layers of equal block size are mapped together before the model's forward (`batch_rotations`). What was mapped lives in a
layer's `Slot`, which copies and pickles as empty. A layer that is called outside its model's forward maps for itself.
"""

import math
import sys
import warnings
import weakref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointFunction

from vlftlib.orthogonal import cayley_inverse, full_precision, householder, neumann_change, pack_skew, unpack_skew
from vlftlib.rotating import wide


class NormBound:
    """A number on the host that is not below the largest |Q|^2, without waiting for the device.

    On an accelerator each map sends its norm to pinned memory and the next map, one optimizer step later, reads what has
    arrived (negative: not yet) with a margin for what each step since then may add. Only the first map waits.
    """

    def __init__(self):
        self.arriving: Tensor | None = None
        self.norm, self.granted = 0.0, math.inf
        self.age = self.sent = 0  # maps since the norm was taken, and since one was sent

    def __call__(self, bound: Tensor) -> float:
        largest = bound.amax().sqrt()
        if largest.device.type == "cpu":
            return largest.item() ** 2
        if self.arriving is None:
            self.arriving = torch.full((), largest.item(), dtype=largest.dtype, pin_memory=True)
        self.age, self.sent = self.age + 1, self.sent + 1
        arrived = self.arriving.item()
        if not arrived < 0:
            if arrived > self.granted:
                warnings.warn(
                    f"OFT parameters jumped to a norm of {arrived:.2g} where at most {self.granted:.2g} was expected, so the "
                    f"last forward's rotations had not converged; call batch_rotations(model) after changing them by hand",
                    stacklevel=2,
                )
            self.norm, self.age, self.sent = arrived, self.sent, 0
            self._send(largest)
        self.granted = 2 ** min(self.age, 16) * self.norm + self.age
        return self.granted**2

    def _send(self, largest: Tensor) -> None:
        self.arriving.fill_(-1)
        self.arriving.copy_(largest, non_blocking=True)


class Slot:
    """What was mapped for one layer. It copies and pickles as empty, since a mapped rotation belongs to one graph."""

    def __init__(self):
        self.factors: tuple[Tensor, ...] | None = None
        self.open = False  # the root's forward is under way: the factors are current
        self.dtype: torch.dtype | None = None  # in which the layer last computed
        self.state = None  # of the parameter that factors without gradient were mapped from
        self.norm_bound = NormBound()

    def __deepcopy__(self, memo):
        return Slot()

    def __reduce__(self):
        return Slot, ()


class CayleyMap(torch.autograd.Function):
    """Packed Q of many blocks to R - I = 2 (M - I), with M = (I - Q)^-1.

    With O = x^T dx, dR = O R; and R M^T = M, so dQ = 2 M^T dR M^T = 2 M^T O M: layers pass O as the gradient of their factors.
    """

    @staticmethod
    def forward(ctx, packed, block_size, dtype, norm_bound):
        with full_precision(packed.device):
            inverse = cayley_inverse(unpack_skew(packed.to(wide(packed.dtype)), block_size), norm_bound)
            inverse.diagonal(dim1=1, dim2=2).sub_(1)
            change = inverse.mul_(2).to(dtype)
        ctx.save_for_backward(change)  # the storage that the layers save: one matrix a block in all
        ctx.packed_dtype = packed.dtype
        return change

    @staticmethod
    @once_differentiable
    def backward(ctx, outer):
        (change,) = ctx.saved_tensors
        with full_precision(change.device):
            inverse = change.to(wide(ctx.packed_dtype)) / 2
            inverse.diagonal(dim1=1, dim2=2).add_(1)
            outer = outer.to(inverse.dtype)
            grad = inverse.mT @ (outer - outer.mT) @ inverse
        return pack_skew(grad).mul_(2).to(ctx.packed_dtype), None, None, None


class _Join(torch.autograd.Function):
    """Parameters of several layers to one tensor; layers that no gradient came back for get None, not zeros (see `_Split`)."""

    @staticmethod
    def forward(ctx, absent, *parameters):
        ctx.absent, ctx.sizes = absent, [len(parameter) for parameter in parameters]
        return torch.cat(parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, *(None if index in ctx.absent else part for index, part in enumerate(grad.split(ctx.sizes)))


class _Split(torch.autograd.Function):
    """One tensor to parts by rows; notes in `absent` the parts that took part in no loss."""

    @staticmethod
    def forward(ctx, absent, sizes, joined):
        ctx.absent, ctx.sizes, ctx.shape = absent, sizes, joined.shape
        ctx.set_materialize_grads(False)
        return joined.split(sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        ctx.absent.clear()
        ctx.absent.update(index for index, grad in enumerate(grads) if grad is None)
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return None, None, None
        parts = (given.new_zeros(size, *ctx.shape[1:]) if grad is None else grad for size, grad in zip(ctx.sizes, grads))
        return None, None, torch.cat(list(parts))


def map_layers(layers: list[nn.Module], dtype: torch.dtype, norm_bound: NormBound | None = None) -> list[tuple[Tensor, ...]]:
    """Factors of layers of one kind (`OFTLinear.kind`), in one batch."""
    absent: set[int] = set()
    joined = _Join.apply(absent, *(layer.oft_R for layer in layers))
    if layers[0].parametrization != "householder":
        if layers[0].parametrization == "cayley":
            change = CayleyMap.apply(joined, layers[0].block_size, dtype, norm_bound)
        else:
            skew = unpack_skew(joined.to(wide(joined.dtype)), layers[0].block_size)
            change = neumann_change(skew, layers[0].neumann_terms).to(dtype)
        parts = _Split.apply(absent, [len(layer.oft_R) for layer in layers], change)
        return [(part.expand(layer.num_blocks, -1, -1) if layer.block_share else part,) for layer, part in zip(layers, parts)]
    rows = [layer.in_features for layer in layers]
    factors = householder(joined.unflatten(0, (len(layers), -1)))
    left, right = (_Split.apply(absent, rows, factor.flatten(0, 1).to(dtype)) for factor in factors)
    return list(zip(left, right))


def _fill(layers: list[nn.Module], dtype: torch.dtype, norm_bound: NormBound, keep: bool) -> None:
    """Map layers of one group into their slots; without gradients, and if `keep`, only where a parameter has changed.

    A forward that builds a graph always maps, and so renews what is kept: fused optimizers may write past torch's version
    counters. The map's own saved tensors stay out of sight of checkpointing, whose second pass finds the factors ready.
    """
    grad = torch.is_grad_enabled()
    trained = grad and any(layer.oft_R.requires_grad for layer in layers)
    states = [(layer.oft_R._version, layer.oft_R.data_ptr(), dtype) for layer in layers] if keep and not trained else None
    if states and all(layer.slot.state == state for layer, state in zip(layers, states)):
        return
    with torch.inference_mode(False), torch.set_grad_enabled(grad), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        mapped = map_layers(layers, dtype, norm_bound)
    for index, (layer, factors) in enumerate(zip(layers, mapped)):
        layer.slot.factors = factors
        layer.slot.state = states[index] if states else None


def _same(tensor: Tensor) -> Tensor:
    return tensor


@torch.compiler.disable
def map_alone(layer: nn.Module, dtype: torch.dtype) -> tuple[Tensor, ...]:
    slot = layer.slot
    slot.dtype = dtype  # the next batch maps to it at once
    in_backward = torch._C._current_graph_task_id() != -1
    if in_backward and slot.factors is not None and slot.factors[0].dtype == dtype:  # checkpointing's second pass
        if slot.factors[0].requires_grad or not layer.oft_R.requires_grad:
            return slot.factors
    _fill([layer], dtype, slot.norm_bound, keep=not isinstance(layer.oft_R, DTensor))
    return slot.factors


@torch.compiler.disable
def refuse_reentrant_checkpointing() -> None:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise RuntimeError(
                "OFT maps a model's rotations once, outside of checkpointed parts, which reentrant checkpointing cannot reach: "
                'use gradient_checkpointing_enable({"use_reentrant": False}) or checkpoint(..., use_reentrant=False)'
            )
        frame = frame.f_back


class _Plan:
    """The OFT layers under one root and the norm bounds of their groups."""

    def __init__(self, root: nn.Module):
        self.layers = [module for module in root.modules() if isinstance(getattr(module, "slot", None), Slot)]
        self.units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self.norm_bounds: dict[tuple, NormBound] = {}
        self.opened: list[nn.Module] = []


_PLANS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by root; a copied or unpickled root starts a new one


def batch_rotations(model: nn.Module) -> None:
    """Let all OFT layers of a model share one map a forward, in one batch for each block size.

    Layers map for themselves when called outside the model's own call. Under `fully_shard` each wrapped unit maps what it
    holds. Call it again after adding or removing layers, or after changing parameters by hand.

    Args:
        model: the module whose call starts a forward.
    """
    _PLANS.pop(model, None)
    for module in model.modules():
        if isinstance(getattr(module, "slot", None), Slot):
            module.slot.state, module.slot.norm_bound = None, NormBound()
    if _before_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before_forward)
        model.register_forward_hook(_after_forward, always_call=True)


def parameters_were_loaded(layer: nn.Module, incompatible_keys) -> None:
    """After `load_state_dict`: norms may be far from those of the last step."""
    layer.slot.norm_bound = NormBound()
    for plan in _PLANS.values():
        plan.norm_bounds.clear()


@torch.compiler.disable
def _before_forward(root: nn.Module, args) -> None:
    plan = _PLANS.get(root)
    if plan is None or (not plan.units and any(isinstance(layer.oft_R, DTensor) for layer in plan.layers)):
        plan = _PLANS[root] = _Plan(root)
        for unit in plan.units:  # their parameters are whole only inside their own forward
            if unit is not root:
                batch_rotations(unit)
    plan.opened = [layer for layer in plan.layers if not (layer.merged or layer.slot.open or isinstance(layer.oft_R, DTensor))]
    groups: dict[tuple, list[nn.Module]] = {}
    for layer in plan.opened:
        dtype = layer.slot.dtype or layer._compute_dtype(layer.oft_R)
        groups.setdefault((layer.kind, dtype, layer.oft_R.device, layer.oft_R.requires_grad), []).append(layer)
    for key, layers in groups.items():
        # fully_shard fills parameters behind their version counters, so nothing is kept there
        _fill(layers, key[1], plan.norm_bounds.setdefault(key, NormBound()), keep=not plan.units)
    for layer in plan.opened:
        layer.slot.open = True


@torch.compiler.disable
def _after_forward(root: nn.Module, args, output) -> None:
    plan = _PLANS[root]
    for layer in plan.opened:
        layer.slot.open = False
    plan.opened = []
