"""Which precision to train in on this device: the same steps from one start in each, compared with float32.

Dropout is off, since its masks would hang on the precision. Adapters, order of the data and rates are the same; what differs is
the forward's precision, with fp16's loss scaling, and the dtype of the frozen weights. The runs follow one another, so on a
noisy machine times say less than drifts.
"""

import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vlftlib.adapters import adapter_parameters, apply_recipe
from vlftlib.benchmark import save_benchmark
from vlftlib.devices import PlatformPolicy, platform_policy
from vlftlib.forms import Example
from vlftlib.operator_check import available_precisions
from vlftlib.recipes import Recipe, get_recipe
from vlftlib.runs import COMPLETED, SKIPPED, load_run
from vlftlib.trainer import TrainConfig, train
from vlftlib.watch import NonFinite

MAX_DRIFT = 0.05  # of a step's loss, relative to the mean loss: far above rounding, well below a run that goes another way
MAX_SKIPPED = 0.25  # share of steps; the first few that find fp16's scale are no fault
FASTER = 0.95  # of float32's time a step, or float32 is as good


@dataclass(frozen=True)
class PrecisionBenchmark:
    """One row a precision, and which to take; `print` it.

    A row has precision, outcome, losses, loss_drift (the largest difference of a step's loss from float32's, relative to the
    mean loss), weight_drift (the distance of the adapters from float32's, relative to how far those moved), skipped steps,
    last_loss_scale, step_time_s (median; none in the rehearsal) and peak_memory_bytes.
    """

    device: str
    rows: tuple[dict, ...]
    recommended: str
    reason: str
    path: Path

    def __str__(self) -> str:
        lines = [f"{'':8}  {'loss drift':>10}  {'weight drift':>12}  {'skipped':>7}  {'s/step':>7}  {'peak MB':>8}  outcome"]
        for row in self.rows:
            drifts = [f"{row[name]:.1e}" if row[name] is not None else "-" for name in ("loss_drift", "weight_drift")]
            time_said = f"{row['step_time_s']:.3f}" if "step_time_s" in row else "-"
            memory = f"{row['peak_memory_bytes'] / 2**20:,.0f}" if row["peak_memory_bytes"] else "-"
            lines.append(
                f"{row['precision']:8}  {drifts[0]:>10}  {drifts[1]:>12}  {row['skipped']:>7}  {time_said:>7}  {memory:>8}  "
                f"{row['outcome']}"
            )
        return "\n".join([*lines, f"recommended on {self.device}: {self.recommended}, {self.reason}", f"record: {self.path}"])


def measure_precision(
    load: Callable[[PlatformPolicy], torch.nn.Module],
    processor,
    recipe: Recipe,
    examples: Sequence[Example],
    *,
    device: torch.device,
    output: str | os.PathLike,
    steps: int = 30,
    seed: int = 0,
) -> PrecisionBenchmark:
    """Train the same steps in float32, bf16 and fp16, as far as the device has them, and write OUTPUT/precision.json.

    Args:
        load: gives the base anew for a policy, on its device, in its dtype.
        processor: from `load_processor`.
        recipe: from `get_recipe`; its precision and dropout are replaced.
        examples: to train on.
        device: where.
        output: a folder.
        steps: optimizer steps in each precision.
        seed: of adapters and order.
    """
    changes = {name: 0.0 for name in ("dropout", "block_dropout") if any(getattr(part, name, 0) for part in recipe.adapters)}
    config = TrainConfig(max_steps=steps, seed=seed, save_steps=steps + 1)
    rows, start, reference = [], None, None
    for precision in available_precisions(device):
        own = get_recipe(recipe.name, **{**recipe.overrides, **changes, "precision": precision})
        if start is None:
            start = _weights(apply_recipe(load(platform_policy(device, precision)), own, seed=seed))
        model = load(platform_policy(device, precision))
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.suppress(NonFinite):  # the record says so
                train(model, processor, own, examples, folder, config=config)
            run = load_run(folder)
        losses, weights = [entry["loss"] for entry in run.history], _weights(model)
        reference = reference or (losses, weights)
        whole = run.outcome == COMPLETED and all(isinstance(loss, float) for loss in losses)
        row = dict(
            precision=precision,
            outcome=run.outcome,
            losses=losses,
            loss_drift=_loss_drift(losses, reference[0]) if whole else None,
            weight_drift=_distance(weights, reference[1]) / _distance(reference[1], start) if whole else None,
            skipped=sum(str(entry.get("event")).startswith(SKIPPED) for entry in run.history),
            last_loss_scale=run.history[-1].get("loss_scale") if run.history else None,
            peak_memory_bytes=run.measured.get("peak_memory_bytes"),
        )
        times = [entry["step_time_s"] for entry in run.history[3:] or run.history if "step_time_s" in entry]
        rows.append(row | (dict(step_time_s=statistics.median(times)) if times else {}))
    recommended, reason = recommend(rows)
    settings = dict(recipe=recipe.name, steps=steps, seed=seed, batch_size=recipe.batch_size, recommended=recommended, reason=reason)
    path = save_benchmark("precision", settings, rows, output, device)
    environment = run.setup["environment"]
    return PrecisionBenchmark(f"{environment['device']}, {environment['device_name']}", tuple(rows), recommended, reason, path)


def recommend(rows: Sequence[dict]) -> tuple[str, str]:
    """The precision to train in, and why: the fastest that ends, skips few steps and stays near float32; see the limits above."""
    full = next(row for row in rows if row["precision"] == "float32")
    refused, fitting = [], []
    for row in rows:
        if row is full:
            continue
        if row["loss_drift"] is None:
            refused.append(f"{row['precision']} {row['outcome'].partition(' ')[0]}")
        elif row["skipped"] > MAX_SKIPPED * len(row["losses"]):
            refused.append(f"{row['precision']} skipped {row['skipped']} of {len(row['losses'])} steps")
        elif row["loss_drift"] > MAX_DRIFT:
            refused.append(f"{row['precision']} drifts by {row['loss_drift']:.0%} of the loss")
        else:
            fitting.append(row)
    because = f"; {', '.join(refused)}" if refused else ""
    if not fitting:
        return "float32", f"nothing else stays near it{because}"
    if "step_time_s" not in full:  # the rehearsal
        nearest = min(fitting, key=lambda row: row["loss_drift"])
        return nearest["precision"], f"of the shorter ones it stays nearest to float32; what is fastest the chip must say{because}"
    fastest = min(fitting, key=lambda row: row["step_time_s"])
    ratio = fastest["step_time_s"] / full["step_time_s"]
    if ratio > FASTER:
        return "float32", f"{fastest['precision']}, the fastest of the others, takes {ratio:.2f} of its time a step{because}"
    return fastest["precision"], f"it takes {ratio:.2f} of float32's time a step and stays within {MAX_DRIFT:.0%} of its losses{because}"


def _weights(model: torch.nn.Module) -> torch.Tensor:
    """All trained values in one vector, in float64 on the CPU."""
    return torch.cat([item.parameter.detach().cpu().double().flatten() for item in adapter_parameters(model)])


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return torch.linalg.vector_norm(first - second).item()


def _loss_drift(losses: Sequence[float], reference: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, reference, strict=True)) / statistics.mean(reference)
