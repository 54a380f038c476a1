"""Give torch_npu's operators the CPU kernels' arithmetic, on the same bytes: the stand-in's device memory is host memory.

Only operators that torch_npu has a kernel for are given one, so what falls back on an NPU falls back here. Memory, views,
dtype rules, autocast, autograd and loss scaling stay torch_npu's own. What the chip refuses (dtypes, sizes) is not refused
here, and nothing is known of its rounding or its speed.
"""

import contextlib

import torch
import torch_npu  # noqa: F401
from torch.utils._pytree import tree_map

# torch_npu's own kernels for these only make, move or view memory, and they hold its rules (float64 becomes float32, ...).
KEPT = set(
    "empty.memory_format empty_strided _to_copy view as_strided _reshape_alias resize_ set_ set_.source_Storage "
    "set_.source_Storage_storage_offset set_.source_Tensor _pin_memory is_pinned record_stream unfold _copy_from "
    "_copy_from_and_resize alias detach view_as_real view_as_complex _has_compatible_shallow_copy_type".split()
)
# Registered below by hand.
BY_HAND = {"scaled_dot_product_attention", "matmul_backward", "copy_"}
CPU, NPU = torch.device("cpu"), "npu"
libraries = []  # a registration lasts as long as its library


def install() -> None:
    """Register a kernel that computes on the host for every aten operator that torch_npu has one for."""
    aten, npu = torch.library.Library("aten", "IMPL"), torch.library.Library("npu", "IMPL")
    libraries.extend((aten, npu))
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        namespace, _, name = name.partition("::")
        base, _, overload = name.partition(".")
        if namespace != "aten" or name in KEPT | BY_HAND or base == "view" or "sparse" in base:
            continue
        packet = getattr(torch.ops.aten, base, None)
        operator = packet and getattr(packet, overload or "default", None)
        if operator is not None:
            register(aten, name, on_host(operator))
    register(aten, "copy_", copy)
    register(aten, "matmul_backward", matmul_backward)
    # torch_npu computes attention whole, gradient included; here its parts are differentiated.
    register(aten, "scaled_dot_product_attention", attention, "PrivateUse1", "AutogradPrivateUse1")
    for name in ("npu_format_cast", "npu_format_cast_", "npu_format_cast.Tensor"):  # the chip's tiled layouts
        register(npu, name, lambda tensor, *layout, **options: tensor, "PrivateUse1", "AutogradPrivateUse1")
    for name in ("npu_dtype_cast", "_npu_dtype_cast"):
        register(npu, name, lambda tensor, dtype, *rest, **options: to_npu(host(tensor).to(dtype)))


def register(library: torch.library.Library, name: str, kernel, *keys: str) -> None:
    for key in keys or ("PrivateUse1",):
        library.impl(name, kernel, key, allow_override=True)


def host(value):
    """An NPU tensor as a CPU tensor over the same bytes; other NPU things as their counterparts; the rest as it is."""
    if isinstance(value, torch.device):
        return CPU if value.type == NPU else value
    if isinstance(value, torch.Generator) and value.device.type == NPU:
        return None  # `drawing` stands in for it
    if not isinstance(value, torch.Tensor) or value.device.type != NPU:
        return value
    storage = value.untyped_storage()
    if not storage.nbytes() or not storage.data_ptr():
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    same_bytes = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    return torch.empty(0, dtype=value.dtype).set_(same_bytes, value.storage_offset(), value.size(), value.stride())


@contextlib.contextmanager
def drawing(given):
    """Let the CPU's generator draw for an NPU's, from its seed and offset alone, and leave the CPU's own stream as it was.

    As on the chip, the state is a seed and an offset, so that saving and restoring it repeats what is drawn; and what the
    device draws (dropout) doesn't disturb what the CPU draws (the order of the data).
    """
    generator = next((value for value in given if isinstance(value, torch.Generator)), None)
    if generator is None:
        generator = torch.npu.default_generators[torch.npu.current_device()]
    seed, offset = generator.get_state().view(torch.int64).tolist()
    generator.set_state(torch.tensor([seed, offset + 4]).view(torch.uint8))
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(hash((seed, offset)) % 2**63)
        yield


def to_npu(value):
    """A CPU result in NPU memory."""
    if not isinstance(value, torch.Tensor):
        return value
    copied = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=NPU)
    if value.numel():
        host(copied).copy_(value)
    return copied


def on_host(operator: torch._ops.OpOverload):
    """A kernel for NPU tensors that runs the CPU's; arguments that the operator writes to are returned, not copied."""
    schema = operator._schema
    written = [
        (index, argument.name, argument.kwarg_only, frozenset(argument.alias_info.before_set))
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returned = [
        frozenset(result.alias_info.before_set) if result.alias_info is not None and result.alias_info.is_write else None
        for result in schema.returns
    ]

    draws = torch.Tag.nondeterministic_seeded in operator.tags

    def kernel(*args, **kwargs):
        host_args, host_kwargs = tree_map(host, args), tree_map(host, kwargs)
        with drawing([*args, *kwargs.values()]) if draws else contextlib.nullcontext():
            results = operator(*host_args, **host_kwargs)
        targets = {}
        for index, name, by_name, alias in written:
            named = by_name or index >= len(args)
            given, computed = (kwargs.get(name), host_kwargs.get(name)) if named else (args[index], host_args[index])
            targets[alias] = given
            # An out= tensor of another size: the CPU kernel has put its result into memory of its own.
            if isinstance(given, torch.Tensor) and given.device.type == NPU and given.size() != computed.size():
                given.resize_(computed.size())
                host(given).copy_(computed)
        if not returned:
            return None
        results = results if len(returned) > 1 else (results,)
        mine = [
            targets[alias] if alias is not None else tree_map(to_npu, result) for alias, result in zip(returned, results)
        ]
        return tuple(mine) if len(mine) > 1 else mine[0]

    return kernel


def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    host(target).copy_(host(source))
    return target


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the parts would add True as 1
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype, device=NPU).masked_fill(~attn_mask, float("-inf"))
    parts = torch.ops.aten._scaled_dot_product_attention_math
    return parts(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]


def matmul_backward(grad, left, right, mask):
    """Gradients of `left @ right`; the CPU has no such kernel, because there matmul is taken apart before autograd."""
    grad, left, right = host(grad), host(left), host(right)
    rows = left[None] if left.dim() == 1 else left
    columns = right[:, None] if right.dim() == 1 else right
    grad = grad.unsqueeze(-1) if right.dim() == 1 else grad
    grad = grad.unsqueeze(-2) if left.dim() == 1 else grad
    of_left = (grad @ columns.mT).sum_to_size(rows.shape).reshape(left.shape) if mask[0] else None
    of_right = (rows.mT @ grad).sum_to_size(columns.shape).reshape(right.shape) if mask[1] else None
    return to_npu(of_left), to_npu(of_right)
