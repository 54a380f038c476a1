"""Which operators have a kernel on an Ascend NPU, from the tables beside this file or, where torch_npu runs, from torch itself.

`native_functions.txt` is the dispatcher's state with torch_npu 2.14.0 loaded; `composite_intercepts.txt` lists the operators
that torch takes apart on the CPU and on CUDA but torch_npu computes whole, so that their parts never reach an NPU.
"""

import functools
import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
# Native, but run by the six or seven small ARM cores on the chip: a public profile shows 42 ms a call, 19 times a GPU's.
AI_CPU = {"aten::linalg_qr", "aten::linalg_qr.out"}
HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key
# What scaled_dot_product_attention, which the NPU computes whole, becomes on the CPU and on CUDA.
ATTENTION_PARTS = "aten::_scaled_dot_product_"


def read_lines(name: str) -> list[str]:
    return [line for line in (FOLDER / name).read_text().splitlines() if not line.startswith("#")]


@functools.cache
def table() -> dict[str, str]:
    """Operator with overload -> native, native_via_out:OP, composite_implicit or _explicit, cpu_fallback, unregistered."""
    return dict(line.split("\t") for line in read_lines("native_functions.txt"))


@functools.cache
def intercepts() -> frozenset[str]:
    """Names, without overload, of the operators that torch_npu computes whole."""
    return frozenset(line.removeprefix("aten::").partition(".")[0] for line in read_lines("composite_intercepts.txt"))


def name_of(operator: torch._ops.OpOverload) -> str:
    """ "aten::add.Tensor"; the default overload has no suffix."""
    return operator._schema.name + (f".{operator._schema.overload_name}" if operator._schema.overload_name else "")


def is_view(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator only looks at its argument's memory, or marks a place for the profiler, and starts no kernel."""
    return operator.is_view or operator._schema.name == "aten::_unsafe_view" or operator.namespace == "profiler"


def classify(operator: torch._ops.OpOverload) -> str:
    """How an NPU takes an operator: "native", "ai_cpu", "composite", "cpu_fallback", or "unknown" to table and dispatcher."""
    name = name_of(operator)
    if name in AI_CPU:
        return "ai_cpu"
    if name.startswith(ATTENTION_PARTS) or operator.namespace == "profiler":
        return "native"
    kind = kind_of(name)
    if kind == "cpu_fallback" and HAS_KERNEL(name, "CompositeExplicitAutogradNonFunctional"):
        # Such an operator is made of its own out= form, or of others, as diag_embed is: then nothing falls back.
        packet = getattr(torch.ops.aten, operator._schema.name.partition("::")[2])
        forms = (getattr(packet, overload) for overload in packet.overloads())
        outs = [name_of(form) for form in forms if any(argument.is_out for argument in form._schema.arguments)]
        kind = "cpu_fallback" if any(kind_of(out) == "cpu_fallback" for out in outs) else "native"
    return kind


def kind_of(name: str) -> str:
    """What is registered for an operator itself, without a look at what it is made of."""
    if "torch_npu" in sys.modules:  # the version that runs knows better than the table of another
        if HAS_KERNEL(name, "PrivateUse1"):
            return "native"
        composite = any(HAS_KERNEL(name, key) for key in ("CompositeImplicitAutograd", "CompositeExplicitAutograd"))
        return "composite" if composite else "cpu_fallback"
    kind = table().get(name, "unknown").partition("_")[0]
    return {"cpu": "cpu_fallback", "unregistered": "unknown"}.get(kind, kind)
