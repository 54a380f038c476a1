"""Memory of a run: its peak as the device measured it, and the peak of one training step counted before any run.

The count runs the real modules with the real adapters, forward and backward, on fake tensors: shapes and storages without
values. Each kind of block runs once, so a step of the 7B model takes seconds and no memory.
"""

import contextlib
import functools
import resource
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlftlib.oft import OFTLinear

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement; on the CPU that needs Linux, elsewhere the peak stays that of the whole process."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")  # resets VmHWM, see proc_pid_clear_refs(5)


def peak_memory_bytes(device: torch.device) -> int:
    """The peak since the last reset: allocated tensors on an accelerator; on the CPU the process's resident set."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    if STATUS.exists():
        fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes but on macOS


def checkpoint_blocks(model: nn.Module) -> None:
    """Let both towers' blocks keep only their inputs and run again in the backward.

    transformers' own switch also makes both embeddings' outputs ask for a gradient, which sends a backward through all
    frozen blocks below the first adapter. Only reentrant checkpointing, which OFT refuses, needs that.
    """
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # its name since 5.24
    enable({"use_reentrant": False})
    model.disable_input_require_grads()


class LiveBytes(TorchDispatchMode):
    """Counts, inside a `with` block, the bytes of the storages that operators made there, as long as they live.

    Attributes:
        now: bytes alive.
        peak: the most that were.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = {}  # storages met so far; those from before count nothing

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0  # the Cayley map reads its norm, and a fake tensor has no value
        result = operator(*args, **(kwargs or {}))
        if operator.namespace == "prim":  # what a fake tensor is asked about itself
            return result
        for leaves, counted in ((tree_leaves((args, kwargs)), False), (tree_leaves(result), True)):
            for tensor in leaves:
                if isinstance(tensor, Tensor):
                    self._meet(tensor.untyped_storage(), counted)
        return result

    def _meet(self, storage: torch.UntypedStorage, counted: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counted else 0
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size


@dataclass(frozen=True)
class Batch:
    """A micro-batch: its examples, pictures in all, patches of one picture, tokens of one example, whether some are padding.

    `labelled` is the number of positions, the same in each example, whose logits are computed.
    """

    examples: int
    pictures: int
    patches: int
    tokens: int
    padded: bool
    labelled: int


@dataclass(frozen=True)
class Cost:
    """Bytes that a part keeps for its backward, and the most alive in its own forward and backward (input and output too)."""

    kept: int
    peak: int
    trained: bool  # whether a gradient leaves it for what comes before


class _QuantizedProduct(torch.autograd.Function):
    """What bitsandbytes' products hold: a dequantised weight while they compute; in 8 bits also their input (MatMul8bitLt)."""

    @staticmethod
    def forward(ctx, x, weight, bias, keep_input):
        ctx.weight, ctx.kept = weight, x if keep_input else None
        return nn.functional.linear(x, torch.empty_like(weight), bias)

    @staticmethod
    def backward(ctx, grad):
        return grad @ torch.empty_like(ctx.weight), None, None, None


def quantized_modules(model: nn.Module) -> dict[str, nn.Linear]:
    """What transformers and bitsandbytes quantise, in a model without adapters: both towers' linear layers, not the head."""
    return {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear) and path != "lm_head"}


def imitate_quantization(model: nn.Module, bits: int) -> None:
    """Let the layers that would be quantised hold in their forward and backward what bitsandbytes holds; before adapters."""
    for module in quantized_modules(model).values():
        module.forward = functools.partial(_quantized_forward, module, bits == 8)


def _quantized_forward(module: nn.Linear, keep_input: bool, x: Tensor) -> Tensor:
    return _QuantizedProduct.apply(x, module.weight, module.bias, keep_input)


class StepCounter:
    """Counts the bytes of training steps on a model without values.

    Fake tensors say that they are on the CPU: autocast and fused attention then act as they do on an accelerator, where the
    same tensors are kept. The model's own tensors are replaced and count nothing.

    Args:
        model: a Qwen2.5-VL on the meta device, in the run's dtypes, adapted, checkpointing switched on or off.
        dtype: of the forward; other than float32 it is autocast's.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.model, self.dtype = model.train(), dtype
        self.base_dtype = model.get_input_embeddings().weight.dtype
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.costs: dict[tuple, Cost] = {}
        made = {}  # tied and shared parameters stay one
        for module in model.modules():
            for name, tensor in module._parameters.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    parameter = nn.Parameter(self._tensor(*tensor.shape, dtype=tensor.dtype), tensor.requires_grad)
                    if parameter.requires_grad:  # it has a gradient already, from the micro-batch before
                        parameter.grad = self._tensor(*tensor.shape, dtype=tensor.dtype)
                    made[id(tensor)] = tensor, parameter
                module._parameters[name] = made[id(tensor)][1]

    def _tensor(self, *shape: int, dtype: torch.dtype, trained: bool = False) -> Tensor:
        # Not all of the forward under the mode: what it makes and torch or we cache would be fake for good.
        with self.fakes:
            return torch.empty(shape, dtype=dtype, device="cpu", requires_grad=trained)

    def count(self, batch: Batch) -> dict[str, Cost]:
        """The parts of a step in their order, each kind of block counted once.

        Args:
            batch: its shape.

        Returns:
            Costs by name: "vision block 0", ..., "merger", "text layer 0", ..., "head and loss".
        """
        visual, text = self.model.model.visual, self.model.model.language_model
        hidden, patches = visual.config.hidden_size, batch.pictures * batch.patches
        table = self._tensor(patches, hidden // visual.config.num_heads, dtype=torch.float32)
        costs, trained = {}, False
        for index, block in enumerate(visual.blocks):
            ends = self._chunks(batch, index in visual.fullatt_block_indexes)
            forward = functools.partial(block, cu_seqlens=ends, max_seqlen=batch.patches, position_embeddings=(table, table))
            cost = self._cost((block, len(ends)), forward, (patches, hidden), trained, batch)
            costs[f"vision block {index}"], trained = cost, cost.trained
        merge = functools.partial(self._merge, batch=batch)
        costs["merger"] = cost = self._cost((visual.merger,), merge, (patches, hidden), trained, batch)
        width, trained = text.config.hidden_size, cost.trained
        table = self._tensor(batch.examples, batch.tokens, width // text.config.num_attention_heads, dtype=self.base_dtype)
        options = dict(attention_mask=self._mask(batch), position_ids=None, position_embeddings=(table, table))
        shape = batch.examples, batch.tokens, width
        for index, layer in enumerate(text.layers):
            cost = self._cost((layer,), functools.partial(layer, **options), shape, trained, batch)
            costs[f"text layer {index}"], trained = cost, cost.trained
        head = functools.partial(self._head, batch=batch)
        costs["head and loss"] = self._cost((self.model.lm_head,), head, shape, trained, batch)
        return costs

    def rotation_bytes(self) -> dict[str, int]:
        """What the OFT maps keep, which `count` has in the parts: by "vision", "merger" and "text"."""
        kept = dict(vision=0, merger=0, text=0)
        for path, module in self.model.named_modules():
            if isinstance(module, OFTLinear):
                part = "merger" if ".merger." in path else "vision" if ".visual." in path else "text"
                kept[part] += self._cost((module,), module, (1, module.in_features), False, None).kept
        return kept

    def _chunks(self, batch: Batch, full: bool) -> Tensor:
        """Where the vision tower's attention is cut: pictures or windows, whose size the scores of eager attention depend on.

        What fused attention keeps is in proportion to the patches however they are cut, so they stay in one piece.
        """
        total, config = batch.pictures * batch.patches, self.model.model.visual.config
        size = batch.patches if full else min(batch.patches, (config.window_size // config.patch_size) ** 2)
        if config._attn_implementation != "eager":
            size = total
        return torch.tensor([*range(0, total, size), total], dtype=torch.int32)

    def _mask(self, batch: Batch) -> Tensor | None:
        """The text model's attention mask as transformers builds it."""
        shape = batch.examples, 1, batch.tokens, batch.tokens
        if self.model.config.text_config._attn_implementation == "eager":
            return self._tensor(*shape, dtype=self.base_dtype)
        return self._tensor(*shape, dtype=torch.bool) if batch.padded else None

    def _merge(self, x: Tensor, batch: Batch) -> Tensor:
        model, ids = self.model.model, self._tensor(batch.examples, batch.tokens, dtype=torch.int64)
        merged = model.visual.merger(x)
        merged = merged[self._tensor(len(merged), dtype=torch.int64)]
        return model.get_input_embeddings()(ids).masked_scatter((ids == 0).unsqueeze(-1), merged)

    def _head(self, x: Tensor, batch: Batch) -> Tensor:
        labels = self._tensor(batch.examples, batch.labelled, dtype=torch.int64)
        positions = self._tensor(batch.labelled, dtype=torch.int64)
        logits = self.model.lm_head(self.model.model.language_model.norm(x)[:, positions])
        loss = self.model.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=logits.shape[-1])
        outputs = logits.float()  # accelerate hands the logits out in float32
        del outputs
        return loss

    def _cost(self, part: tuple, forward: Callable[[Tensor], Tensor], shape: tuple, trained: bool, batch: Batch | None) -> Cost:
        module, *rest = part
        # Blocks that print the same have the same shapes and adapters.
        key = repr(module), *rest, trained, batch, any(parameter.requires_grad for parameter in module.parameters())
        if key not in self.costs:
            self.costs[key] = self._measure(forward, shape, trained)
        return self.costs[key]

    def _measure(self, forward: Callable[[Tensor], Tensor], shape: tuple, trained: bool) -> Cost:
        source = self._tensor(*shape, dtype=self.base_dtype, trained=trained)
        reduced = self.dtype != torch.float32
        with LiveBytes() as live:
            with torch.autocast("cpu", self.dtype) if reduced else contextlib.nullcontext():
                x = source * 1  # not a leaf: its bytes stay alive only if something keeps them
                y = forward(x)
                del x
            if not y.requires_grad:
                return Cost(0, live.peak, False)
            kept = live.now - y.untyped_storage().nbytes()
            loss = y if y.ndim == 0 else (y * 1).sum()
            del y
            loss.backward()
        return Cost(kept, live.peak, True)
