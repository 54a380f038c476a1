"""What OFT costs beside LoRA and PEFT's own OFT, HRA and PSOFT, at the widths of Qwen2.5-VL.

A step is one forward and backward of one linear layer whose input needs a gradient too. In bf16 the base weights and the
input are bf16 and the adapters float32 under autocast, as the Trainer runs them. Ours maps all layers of a tower in one
batch: each layer is charged its share.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import HRAConfig, LoraConfig, OFTConfig, PsoftConfig, inject_adapter_in_model
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from vlftlib.benchmark import interleave, save_benchmark, summary
from vlftlib.figures import overhead_figure, save_figure
from vlftlib.mapping import NormBound, batch_rotations, map_layers
from vlftlib.memory import LiveBytes
from vlftlib.oft import OFTLinear
from vlftlib.operators import operator_census
from vlftlib.orthogonal import cayley_iterations, unpack_skew
from vlftlib.rotating import rotated_weight
from vlftlib.tables import overhead_tables

# in and out features, and how many layers of that shape share one map
WIDTHS = {
    (1280, 3840): 32,  # vision attention, in
    (1280, 1280): 32,  # vision attention, out
    (3584, 3584): 28,  # text attention, query and output
    (3584, 512): 28,  # text attention, key and value
    (5120, 3584): 1,  # merger
}
TOKENS = 8192  # eight pictures of 448 x 448 in patches of 14 x 14
BLOCKS = (64, 256)
RANK, REFLECTIONS = 32, 16
TARGET = "0"  # the layer's name in the nn.Sequential around it


@dataclass(frozen=True)
class OFTBenchmark:
    """Rows of `measure_oft`; prints as a table."""

    layers: tuple[dict, ...]
    tower: tuple[dict, ...]
    merges: tuple[dict, ...]
    errors: tuple[dict, ...]
    path: Path

    def __str__(self) -> str:
        lines = ["% over the frozen layer", overhead_tables(self.layers), ""] if "overhead" in self.layers[0] else []
        lines += ["operators of a step of a 32-block vision tower"]
        lines += [f"{row['case']:32} {row['operators']:6,}" for row in self.tower]
        if "time_ratio" in self.merges[0]:
            lines += ["", "merge"] + [f"{row['case']:22} {row['time_ratio']:.3f} of PEFT's time" for row in self.merges]
        lines += ["", "max |R^T R - I| after 100 steps of Adam at 1e-2"]
        lines += [f"{row['case']:22} {row['error']:.1e}" for row in self.errors]
        return "\n".join([*lines, f"record: {self.path}"])


def measure_oft(*, device: torch.device, output: str | os.PathLike, repeats: int = 15, quick: bool = False) -> OFTBenchmark:
    """Measure every case at every width in float32 and bf16, and write OUTPUT/oft.json and OUTPUT/oft.png.

    Args:
        device: where.
        output: a folder.
        repeats: interleaved rounds.
        quick: widths and tokens divided by 16 and two rounds: to see that it runs.
    """
    shrink, repeats = (16, 2) if quick else (1, repeats)
    layers: list[dict] = []
    cases = list(itertools.product((torch.float32, torch.bfloat16), WIDTHS.items()))
    for dtype, ((in_features, out_features), sharing) in tqdm(cases, desc="widths", unit="width", mininterval=0):
        shape = in_features // shrink, out_features // shrink, TOKENS // shrink
        blocks = [block // shrink for block in BLOCKS]
        layers += measure_width(*shape, sharing, blocks, dtype, device, repeats)
    tower = count_tower(BLOCKS[0] // (4 if quick else 1), depth=2 if quick else 32)
    merges = measure_merges(3584 // shrink, BLOCKS[0] // shrink, device, repeats)
    errors = measure_errors(1280 // shrink, BLOCKS[0] // shrink, device)
    settings = dict(tokens=TOKENS // shrink, repeats=repeats, rank=RANK, reflections=REFLECTIONS, quick=quick)
    results = dict(layers=layers, tower=tower, merges=merges, errors=errors)
    path = save_benchmark("oft", settings, results, output, device)
    written = json.loads(path.read_text())["results"]  # from the rehearsal without times
    if "overhead" in written["layers"][0]:
        save_figure(overhead_figure(written["layers"]), "oft", output)
    return OFTBenchmark(*map(tuple, written.values()), path)


def measure_width(
    in_features: int,
    out_features: int,
    tokens: int,
    sharing: int,
    blocks: list[int],
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
) -> list[dict]:
    """One row a case: overhead over the frozen layer (median and least of the rounds), saved bytes, operators.

    "weight kept" is worked out, not run: what ours would cost if the micro-batches of a step shared one rotated weight.
    """
    torch.manual_seed(0)
    base = nn.Linear(in_features, out_features, device=device, dtype=dtype).requires_grad_(False)
    x = torch.randn(tokens, in_features, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(tokens, out_features, device=device, dtype=dtype)
    layers = {"frozen": base} | adapted_layers(base, blocks)
    maps = {f"map of {name}": _map_step(layer, sharing, dtype) for name, layer in layers.items() if isinstance(layer, OFTLinear)}
    for layer in layers.values():
        if isinstance(layer, OFTLinear):
            _open_slot(layer, dtype)
    steps = {name: _step(layer, x, grad) for name, layer in layers.items()}
    kept = f"ours {blocks[0]}"
    parts = maps | {"weight": lambda: rotated_weight(base.weight, None, dtype, None, layers[kept].slot.factors)}
    seconds = {name: summary(values) for name, values in interleave(steps | parts, repeats=repeats, device=device).items()}
    shape = dict(in_features=in_features, out_features=out_features, dtype=str(dtype).removeprefix("torch."))
    rows = []
    for name, layer in layers.items():
        cost = dict(seconds[name])
        if f"map of {name}" in maps:
            cost = {key: value + seconds[f"map of {name}"][key] / sharing for key, value in cost.items()}
        row = dict(case=name) | shape | dict(saved_bytes=_saved_bytes(layer, x), operators=operator_census(steps[name]).total)
        rows.append(row | cost)
        if name == kept and tokens > out_features:  # were the rotated weight kept, neither forward nor backward would make it
            cost = {key: value - 2 * seconds["weight"][key] for key, value in cost.items()}
            saved = row["saved_bytes"] + base.weight.nbytes
            rows.append(row | dict(case=f"{name}, weight kept", saved_bytes=saved) | cost)
    for row in rows:
        row["overhead"] = row["median_s"] / rows[0]["median_s"] - 1
        row["least_overhead"] = row["least_s"] / rows[0]["least_s"] - 1
    return rows


def adapted_layers(base: nn.Linear, blocks: list[int]) -> dict[str, nn.Module]:
    """The same frozen layer under each method, trained a little away from its start; PEFT's are stock PEFT's, in float32."""
    configs = {f"LoRA r {RANK}": LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=[TARGET])}
    configs |= {f"PEFT OFT {b}": OFTConfig(r=0, oft_block_size=b, target_modules=[TARGET]) for b in blocks}
    configs["PEFT HRA"] = HRAConfig(r=REFLECTIONS, target_modules=[TARGET])
    rank = min(RANK, base.in_features, base.out_features)
    configs[f"PEFT PSOFT r {RANK}"] = PsoftConfig(r=rank, psoft_alpha=rank, target_modules=[TARGET], psoft_svd="lowrank")
    layers = {name: _inject(config, base) for name, config in configs.items()}
    layers |= {f"ours {b}": OFTLinear(base, block_size=b) for b in blocks}
    layers["ours Householder"] = OFTLinear(base, parametrization="householder", num_reflections=REFLECTIONS)
    for layer in layers.values():
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.add_(1e-3 * torch.randn_like(parameter))
    return layers


def _inject(config, base: nn.Linear) -> nn.Module:
    copy = nn.Linear(base.in_features, base.out_features, base.bias is not None, device="meta")
    copy.load_state_dict(base.state_dict(), assign=True)  # the weight itself: no second one in memory
    layer = inject_adapter_in_model(config, nn.Sequential(copy))[0]
    for name, parameter in layer.named_parameters():
        if "base_layer" not in name and parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return layer.train()


def _step(layer: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    autocast = torch.autocast(x.device.type, x.dtype) if x.dtype != torch.float32 else contextlib.nullcontext()
    trainable = [parameter for parameter in layer.parameters() if parameter.requires_grad]

    def step() -> None:
        with autocast:
            y = layer(x)
        y.backward(grad)
        for tensor in (x, *trainable):
            tensor.grad = None

    return step


def _open_slot(layer: OFTLinear, dtype: torch.dtype) -> None:
    """As inside the model's forward: the rotation is mapped; its gradient ends here."""
    layer.slot.factors = tuple(f.detach().requires_grad_() for f in map_layers([layer], dtype)[0])
    layer.slot.open = True


def _map_step(layer: OFTLinear, sharing: int, dtype: torch.dtype) -> Callable[[], None]:
    """The map of a tower's layers in one batch, forward and backward."""
    tower = [layer, *(OFTLinear(nn.Linear(layer.in_features, 1, device=layer.oft_R.device), **_options(layer)) for _ in range(sharing - 1))]
    with torch.no_grad():
        for other in tower[1:]:
            other.oft_R.copy_(layer.oft_R)
    bound = NormBound()
    factors = [factor for per_layer in map_layers(tower, dtype, bound) for factor in per_layer]
    grads = [torch.randn_like(factor) for factor in factors]

    def step() -> None:
        torch.autograd.backward([f for per_layer in map_layers(tower, dtype, bound) for f in per_layer], grads)
        for other in tower:
            other.oft_R.grad = None

    return step


def _options(layer: OFTLinear) -> dict:
    if layer.parametrization == "cayley":
        return dict(block_size=layer.block_size)
    return dict(parametrization="householder", num_reflections=layer.oft_R.shape[1])


def _saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """What a forward leaves for the backward beyond the input and the output."""
    autocast = torch.autocast(x.device.type, x.dtype) if x.dtype != torch.float32 else contextlib.nullcontext()
    with LiveBytes() as live, autocast:
        y = layer(x)
    mapped = sum(factor.nbytes for factor in layer.slot.factors) if isinstance(layer, OFTLinear) else 0  # what the map saves too
    return live.now - y.untyped_storage().nbytes() + mapped


def count_tower(block_size: int, depth: int = 32) -> list[dict]:
    """Operators of a training step of Qwen2.5-VL's vision tower, adapters on its attention; they don't depend on its widths."""
    targets = dict(target_modules=["attn.qkv", "attn.proj"])
    configs = {
        f"LoRA r {RANK}": LoraConfig(r=RANK, **targets),
        "PEFT OFT": OFTConfig(r=0, oft_block_size=block_size, **targets),
        "PEFT HRA": HRAConfig(r=REFLECTIONS, **targets),
    }
    rows = [dict(case="frozen", operators=_tower_operators(_tower(block_size, depth)))]
    for name, config in configs.items():
        rows.append(dict(case=name, operators=_tower_operators(inject_adapter_in_model(config, _tower(block_size, depth)))))
    for norm in (0.1, 1, 10):
        tower = _tower(block_size, depth)
        for block in tower.blocks:
            for name in ("qkv", "proj"):
                layer = OFTLinear(getattr(block.attn, name), block_size=block_size)
                skew = torch.randn(layer.oft_R.shape, generator=torch.Generator().manual_seed(0))
                largest = torch.linalg.matrix_norm(unpack_skew(skew, block_size), ord=2).max()
                layer.oft_R.data = norm / largest * skew
                setattr(block.attn, name, layer)
        batch_rotations(tower)
        row = dict(case=f"ours, norm of Q {norm}", operators=_tower_operators(tower), iterations=cayley_iterations(norm))
        rows.append(row)
    return rows


def _tower(block_size: int, depth: int) -> nn.Module:
    config = Qwen2_5_VLConfig().vision_config
    config.depth, config.hidden_size, config.num_heads, config.intermediate_size = depth, 2 * block_size, 2, 64
    config.out_hidden_size, config.fullatt_block_indexes = 64, [i for i in config.fullatt_block_indexes if i < depth]
    return Qwen2_5_VisionTransformerPretrainedModel._from_config(config, attn_implementation="sdpa").requires_grad_(False)


def _tower_operators(tower: nn.Module) -> int:
    patches = torch.randn(2 * 64, 3 * 2 * 14 * 14, requires_grad=True)
    grid = torch.tensor([[1, 8, 8], [1, 8, 8]])

    def step() -> None:
        tower(patches, grid_thw=grid).last_hidden_state.sum().backward()

    step()  # the first may prepare something
    return operator_census(step).total


def measure_merges(width: int, block_size: int, device: torch.device, repeats: int) -> list[dict]:
    """Merging into a square float32 layer, ours and PEFT's OFT."""
    base = nn.Linear(width, width, device=device).requires_grad_(False)
    peft = _inject(OFTConfig(r=0, oft_block_size=block_size, target_modules=[TARGET], use_cayley_neumann=False), base)
    ours = OFTLinear(nn.Linear(width, width, device=device), block_size=block_size)
    cases, undo = {"PEFT OFT": peft.merge, "ours": ours.merge}, {"PEFT OFT": peft.unmerge, "ours": ours.unmerge}
    seconds = interleave(cases, repeats=repeats, device=device, undo=undo)
    rows = [dict(case=name) | summary(values) for name, values in seconds.items()]
    return [row | dict(time_ratio=row["median_s"] / rows[0]["median_s"]) for row in rows]


def measure_errors(width: int, block_size: int, device: torch.device) -> list[dict]:
    """max |R^T R - I| after 100 steps of Adam at 1e-2 toward random outputs; on an identity weight the layer is x R."""
    rows = []
    for name in (f"PEFT OFT {block_size}", "PEFT HRA", f"ours {block_size}", "ours Householder"):
        torch.manual_seed(0)
        base = nn.Linear(width, width, bias=False, device=device).requires_grad_(False)
        nn.init.eye_(base.weight)
        layer = adapted_layers(base, [block_size])[name]
        x, target = torch.randn(2, 256, width, device=device)
        trainable = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trainable, lr=1e-2)
        for _ in range(100):
            optimizer.zero_grad()
            nn.functional.mse_loss(layer(x), target).backward()
            optimizer.step()
        with torch.no_grad():
            rotation = layer(torch.eye(width, device=device)).cpu().double()
        error = (rotation.mT @ rotation - torch.eye(width, dtype=torch.float64)).abs().max()
        rows.append(dict(case=name, error=error.item()))
    return rows
