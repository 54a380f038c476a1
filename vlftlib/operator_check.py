"""Run every part of a model forward and backward on a device against the CPU in float32, so that a bad operator has a name.

A full-size model is not run: one layer of each kind (window and full attention, with and without adapters) stands for all of
its kind, with the model's own weights and sizes, between the model's own ends. Inputs are what the layer before gives for a
random picture and text, so their shapes are true.
"""

import copy
import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from vlftlib.ascend.kernels import name_of
from vlftlib.devices import check_precision, first_line, get_device, is_rehearsal
from vlftlib.operators import OperatorCensus, ascend_fallbacks
from vlftlib.short_model import build_shell, capture, on_cpu_in_float32, random_inputs

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Largest difference over largest value, outputs and gradients. Rounding alone stays several times below; a wrong mask, a
# saturated or a misread value is far above.
TOLERANCES = {"float32": 1e-3, "bf16": 0.1, "fp16": 0.02}
TIMED_RUNS = 3
ATTENTIONS = ("sdpa", "flash_attention_2", "eager")  # a later one must be plainly faster to be recommended
FASTER = 0.9


@dataclass(frozen=True)
class OperatorResult:
    """One part of the model in one precision: `error` is relative, `operator` the one that failed where that is known."""

    part: str
    precision: str
    error: float | None
    seconds: float | None
    problem: str = ""
    operator: str = ""
    fallbacks: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problem


@dataclass(frozen=True)
class OperatorReport:
    """All parts' results on one device; `print` it."""

    device: str
    results: tuple[OperatorResult, ...]

    @property
    def failures(self) -> tuple[OperatorResult, ...]:
        return tuple(result for result in self.results if not result.passed)

    def as_dict(self) -> dict:
        return {"device": self.device, "results": [asdict(result) for result in self.results]}

    def __str__(self) -> str:
        width = max(len(result.part) for result in self.results)
        lines = [f"operators on {self.device}, against the CPU in float32"]
        for r in self.results:
            error = "-" if r.error is None else f"{r.error:.1e}"
            said = "" if r.seconds is None else f"{r.seconds * 1000:.1f} ms"
            verdict = "ok" if r.passed else f"FAILED: {r.problem}" + (f" (operator {r.operator})" if r.operator else "")
            fallbacks = f"  no NPU kernel: {', '.join(r.fallbacks)}" if r.fallbacks else ""
            lines.append(f"{r.part:<{width}}  {r.precision:<7}  {error:>7}  {said:>10}  {verdict}{fallbacks}")
        lines.append(f"{len(self.failures)} of {len(self.results)} failed")
        return "\n".join(lines)


@dataclass(frozen=True)
class AttentionReport:
    """How each attention implementation did on one device; `recommended` is the fastest that agrees with the CPU."""

    results: tuple[OperatorResult, ...]
    recommended: str | None

    def __str__(self) -> str:
        errors = ["-" if result.error is None else f"{result.error:.1e}" for result in self.results]
        rows = [f"{r.part:<18} {error:>8}  {r.problem or 'agrees'}" for r, error in zip(self.results, errors)]
        return "\n".join(rows + [f"recommended: {self.recommended or 'none, all fail'}"])


def check_operators(
    model: nn.Module, device: str | torch.device | None = None, precisions: Sequence[str] | None = None, seed: int = 0
) -> OperatorReport:
    """Compare every distinct part of a model, with its adapters, on a device with the CPU in float32.

    Args:
        model: a Qwen2.5-VL model, wherever it lies; it is copied, not changed.
        device: where to check; None takes `get_device`'s choice.
        precisions: of "float32", "bf16", "fp16"; None takes all that the device has.
        seed: of the weights' gradients and the inputs.

    Returns:
        For each part and precision the largest error of outputs and gradients, or what went wrong and in which operator.

    Raises:
        ValueError: a precision that doesn't exist, or that the device lacks.
    """
    device = get_device(device)
    results = []
    for precision in available_precisions(device) if precisions is None else precisions:
        if precision not in DTYPES:
            raise ValueError(f"precision {precision!r}: must be one of {', '.join(DTYPES)}")
        check_precision(device.type, precision)
        shell, names = build_shell(model, DTYPES[precision])
        inputs = random_inputs(shell.config, seed)
        for path, captured in capture(shell, names, inputs).items():
            results.append(check_part(shell.get_submodule(path), names[path], captured, device, precision, seed))
        results.append(check_part(shell, "whole model", ((), inputs), device, precision, seed))
    rehearsed = " (rehearsal)" if device.type == "npu" and is_rehearsal() else ""
    return OperatorReport(f"{device}{rehearsed}", tuple(results))


def compare_attention(
    model: nn.Module, device: str | torch.device | None = None, precision: str = "float32", seed: int = 0
) -> AttentionReport:
    """Try eager, SDPA and flash attention on padded batches with pictures, against eager attention on the CPU in float32.

    Args:
        model, device, seed: as in `check_operators`.
        precision: the one to train in.

    Returns:
        The results and the recommendation.
    """
    device = get_device(device)
    check_precision(device.type, precision)
    shell, _ = build_shell(model, DTYPES[precision])
    inputs, results = random_inputs(shell.config, seed), []
    reference = on_cpu_in_float32(shell)
    reference.set_attn_implementation("eager")
    expected = run(reference, ((), inputs), torch.device("cpu"), torch.float32, seed)
    for attention in ATTENTIONS:
        try:
            shell.set_attn_implementation(attention)
        except (ImportError, ValueError) as error:
            results.append(OperatorResult(attention, precision, None, None, f"not available: {first_line(error)}"))
            continue
        results.append(check_part(shell, attention, ((), inputs), device, precision, seed, expected))
    best = None
    for result in results:
        faster = best and result.seconds is not None and result.seconds < FASTER * best.seconds
        if result.passed and (best is None or faster):
            best = result
    return AttentionReport(tuple(results), best and best.part)


def choose_attention(model: nn.Module, attention: str, precision: str | None = None) -> str:
    """The implementation that a policy's `attention` stands for, set on the model: "auto" is `compare_attention`'s verdict.

    Args:
        model: on its device; its attention implementation is changed.
        attention: a policy's setting.
        precision: the one to train in; None takes that of the model's dtype.

    Returns:
        The name of the implementation.

    Raises:
        RuntimeError: none of them agrees with the CPU on this device.
    """
    if attention == "auto":
        precision = precision or next(name for name, dtype in DTYPES.items() if dtype == model.dtype)
        report = compare_attention(model, model.device, precision)
        if report.recommended is None:
            raise RuntimeError(f"no attention implementation agrees with the CPU on {model.device} in {precision}:\n{report}")
        attention = report.recommended
    model.set_attn_implementation(attention)
    return attention


def available_precisions(device: torch.device) -> list[str]:
    """What a device computes in; fp16 is left out on the CPU, where nothing trains in it."""
    available = []
    for precision in DTYPES:
        try:
            check_precision(device.type, precision)
        except ValueError:
            continue
        available.append(precision)
    return available


def check_part(
    module: nn.Module, name: str, arguments: tuple, device: torch.device, precision: str, seed: int, expected=None
) -> OperatorResult:
    """One part on the device against the same part, weights and inputs on the CPU in float32."""
    dtype = DTYPES[precision]
    arguments = tree_map(lambda x: rounded(x, dtype), arguments)
    if expected is None:
        expected = run(on_cpu_in_float32(module), arguments, torch.device("cpu"), torch.float32, seed)
    module, times = copy.deepcopy(module).to(device), []
    once = functools.partial(run, module, arguments, device, dtype, seed)
    try:
        with OperatorCensus() as census:
            got = once()
        fallbacks = ascend_fallbacks(once)
        for _ in range(0 if device.type == "npu" and is_rehearsal() else TIMED_RUNS):  # there a time says nothing
            began = time.perf_counter()
            once()  # its results are on the CPU, so the device is done
            times.append(time.perf_counter() - began)
    except Exception as error:  # whatever it is, it is the result
        return OperatorResult(name, precision, None, None, first_line(error), census.last or "")
    error, problem = compare(got, expected, TOLERANCES[precision])
    operator = ""
    if problem and error is None:
        with FirstNaN() as finder:
            once()
        operator = finder.operator
    missing = tuple(dict.fromkeys(found.operator for found in fallbacks if found.kind != "float64"))
    return OperatorResult(name, precision, error, min(times, default=None), problem, operator, missing)


class FirstNaN(TorchDispatchMode):
    """Finds the first operator with a NaN in its result; infinity alone is no fault of an operator, masks hold it."""

    def __init__(self):
        super().__init__()
        self.operator = ""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        floats = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        # Memory that is only reserved may hold anything.
        if not self.operator and "empty" not in operator._schema.name and any(leaf.isnan().any() for leaf in floats):
            self.operator = name_of(operator)
        return result


def rounded(value, dtype: torch.dtype):
    """A float tensor rounded to a dtype's values and kept in float32, so that both sides start from the same numbers."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype).float()


def run(module: nn.Module, arguments: tuple, device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Forward and backward as in training (autocast, float32 adapters): outputs and gradients by name, in float32 on the CPU."""
    module.zero_grad()
    args, kwargs = tree_map(lambda x: placed(x, device, dtype), arguments)
    for leaf in tree_leaves((args, kwargs.get("hidden_states"))):  # masks and positions are no one's to train
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaf.requires_grad_()
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        returned = module(*args, **kwargs)
    outputs = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    # Padded positions hold what no one reads, and may differ.
    mask = kwargs.get("attention_mask") if "input_ids" in kwargs else None
    if mask is not None:
        outputs = [out[mask.bool()] if out.shape[:2] == mask.shape else out for out in outputs]
    found = {f"output {i}": out.detach().float().cpu() for i, out in enumerate(outputs)}
    learning = [out for out in outputs if out.requires_grad]
    if learning:
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(out.shape, generator=generator).to(device, out.dtype) for out in learning]
        torch.autograd.backward(learning, weights)
    for i, leaf in enumerate(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.grad is not None):
        found[f"gradient of input {i}"] = leaf.grad.float().cpu()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.float().cpu()
    return found


def placed(value, device: torch.device, dtype: torch.dtype):
    """An argument on the device, a float tensor in the dtype."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype).detach().clone() if value.is_floating_point() else value.to(device)


def compare(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> tuple[float | None, str]:
    """The largest relative error and what is wrong, if anything."""
    worst, where = 0.0, ""
    for name, want in expected.items():
        if name not in got:
            return None, f"{name} is missing"
        if not got[name].isfinite().all():
            return None, f"{'NaN' if got[name].isnan().any() else 'infinity'} in {name}"
        difference, scale = (got[name] - want).abs().max().item(), want.abs().max().item()
        error = difference / scale if scale else difference
        if error >= worst:
            worst, where = error, name
    return worst, "" if worst <= tolerance else f"relative error {worst:.1e} in {where}, at most {tolerance:g} is right"
