"""What a run will need of a device's memory, before it runs: bytes by part, the largest batch that fits, what to change.

Nothing is loaded. Weights, adapters and optimizer follow from shapes; activations are counted by `memory.StepCounter`, which
runs the real modules without values. Assumed: AdamW with two float32 moments, gradients kept between micro-batches, one
process. The allowance is the one guess, and is a part of its own.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Qwen2_5_VLConfig

from vlftlib.adapters import apply_recipe
from vlftlib.memory import Batch, StepCounter, checkpoint_blocks, imitate_quantization, quantized_modules
from vlftlib.models import empty_model, full_size_config
from vlftlib.oft import OFTLinear
from vlftlib.recipes import Recipe

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BITS = {None: None, "8bit": 8, "4bit": 4}
ATTENTION = ("sdpa", "eager", "flash_attention_2")
CONTEXT_BYTES = 600 * 2**20  # the driver's context, loaded kernels, matmul workspace: 0.4 to 0.8 GiB on CUDA
FRAGMENTATION = 0.05  # of what comes and goes in a step, lost between the allocator's blocks
MAX_BATCH = 512
GIB = 2**30


@dataclass(frozen=True)
class MemoryPlan:
    """A run's memory at its peak; `print` it for a table.

    Args:
        title: the run in words.
        parts: bytes by part, all alive at the peak.
        device_bytes: what the device has, None where none was named.
        largest_batch: examples a micro-batch that fit with all else as it is, 0 for none; None without a device.
        advice: where it doesn't fit: changes in the order in which to make them, each with the bytes that it saves after
            those before it; they end as soon as the run fits.
    """

    title: str
    parts: Mapping[str, int]
    device_bytes: int | None = None
    largest_batch: int | None = None
    advice: tuple[tuple[str, int], ...] = ()

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        """Whether the device has as much; None without a device."""
        return None if self.device_bytes is None else self.total <= self.device_bytes

    def __str__(self) -> str:
        lines = [self.title] + [_row(name, size) for name, size in self.parts.items() if size]
        lines.append(_row("peak", self.total))
        if self.device_bytes is None:
            return "\n".join(lines)
        lines.append(_row("device", self.device_bytes))
        most = f"{MAX_BATCH} or more" if self.largest_batch == MAX_BATCH else self.largest_batch or "none"
        lines.append(f"{'fits' if self.fits else 'does not fit'}; largest batch as it is: {most}")
        left = self.total
        for change, saved in self.advice:
            left -= saved
            lines.append(f"{_row(f'then {change}', -saved)}, leaves {left / GIB:.2f}")
        if self.advice and left > self.device_bytes:
            lines.append("even so it does not fit: a smaller model or a larger device is needed")
        return "\n".join(lines)


def _row(name: str, size: int) -> str:
    return f"  {name:<58}{size / GIB:8.2f} GiB"


@dataclass(frozen=True)
class _Run:
    """What is planned: `plan_memory`'s arguments."""

    config: Qwen2_5_VLConfig
    recipe: Recipe | None
    batch_size: int
    max_pixels: int
    pictures: int
    text_tokens: int
    precision: str
    weights: str | None
    gradient_checkpointing: bool
    attention: str
    all_logits: bool

    @property
    def image_tokens(self) -> int:
        """Tokens of one picture at the pixel limit."""
        vision = self.config.vision_config
        return self.max_pixels // (vision.patch_size * vision.spatial_merge_size) ** 2


def plan_memory(
    model: str | Qwen2_5_VLConfig,
    recipe: Recipe | None,
    *,
    batch_size: int | None = None,
    max_pixels: int = 448 * 448,
    pictures: int = 1,
    text_tokens: int = 64,
    precision: str = "bf16",
    weights: str | None = None,
    gradient_checkpointing: bool = False,
    attention: str = "sdpa",
    all_logits: bool = False,
    device_bytes: int | None = None,
) -> MemoryPlan:
    """Plan the memory of a training run.

    Args:
        model: "3B", "7B" or the configuration of another Qwen2.5-VL.
        recipe: from `get_recipe`; all its adapters train, as in its last stage. None is a forward without training.
        batch_size: examples a micro-batch; None takes the recipe's.
        max_pixels: of a picture; each is taken to reach this.
        pictures: of an example.
        text_tokens: of an example beside its pictures', question and answer, padding included.
        precision: "float32", "bf16" or "fp16" of the forward and of what isn't quantised.
        weights: "4bit" (NF4, blocks of 64) or "8bit" (LLM.int8) by bitsandbytes, which leave embeddings, head, norms, biases
            and the patch embedding as they are; None quantises nothing.
        gradient_checkpointing: recompute both towers' blocks in the backward.
        attention: "sdpa", "eager" or "flash_attention_2", the last counted as sdpa without a mask.
        all_logits: of every token, as other trainers compute them; ours computes those of the text, where the labels are.
        device_bytes: the device's memory in bytes.

    Returns:
        The plan.

    Raises:
        ValueError: a value out of range, or a recipe that doesn't fit the model (as `apply_recipe`).
    """
    words = dict(precision=(precision, DTYPES), weights=(weights, BITS), attention=(attention, ATTENTION))
    for name, (value, valid) in words.items():
        if value not in valid:
            raise ValueError(f"{name} {value!r}: must be one of {', '.join(map(str, valid))}")
    size = "" if isinstance(model, Qwen2_5_VLConfig) else f"{model}, "
    config = copy.deepcopy(model) if isinstance(model, Qwen2_5_VLConfig) else full_size_config(model)
    if batch_size is None:
        batch_size = recipe.batch_size if recipe else 1
    numbers = dict(batch_size=batch_size, pictures=pictures, text_tokens=text_tokens, device_bytes=device_bytes)
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: must be at least 1")
    shape = dict(batch_size=batch_size, max_pixels=max_pixels, pictures=pictures, text_tokens=text_tokens)
    way = dict(precision=precision, weights=weights, gradient_checkpointing=gradient_checkpointing, attention=attention)
    run = _Run(config, recipe, **shape, **way, all_logits=all_logits)
    if run.image_tokens < 1:
        side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
        raise ValueError(f"max_pixels {max_pixels} is below one token's {side} x {side} = {side**2} pixels")
    title = (
        f"{size}{recipe.name if recipe else 'no adapters'}: batch {batch_size}, each {pictures} x {run.image_tokens} image and "
        f"{text_tokens} text tokens, {weights + ' weights, ' if weights else ''}{precision}, {attention}, "
        f"{'with' if gradient_checkpointing else 'without'} checkpointing"
    )
    parts = _parts_by_batch(run)
    plan = MemoryPlan(title, parts(batch_size), device_bytes)
    if device_bytes is None:
        return plan
    largest = _largest_batch(parts, device_bytes, batch_size)
    return dataclasses.replace(plan, largest_batch=largest, advice=() if plan.fits else _advise(run, device_bytes))


def _parts_by_batch(run: _Run) -> Callable[[int], dict[str, int]]:
    """The parts as a function of the batch size; the model is built once."""
    dtype, bits = DTYPES[run.precision], BITS[run.weights]
    model = empty_model(run.config).to(dtype)
    model.set_attn_implementation("eager" if run.attention == "eager" else "sdpa")
    fixed = weight_bytes(model, bits)
    model.requires_grad_(False)
    if bits:
        imitate_quantization(model, bits)
    if run.recipe:
        apply_recipe(model, run.recipe)
    if bits == 8:
        for module in model.modules():
            if isinstance(module, OFTLinear):
                module.quantization = "8-bit"  # takes the input side, whatever the batch
    if run.gradient_checkpointing:
        checkpoint_blocks(model)
    trained = 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    fixed |= {"adapters, float32": trained, "their gradients": trained, "optimizer (AdamW, two moments)": 2 * trained}
    counter = StepCounter(model, dtype)
    known: dict[int, dict[str, int]] = {}

    def parts(batch_size: int) -> dict[str, int]:
        if batch_size not in known:
            known[batch_size] = fixed | _step_bytes(run, counter, batch_size)
        return known[batch_size]

    return parts


def weight_bytes(model: nn.Module, bits: int | None) -> dict[str, int]:
    """Bytes of a model's weights without adapters: those quantised, with their scales, and those kept.

    Args:
        model: on any device, the meta one too; not quantised yet.
        bits: 4 (half a byte and a float32 for every 64), 8 (a byte and a float32 for every output) or None.
    """
    quantized = {id(module.weight): module.weight for module in quantized_modules(model).values()} if bits else {}
    if bits == 4:
        packed = sum(math.ceil(weight.numel() / 2) + 4 * math.ceil(weight.numel() / 64) for weight in quantized.values())
    else:
        packed = sum(weight.numel() + 4 * weight.shape[0] for weight in quantized.values())
    kept = [parameter for parameter in model.parameters() if id(parameter) not in quantized]
    kept_bytes = sum(parameter.numel() * parameter.element_size() for parameter in kept)
    name = "weights not quantised (embeddings, head, norms, biases)" if bits else "weights"
    return {f"weights in {bits} bits": packed, name: kept_bytes} if bits else {name: kept_bytes}


def _step_bytes(run: _Run, counter: StepCounter, batch_size: int) -> dict[str, int]:
    """What comes and goes in a step, at its peak: that of the head, or of a block on top of what the blocks before it keep."""
    vision, text = run.config.vision_config, run.config.text_config
    patches = run.image_tokens * vision.spatial_merge_size**2
    tokens = run.pictures * run.image_tokens + run.text_tokens
    padded = batch_size > 1 and run.attention == "sdpa"
    # Only text is answered, and in a batch of many the answers don't all stand at the same places: logits for all of it.
    labelled = tokens if run.all_logits else run.text_tokens
    costs = counter.count(Batch(batch_size, batch_size * run.pictures, patches, tokens, padded, labelled))
    *blocks, head = costs.items()
    before, peak = 0, 0
    for cost in costs.values():
        peak, before = max(peak, before + cost.peak), before + cost.kept
    kept = {part: sum(cost.kept for name, cost in blocks if name.startswith(part)) for part in ("vision", "merger", "text")}
    rotations = counter.rotation_bytes()
    kept = {part: size - rotations[part] for part, size in kept.items()}
    pixels = 4 * batch_size * run.pictures * patches * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    vision_tables = 2 * 4 * batch_size * run.pictures * patches * vision.hidden_size // vision.num_heads  # cosines and sines
    item = DTYPES[run.precision].itemsize
    text_tables = 2 * item * batch_size * tokens * text.hidden_size // text.num_attention_heads
    mask = batch_size * tokens**2 * (item if run.attention == "eager" else padded)
    parts = {
        "batch: pixels, positions, mask": pixels + vision_tables + text_tables + mask,
        "rotations": sum(rotations.values()),
        f"activations, {vision.depth} vision blocks": kept["vision"],
        "activations, merger": kept["merger"],
        f"activations, {text.num_hidden_layers} text layers": kept["text"],
        "logits and loss": head[1].peak,
        "recomputing or running one block, beyond the loss": peak - sum(cost.kept for _, cost in blocks) - head[1].peak,
    }
    comes_and_goes = sum(parts.values())
    allowance = CONTEXT_BYTES + int(FRAGMENTATION * comes_and_goes)
    return parts | {f"allowance: context 600 MiB, {FRAGMENTATION:.0%} fragmentation": allowance}


def _largest_batch(parts: Callable[[int], dict[str, int]], limit: int, known: int) -> int:
    """The largest batch within the limit, at most MAX_BATCH: guessed from the slope up to a known one, then step by step."""

    def total(size: int) -> int:
        return sum(parts(size).values())

    size = known
    for _ in range(2):  # not quite a line: a weight that is rotated in place of its input, a block that outgrows the loss
        far = size if size > 2 else 4
        slope = max((total(far) - total(2)) / (far - 2), 1)
        size = min(max(2 + int((limit - total(2)) / slope), 0), MAX_BATCH)
    while size and total(size) > limit:
        size -= 1
    while size < MAX_BATCH and total(size + 1) <= limit:
        size += 1
    return size


def _advise(run: _Run, limit: int) -> tuple[tuple[str, int], ...]:
    """Changes one after the other until the run fits: first those that leave the result, then those that don't."""
    parts = _parts_by_batch(run)
    total, advice = sum(parts(run.batch_size).values()), []

    def change(words: str, **values) -> None:
        nonlocal run, parts, total
        run = dataclasses.replace(run, **values)
        parts = parts if values.keys() == {"batch_size"} else _parts_by_batch(run)
        now = sum(parts(run.batch_size).values())
        advice.append((words, total - now))
        total = now

    if run.attention == "eager":
        change("sdpa in place of eager attention", attention="sdpa")
    if total > limit and not run.gradient_checkpointing:
        change("gradient checkpointing, both towers", gradient_checkpointing=True)
    if total > limit and run.batch_size > 1:
        size = max(_largest_batch(parts, limit, run.batch_size), 1)
        factor = f"{run.batch_size / size:g}"
        change(f"batch size {size} and {factor} times the accumulation", batch_size=size)
    if total > limit and run.precision == "float32":
        change("bf16 in place of float32", precision="bf16")
    if total > limit and run.weights != "4bit":
        change("4-bit weights", weights="4bit")
    while total > limit and run.image_tokens > 64:
        change(f"max_pixels {run.max_pixels // 2}", max_pixels=run.max_pixels // 2)
    return tuple(advice)
