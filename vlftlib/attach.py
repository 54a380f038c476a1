"""Put LoRA (PEFT's) and OFT (ours) on a model's modules, in place, and list what is there.

Unusual here: nothing about adapters is kept beside the model. Rank, block size, dropout and scale are read from the layers,
scopes from the module paths, so a copied, wrapped or reloaded model cannot disagree with its bookkeeping.
"""

import math
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from vlftlib.mapping import batch_rotations
from vlftlib.models import keep_layout
from vlftlib.oft import INSIDE, OFTLinear
from vlftlib.scopes import place_of, scope_of, select_modules, tower_of

LORA_NAME = "default"  # PEFT's name for an adapter inside its layers; it doesn't reach the disk


class AdapterParameter(NamedTuple):
    """One parameter of an adapter: its name in the model, itself, its method ("lora", "oft"), its module's scope and path."""

    name: str
    parameter: nn.Parameter
    method: str
    scope: str
    path: str


def adapter_parameters(model: nn.Module) -> list[AdapterParameter]:
    """All adapter parameters of a model, frozen or not, each once (a shared scale under its first module)."""
    found = {}
    for path, module in adapted_modules(model).items():
        method = "oft" if isinstance(module, OFTLinear) else "lora"
        for name, parameter in module.named_parameters():
            if not name.startswith("base_layer."):
                item = AdapterParameter(f"{path}.{name}", parameter, method, scope_of(path) or "other", path)
                found.setdefault(id(parameter), item)
    return list(found.values())


def adapted_modules(model: nn.Module) -> dict[str, OFTLinear | LoraLayer]:
    """The layers of a model that carry an adapter, by path.

    Raises:
        ValueError: a layer of another PEFT method than LoRA, or one inside an OFT layer.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, (OFTLinear, BaseTunerLayer))}
    for path, module in layers.items():
        if not isinstance(module, (OFTLinear, LoraLayer)):
            raise ValueError(f"{path} is PEFT's {type(module).__name__}: save it by PEFT and read that by load_adapters")
        if isinstance(layers.get(path.removesuffix(".base_layer")), OFTLinear) and path.endswith(".base_layer"):
            raise ValueError(f"{path} is PEFT's {type(module).__name__}: {INSIDE}")
    return layers


def apply_lora(
    model: nn.Module,
    scope: str | Iterable[str],
    r: int,
    alpha: float,
    dropout: float = 0.0,
    last_n_blocks: int | None = None,
    *,
    seed: int = 0,
) -> nn.Module:
    """Add PEFT's LoRA to a scope, in place: y = W x + (alpha / r) B A x (Hu et al., arXiv:2106.09685), B = 0 at the start.

    Call it again for another scope with other values. All but adapters is frozen.

    Args:
        model: a Qwen2.5-VL model, possibly with adapters on other modules; not a PeftModel.
        scope, last_n_blocks: as in `select_modules`.
        r: rank; A is (r, in_features), B is (out_features, r), both float32.
        alpha: numerator of the scaling.
        dropout: probability of dropping an input of A in training.
        seed: of A's values; they depend on seed and module alone, not on device, layout or order.

    Returns:
        The model.

    Raises:
        ValueError: a value out of range, no module in scope, or a module that has an adapter already.
    """
    if type(r) is not int or r < 1 or not alpha > 0 or not 0 <= dropout < 1:
        raise ValueError(f"LoRA with r {r}, alpha {alpha}, dropout {dropout}: r and alpha must be positive, dropout in [0, 1)")
    paths = select_modules(model, scope, last_n_blocks)
    check_free(model, paths)
    return add_lora(model, paths, r, alpha, dropout, seed)


def add_lora(model: nn.Module, paths: list[str], r: int, alpha: float, dropout: float, seed: int = 0) -> nn.Module:
    # Injection rather than get_peft_model: the model keeps its class and its module paths, so generate, the Trainer and
    # our own layers need not know of a wrapper, and groups of other rank or dropout are further injections.
    before = [(item.parameter, item.parameter.requires_grad) for item in adapter_parameters(model)]
    training = {path: model.get_submodule(path).training for path in paths}
    config = LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=paths)
    # "low memory" creates the weights on the meta device: PEFT would draw them from the global generator, per device.
    inject_adapter_in_model(config, model, adapter_name=LORA_NAME, low_cpu_mem_usage=True)
    del model.peft_config  # PEFT would take the next injection for a second adapter on the same modules
    for path in paths:
        layer = model.get_submodule(path)
        device, inputs, outputs = layer.get_base_layer().weight.device, layer.in_features, layer.out_features
        first = _uniform(path, seed, (r, inputs), 1 / math.sqrt(inputs))  # PEFT's own start
        layer.lora_A[LORA_NAME].weight = nn.Parameter(first.to(device))
        layer.lora_B[LORA_NAME].weight = nn.Parameter(torch.zeros(outputs, r, device=device))
        layer.train(training[path])
    _freeze_base(model)
    for parameter, trained in before:  # PEFT freezes all that isn't its own
        parameter.requires_grad_(trained)
    return model


def apply_oft(
    model: nn.Module,
    scope: str | Iterable[str],
    block_size: int | Mapping[str, int] | None = None,
    parametrization: str = "cayley",
    *,
    num_reflections: int | None = None,
    block_dropout: float = 0.0,
    scale: bool = False,
    last_n_blocks: int | None = None,
    seed: int = 0,
) -> nn.Module:
    """Add OFT to a scope, in place: y = W (x R), R orthogonal (Qiu et al., arXiv:2306.07280), R = I at the start.

    All but adapters is frozen. With `scale`, one learnable factor is shared by all OFT layers of a tower (Report C). PEFT may
    wrap the model afterwards (it freezes these adapters: let them train again), by target modules that have none of them.

    Args:
        model: a Qwen2.5-VL model, possibly with adapters on other modules; not a PeftModel.
        scope, last_n_blocks: as in `select_modules`.
        block_size: of R's diagonal blocks, for "cayley": a number, or a mapping from module suffix to number.
        parametrization: "cayley" or "householder".
        num_reflections: for "householder": an even number.
        block_dropout: probability of replacing a block by the identity in training.
        scale: whether y is multiplied by a learnable factor.
        seed: of the Householder vectors' start; depends on seed and module alone.

    Returns:
        The model.

    Raises:
        ValueError: a size that doesn't divide (names those that do), a suffix that matches nothing or a module without
            one, no module in scope, or a module that has an adapter already.
    """
    paths = select_modules(model, scope, last_n_blocks)
    check_free(model, paths)
    sizes = oft_sizes(model, paths, block_size, parametrization, num_reflections)
    return add_oft(model, paths, sizes, parametrization, block_dropout, scale, seed)


def add_oft(
    model: nn.Module,
    paths: list[str],
    sizes: dict[str, int],
    parametrization: str,
    dropout: float,
    scale: bool,
    seed: int = 0,
    **options,
) -> nn.Module:
    """`options` are PEFT's, for its files: neumann_terms, block_share."""
    for path in paths:
        base = model.get_submodule(path)
        size = {"num_reflections" if parametrization == "householder" else "block_size": sizes[path]} | options
        shared = _tower_scale(model, path) if scale else None
        with torch.random.fork_rng(devices=[]):  # the layer draws a start of its own
            layer = OFTLinear(base, parametrization=parametrization, dropout=dropout, scale=scale, **size)
        if parametrization == "householder":
            half = _uniform(path, seed, (layer.in_features, sizes[path] // 2), math.sqrt(3 / layer.in_features))  # length 1
            with torch.no_grad():  # equal neighbours: each pair of reflections is the identity
                layer.oft_R.copy_(half.repeat_interleave(2, dim=1))
        if shared is not None:
            layer.oft_scale = shared
        model.set_submodule(path, layer.train(base.training))
    batch_rotations(model)
    _freeze_base(model)
    return model


def _tower_scale(model: nn.Module, path: str) -> nn.Parameter | None:
    """The scale that the tower of `path` has already."""
    for other, layer in adapted_modules(model).items():
        if tower_of(other) == tower_of(path) and getattr(layer, "oft_scale", None) is not None:
            return layer.oft_scale
    return None


def _uniform(path: str, seed: int, shape: tuple[int, ...], bound: float) -> Tensor:
    """Values in [-bound, bound) from a CPU generator of this module's own."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed} {place_of(path)}".encode()))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def check_free(model: nn.Module, paths: list[str]) -> None:
    if isinstance(model, PeftModel):
        raise ValueError("the model is a PeftModel: give the model inside (get_base_model()), which is adapted in place")
    for path in paths:
        module = model.get_submodule(path)
        if isinstance(module, (OFTLinear, BaseTunerLayer)):
            kind = "OFT" if isinstance(module, OFTLinear) else "LoRA"
            raise ValueError(f"{path} has {kind} already: LoRA and OFT don't commute, one module takes one adapter")
        if not isinstance(module, nn.Linear):
            raise ValueError(f"{path} is a {type(module).__name__}, adapters go on nn.Linear")


def oft_sizes(model, paths, block_size, parametrization: str, num_reflections) -> dict[str, int]:
    """Each module's block size or number of reflections, checked."""
    inputs = {path: model.get_submodule(path).in_features for path in paths}
    if parametrization == "householder":
        least = min(inputs.values())
        if block_size is not None or num_reflections not in range(2, least + 1, 2):
            raise ValueError(
                f"householder OFT with num_reflections {num_reflections!r}, block_size {block_size!r}: it takes an even "
                f"number of reflections, from 2 to {least} (the fewest inputs in scope), and no block size"
            )
        return dict.fromkeys(paths, num_reflections)
    if parametrization != "cayley" or num_reflections is not None:
        raise ValueError(
            f"OFT parametrization {parametrization!r} with num_reflections {num_reflections!r}: cayley takes block_size, "
            "householder num_reflections"
        )
    by_suffix = block_size if isinstance(block_size, Mapping) else {"": block_size}
    used, sizes = set(), {}
    for path in paths:
        suffixes = [suffix for suffix in by_suffix if not suffix or f".{path}".endswith(f".{suffix}")]
        if not suffixes:
            raise ValueError(f"{path}: no block size, the mapping has {', '.join(by_suffix)}")
        suffix = max(suffixes, key=len)
        used.add(suffix)
        sizes[path] = size = by_suffix[suffix]
        if type(size) is not int or size < 2 or inputs[path] % size:
            divisors = [b for b in range(2, inputs[path] + 1) if inputs[path] % b == 0]
            near = sorted(divisors, key=lambda b: abs(b - size) if type(size) is int else b)[:4]
            raise ValueError(
                f"{path}: block size {size!r} doesn't divide its {inputs[path]} inputs; the nearest that do: "
                f"{', '.join(map(str, sorted(near)))} (a mapping from module suffix to number gives each its own)"
            )
    if unused := set(by_suffix) - used:
        raise ValueError(f"block size for {', '.join(sorted(unused))}: no such module in scope")
    return sizes


def _freeze_base(model: nn.Module) -> None:
    keep_layout(model)
    adapters = {id(item.parameter) for item in adapter_parameters(model)}
    for parameter in model.parameters():
        if id(parameter) not in adapters:
            parameter.requires_grad_(False)


def some(names: Iterable[str]) -> str:
    """The first few of many names, for an error."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
