"""What is seen of a run while it runs: history, progress bar, faults, jumps and leaks."""

import itertools
import math
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence

import psutil
import torch
from accelerate.utils import gather_object
from tqdm.auto import tqdm
from transformers import TrainerCallback

from vlftlib.runs import SKIPPED

WINDOW = 20  # steps that a jump is judged against
MAX_SKIPS = 8  # a loss scale that is halved so often in a row finds nothing to scale
# What can grow: its name, the slope's unit, how many of the entry's own units that is, and what is known to help.
LEAKS = {
    "memory_bytes": (
        "memory",
        "MB",
        1e6,
        "pictures of ever new sizes (set max_pixels or a fixed_grid), tensors that a callback keeps (detach them, or keep numbers), "
        "a fragmented allocator (expandable_segments:True in PYTORCH_NPU_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF); until it is "
        "found, checkpoints and --resume bound the loss",
    ),
    "step_time_s": (
        "step time",
        "ms",
        1e-3,
        "waiting for data (data_wait_s in the record: more workers, a faster disk), ever new shapes (a fixed_grid), memory near "
        "its limit, a chip that slows down when hot (npu-smi info, nvidia-smi)",
    ),
}


class NonFinite(ArithmeticError):
    """A loss or gradient that is not a number or infinite; the message names step, rows and tensor."""


def sum_over_processes(*numbers: int, device: torch.device) -> list[int]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return list(numbers)
    total = torch.tensor(numbers, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


def in_any_process(fault: str | None, device: torch.device) -> str | None:
    """The fault of the first process that has one, in all of them: they stop or go on together."""
    if not sum_over_processes(fault is not None, device=device)[0]:
        return None
    return next(each for each in gather_object([fault]) if each)


def _was_skipped(entry: Mapping[str, object]) -> bool:
    return str(entry.get("event")).startswith(SKIPPED)


class Watch(TrainerCallback):
    """Keeps the history, one entry an optimizer step, shows it in a progress bar, and notes what is odd.

    An entry has step, stage (from 1), loss, grad_norm (before clipping), learning_rate, step_time_s (from the end of one step to
    the end of the next, checkpoints and evaluations left out), data_wait_s, images and tokens (of all processes) and
    memory_bytes; in fp16 also loss_scale, after the step; and where there is one the event ("loss jump", "gradient spike",
    "skipped: ...") with its rows: the places, from 0, of the batch's examples among those that are trained on.
    """

    def __init__(self, device: torch.device):
        self.device, self.history, self.evaluations, self.bar, self.step = device, [], [], None, 0
        self.stage, self.images = 1, 0
        self.tokens: list[torch.Tensor] = []
        self.rows: list[int] = []
        self.event: str | None = None
        self.loss_scale: float | None = None
        self.leak_at = 0
        self.reached: set[str] = set()

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step
        self.bar = tqdm(
            total=state.max_steps, initial=self.step, desc="training", unit="step", disable=not state.is_world_process_zero
        )
        self.mark = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        self.waited = time.perf_counter() - self.mark

    def count(self, inputs: Mapping[str, torch.Tensor], rows: Sequence[int]) -> None:
        """One micro-batch that is about to be trained on."""
        self.images += len(inputs.get("image_grid_thw", ()))
        self.tokens.append(inputs["attention_mask"].sum())  # read when the step is done, not to wait for the device here
        self.rows += rows

    def check_reached(self, model: torch.nn.Module) -> None:
        """After a backward that pictures took part in: whether it reached all that trains. Done once in each stage.

        Raises:
            RuntimeError: a trainable tensor has no gradient; it would stay as it is without a word.
        """
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if trained.keys() <= self.reached:
            return
        missed = [name for name, parameter in trained.items() if parameter.grad is None]
        if missed:
            listed = ", ".join(missed[:3]) + (f" and {len(missed) - 3} more" if len(missed) > 3 else "")
            raise RuntimeError(
                f"step {self.step + 1}: no gradient for {listed}, of {len(trained)} tensors that train, in a backward with "
                "pictures: they lie in no path to the loss, or something in it is detached (reentrant checkpointing, no_grad)"
            )
        self.reached = set(trained)

    def fault(self, losses: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> str | None:
        """What isn't finite among an optimizer step's losses and its gradients before clipping; None where all is."""
        norms = torch._foreach_norm(list(gradients.values())) if gradients else ()
        norms = torch.stack([*norms, losses.float().norm()])
        if torch.isfinite(norms.sum()):  # one wait for the device
            return None
        names = [name for name, norm in zip(gradients, norms) if not torch.isfinite(norm)]
        place = f"in the gradient of {names[0]} and {len(names) - 1} more" if names else "in the loss"
        shown = [round(loss, 4) for loss in losses.tolist()]
        return f"step {self.step + 1}: not finite {place}; losses {shown}, rows {sorted(self.rows)}"

    def skipped(self, reason: str) -> None:
        """An optimizer step that changed nothing: a loss scale's overflow, or a step left out on request.

        Raises:
            NonFinite: it is the eighth in a row.
        """
        self.event = f"{SKIPPED}: {reason}"
        skips = 1 + len(list(itertools.takewhile(_was_skipped, reversed(self.history))))
        if skips >= MAX_SKIPS:
            rows = sorted(gather_object(self.rows))
            raise NonFinite(f"step {self.step + 1}: {skips} skipped steps in a row; the last: {reason}, rows {rows}")

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        if optimizer.scaler is None:  # accelerate's optimizer: nothing is scaled outside fp16
            return
        self.loss_scale = optimizer.scaler.get_scale()
        if optimizer.step_was_skipped and self.event is None:  # or the step was left out for another reason
            self.skipped(f"overflow in fp16, the loss scale is now {self.loss_scale:g}")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" not in logs:  # the summary after the last step
            return
        now = time.perf_counter()  # the loss has been read: the device is done with the step
        images, tokens = sum_over_processes(self.images, int(sum(self.tokens)), device=args.device)
        entry = dict(
            step=state.global_step,
            stage=self.stage,
            loss=logs["loss"],
            grad_norm=logs["grad_norm"],
            learning_rate=logs["learning_rate"],
            step_time_s=now - self.mark,
            data_wait_s=self.waited,
            images=images,
            tokens=tokens,
            memory_bytes=self.memory(),
        )
        if self.loss_scale is not None:
            entry["loss_scale"] = self.loss_scale
        self.event = self.event or self.jump(entry)
        if self.event:  # in every process: loss and gradient norm are the same there
            entry |= dict(event=self.event, rows=sorted(gather_object(self.rows)))
        # JSON has no infinity: a skipped step's gradient norm is kept as text.
        self.history.append({k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()})
        self.images, self.tokens, self.rows, self.event = 0, [], [], None
        self.mark, self.step = now, state.global_step
        self.bar.set_postfix(
            loss=f"{entry['loss']:.3f}",
            grad_norm=f"{entry['grad_norm']:.2f}",
            images=f"{entry['images'] / entry['step_time_s']:.1f}/s",
            memory=f"{entry['memory_bytes'] / 2**30:.2f}G",
            refresh=False,
        )
        self.bar.update()
        self.look_for_leak()

    def memory(self) -> int:
        """Bytes in use now: by the accelerator's tensors, or by this process."""
        if self.device.type == "cpu":
            return psutil.Process().memory_info().rss
        return torch.accelerator.memory_allocated(self.device)

    def jump(self, entry: Mapping[str, float]) -> str | None:
        """Whether loss or gradient norm stands out of the stage's last ones: above twice their median and six deviations."""
        for key, name in (("loss", "loss jump"), ("grad_norm", "gradient spike")):
            alike = [past for past in self.history[-3 * WINDOW :] if past["stage"] == entry["stage"] and not _was_skipped(past)]
            recent = [past[key] for past in alike[-WINDOW:]]
            if len(recent) < WINDOW:
                continue
            median = statistics.median(recent)
            deviation = 1.4826 * statistics.median(abs(value - median) for value in recent)  # as a normal's sigma
            if entry[key] > max(2 * median, median + 6 * deviation):
                return name
        return None

    def look_for_leak(self) -> None:
        """Warn, once every 100 steps, of memory or step time that grows steadily over the last 200."""
        if self.step < max(200, self.leak_at):
            return
        for key, (name, unit, scale, cures) in LEAKS.items():
            values = [entry[key] for entry in self.history[-200:]]
            quarters = [statistics.median(values[i : i + 50]) for i in range(0, 200, 50)]
            if len(values) == 200 and all(b > 1.02 * a for a, b in zip(quarters, quarters[1:])):
                growth, slope = quarters[-1] / quarters[0] - 1, (quarters[-1] - quarters[0]) / 150  # between the quarters' middles
                warnings.warn(
                    f"{name} grew steadily by {growth:.0%} over the last 200 steps, {slope / scale:.3g} {unit} a step: {cures}",
                    stacklevel=2,
                )
                self.leak_at = self.step + 100

    def pause(self) -> None:
        """What has been done since the last step was no part of the next."""
        self.mark = time.perf_counter()

    def on_save(self, args, state, control, **kwargs):
        self.pause()

    def summary(self) -> dict[str, float]:
        """Medians over the steps after the first three, which warm caches up."""
        steps = self.history[3:] or self.history
        time_s = sum(entry["step_time_s"] for entry in steps)
        return dict(
            step_time_s=statistics.median(entry["step_time_s"] for entry in steps),
            train_images_per_second=sum(entry["images"] for entry in steps) / time_s,
            data_wait_share=sum(entry["data_wait_s"] for entry in steps) / time_s,
        )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
