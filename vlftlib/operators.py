"""What a callable asks of the device: how many operators, and which of them an Ascend NPU has no kernel for.

Both look at the operators as torch dispatches them, below autograd, so they work on any machine and any device and see the
backward too. The check of a model's parts against the CPU is in `operator_check`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from vlftlib.ascend.kernels import classify, intercepts, is_view, name_of


class OperatorCensus(TorchDispatchMode):
    """Counts the operators called inside a `with` block, views left out."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.last = None  # what ran when an exception came

    @property
    def total(self) -> int:
        """All calls: on an accelerator about the number of kernels launched."""
        return self.calls.total()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if not is_view(operator):
            self.last = name_of(operator)
            self.calls[self.last] += 1
        return operator(*args, **(kwargs or {}))


def operator_census(fn: Callable[[], object]) -> OperatorCensus:
    """Count the operators that a callable dispatches, in forward and backward.

    Args:
        fn: called once, without arguments.

    Returns:
        `.calls` by operator with overload ("aten::add.Tensor"), and `.total`.
    """
    with OperatorCensus() as census:
        fn()
    return census


@dataclass(frozen=True)
class Fallback:
    """One operator that an NPU would not run as it is.

    kind is "cpu_fallback" (no kernel: copied to the host and back), "ai_cpu" (run by the chip's few ARM cores), "float64"
    (the result's dtype, which an NPU silently turns into float32) or "unknown" (not in the table).
    """

    operator: str
    module: str
    kind: str
    calls: int

    def __str__(self) -> str:
        return f"{self.operator} in {self.module}: {self.kind}, {self.calls} calls"


class FallbackFinder(TorchDispatchMode):
    """Collects, inside a `with` block, the operators with no NPU kernel and the float64 results, by calling module."""

    def __init__(self, modules: ModuleTracker, whole: "WholeOnNpu"):
        super().__init__()
        self.modules, self.whole = modules, whole
        self.found = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kind = classify(operator)
        if kind == "composite" and not is_view(operator) and not self.whole.depth:
            # torch takes it apart on the NPU as well, so its parts are what counts.
            with self:
                parts = take_apart(operator, args, kwargs or {})
            if parts is not NotImplemented:
                return parts
        result = operator(*args, **(kwargs or {}))
        if not self.whole.depth:
            if kind in ("cpu_fallback", "ai_cpu", "unknown"):
                self.count(operator, kind)
            wide = (torch.float64, torch.complex128)
            if not is_view(operator) and any(isinstance(x, torch.Tensor) and x.dtype in wide for x in tree_leaves(result)):
                self.count(operator, "float64")
        return result

    def count(self, operator, kind: str) -> None:
        # The modules being run are nested, so the longest name is the innermost one.
        self.found[name_of(operator), max(self.modules.parents, key=len), kind] += 1

    def fallbacks(self) -> tuple[Fallback, ...]:
        return tuple(Fallback(*key, calls) for key, calls in self.found.most_common())


def take_apart(operator, args: tuple, kwargs: dict):
    """Run a composite operator's own kernel, whose parts are dispatched in turn; NotImplemented where torch has none."""
    for key in (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.CompositeExplicitAutograd):
        if operator.has_kernel_for_dispatch_key(key):
            return operator._op_dk(key, *args, **kwargs)
    return NotImplemented


class WholeOnNpu(TorchFunctionMode):
    """Knows when a function runs that torch_npu computes whole (torch.inverse, ...): its parts on the CPU say nothing."""

    def __init__(self):
        super().__init__()
        self.depth = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        inside = getattr(function, "__name__", "") in intercepts()
        self.depth += inside
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.depth -= inside


def ascend_fallbacks(fn: Callable[[], object]) -> tuple[Fallback, ...]:
    """Which operators of a callable would fall back to the CPU on an Ascend NPU, found on any machine.

    Everything that the callable runs is taken to run on the NPU: give it a training step, not the loading of data.

    Args:
        fn: called once, without arguments; forward and backward count alike.

    Returns:
        The operators, most called first; empty where an NPU has a kernel for each. Modules are named from the outermost one
        that was called ("Qwen2_5_VLForConditionalGeneration.model.visual..."), "Global" outside all.
    """
    with ModuleTracker() as modules, WholeOnNpu() as whole, FallbackFinder(modules, whole) as finder:
        fn()
    return finder.fallbacks()
