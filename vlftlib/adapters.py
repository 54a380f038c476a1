"""Adapters of a model: a recipe's put on, saved, loaded, merged.

The parts lie in `scopes` (which modules), `attach` (LoRA and OFT on them), `counting` and `peft_files`; what a user calls is
here.
"""

import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import peft
import torch
import transformers
from peft.tuners.lora import LoraLayer
from torch import nn

import vlftlib
from vlftlib.attach import (
    AdapterParameter,
    adapted_modules,
    adapter_parameters,
    add_lora,
    add_oft,
    apply_lora,
    apply_oft,
    check_free,
)
from vlftlib.counting import ParameterCount, count_parameters, count_recipe
from vlftlib.oft import OFTLinear
from vlftlib.peft_files import CONFIG, StoredAdapter, is_target, read_folder, write_folder
from vlftlib.recipes import Recipe, Stage
from vlftlib.scopes import SCOPES, place_of, scope_of, select_modules, tower_of

__all__ = [
    "SCOPES",
    "AdapterParameter",
    "ParameterCount",
    "adapter_parameters",
    "apply_lora",
    "apply_oft",
    "apply_recipe",
    "count_parameters",
    "count_recipe",
    "load_adapters",
    "merge_adapters",
    "save_adapters",
    "select_modules",
    "stage_parameters",
    "unmerge_adapters",
]

MANIFEST = "vlftlib.json"
SCALED_CONFIG = "scaled_adapter_config.json"  # PEFT would load the folder and lose the scale, so it must not find a config
_ARCHITECTURE = {
    "vision_config": "depth hidden_size intermediate_size num_heads out_hidden_size patch_size spatial_merge_size "
    "temporal_patch_size window_size fullatt_block_indexes",
    "text_config": "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size",
}


def apply_recipe(model: nn.Module, recipe: Recipe, *, max_dropout: float | None = None, seed: int = 0) -> nn.Module:
    """Put a recipe's adapters on a model, in place, after checking all of them.

    Args:
        max_dropout: a larger LoRA dropout is cut to this; None leaves the recipe's.
        seed: as in `apply_lora`.
    Returns:
        The model, all but its adapters frozen.
    Raises:
        ValueError: as `apply_lora` and `apply_oft`; then the model is unchanged.
    """
    count_recipe(model, recipe)
    for adapter in recipe.adapters:
        settings = dict(vars(adapter))
        if max_dropout is not None and adapter.method == "lora":
            settings["dropout"] = min(adapter.dropout, max_dropout)
        {"lora": apply_lora, "oft": apply_oft}[adapter.method](model, **settings, seed=seed)
    return model


def stage_parameters(model: nn.Module, stage: Stage) -> list[AdapterParameter]:
    """Let a stage's adapters train and freeze the others.

    Returns:
        What trains now.
    Raises:
        ValueError: the model has no adapters of one of the stage's methods.
    """
    items = adapter_parameters(model)
    if lacking := set(stage.train) - {item.method for item in items}:
        raise ValueError(f"stage trains {', '.join(stage.train)}: the model has no {', '.join(sorted(lacking))} adapters")
    for item in items:
        item.parameter.requires_grad_(item.method in stage.train)
    return [item for item in items if item.method in stage.train]


def _describe_base(model: nn.Module) -> dict:
    """The sizes that decide whether an adapter fits and means the same, and their hash; none of what a version adds."""
    sizes = {part: {n: getattr(getattr(model.config, part), n) for n in names.split()} for part, names in _ARCHITECTURE.items()}
    return {"sha256": hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest(), **sizes}


def _stored(path: str, layer: OFTLinear | LoraLayer) -> StoredAdapter:
    """A layer's adapter as it goes to disk."""
    if isinstance(layer, OFTLinear):
        size = layer.block_size if layer.parametrization == "cayley" else layer.num_reflections
        return StoredAdapter(layer.parametrization, size, {"oft_R": layer.oft_R}, dropout=layer.dropout)
    name = _lora_name(path, layer)
    if layer.lora_variant or layer.lora_bias[name]:
        raise ValueError(f"{path}: a LoRA variant (DoRA, bias, ...): save it by PEFT")
    dropout = getattr(layer.lora_dropout[name], "p", 0.0)
    tensors = {"lora_A": layer.lora_A[name].weight, "lora_B": layer.lora_B[name].weight}
    # alpha by way of the scaling, so that rank-stabilised LoRA (alpha / sqrt(r)) is folded into plain LoRA
    return StoredAdapter("lora", layer.r[name], tensors, _plain(layer.scaling[name] * layer.r[name]), dropout)


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def _lora_name(path: str, layer: LoraLayer) -> str:
    if len(layer.lora_A) != 1:
        raise ValueError(f"{path} has {len(layer.lora_A)} LoRA adapters ({', '.join(layer.lora_A)}), there can be one")
    return next(iter(layer.lora_A))


def _folder_names(groups: Iterable[tuple]) -> list[str]:
    """`lora`, `oft-b64`, `hra`; where two configurations would share one, with all that tells them apart."""
    short, long = [], []
    for (kind, size, alpha, dropout), tower in groups:
        name = {"lora": "lora", "cayley": f"oft-b{size}", "householder": "hra"}[kind]
        details = {"lora": f"-r{size}-alpha{alpha}", "cayley": "", "householder": f"-r{size}"}[kind]
        details += f"-dropout{dropout}" * (dropout > 0) + f"-{tower}" * (tower is not None)
        short.append(name)
        long.append(name + details)
    return [name if short.count(name) == 1 else full for name, full in zip(short, long)]


def save_adapters(model: nn.Module, path: str | os.PathLike) -> Path:
    """Write a model's adapters: a folder for each PEFT configuration, that stock PEFT loads by itself, and vlftlib.json.

    The whole is written beside `path` and then renamed, so `path` holds the earlier adapters or these, never a part. A
    learnable scale other than 1 has no place in PEFT's form: such a folder is for `load_adapters` only, PEFT refuses it.

    Args:
        path: a new or empty folder, or one that `save_adapters` wrote.
    Returns:
        The folder.
    Raises:
        ValueError: no adapters, or some that cannot be represented.
        FileExistsError: the folder holds something else.
    """
    path = Path(path)
    if path.exists() and not (path / MANIFEST).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} holds something other than adapters: choose another folder")
    layers = adapted_modules(model)
    if not layers:
        raise ValueError("the model has no adapters to save")
    groups: dict[tuple, dict[str, StoredAdapter]] = {}
    scales = {}
    for where, layer in layers.items():
        if place_of(where) is None:
            raise ValueError(f"{where} has an adapter outside the known scopes ({', '.join(SCOPES)}): save it by PEFT")
        stored, scale = _stored(where, layer), getattr(layer, "oft_scale", None)
        group = stored.settings, tower_of(where) if scale is not None else None
        groups.setdefault(group, {})[re.sub(r"^(module\.|_orig_mod\.|base_model\.model\.)+", "", where)] = stored
        scales[group] = None if scale is None else scale.item()
    name = getattr(model.config, "_name_or_path", "") or None
    name = None if name is None or Path(name).exists() else name
    versions = {package.__name__: package.__version__ for package in (vlftlib, torch, transformers, peft)}
    manifest = {"format": 1, "versions": versions, "base": _describe_base(model), "folders": {}}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        for folder, (group, adapters) in zip(_folder_names(groups), groups.items()):
            config = CONFIG if scales[group] in (None, 1.0) else SCALED_CONFIG
            write_folder(new / folder, adapters, name, config)
            scopes = Counter(map(scope_of, adapters))
            manifest["folders"][folder] = {"config": config, "modules": dict(scopes), "scale": scales[group]}
        (new / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if path.exists():
            path.rename(Path(temporary) / "old")
        new.rename(path)
    return path


def load_adapters(model: nn.Module, path: str | os.PathLike) -> nn.Module:
    """Put saved adapters on a model, in place: a folder of `save_adapters`, or one of PEFT's (LoRA, exact OFT, HRA).

    Layers that have such an adapter already get its values; others are wrapped. Module paths of older transformers are
    recognised. Everything is read and checked before the model changes.

    Returns:
        The model, all but its adapters frozen.
    Raises:
        FileNotFoundError: no adapters there, or a file is missing.
        ValueError: another base, a module that the model lacks or that has another adapter, missing weights, or a setting
            that cannot be represented here.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        manifest = json.loads((path / MANIFEST).read_text())
        _check_base(model, manifest["base"], path)
        folders = [(path / name, entry["config"], entry["scale"]) for name, entry in manifest["folders"].items()]
    elif (path / CONFIG).is_file():
        folders = [(path, CONFIG, None)]
    else:
        raise FileNotFoundError(f"{path}: no adapters here: neither {MANIFEST} nor PEFT's {CONFIG}")
    found: dict[str, tuple[StoredAdapter, float | None]] = {}
    for folder, config_file, scale in folders:
        adapters = _match(model, folder, *read_folder(folder, config_file))
        if twice := adapters.keys() & found.keys():
            raise ValueError(f"{folder}: {min(twice)} has an adapter in another folder too")
        found |= {where: (adapter, scale) for where, adapter in adapters.items()}
    present = adapted_modules(model)
    if (path / MANIFEST).is_file() and (lacking := present.keys() - found.keys()):
        raise ValueError(f"{path}: no values for the model's adapters on {_some(lacking)}")
    for where, (adapter, scale) in found.items():
        if where in present:
            _check_same(where, present[where], adapter, scale)
    check_free(model, [where for where in found if where not in present])
    new: dict[tuple, dict[str, int]] = {}
    for where, (adapter, scale) in found.items():
        if where not in present:
            group = adapter.kind, adapter.size if adapter.kind == "lora" else None, adapter.alpha, adapter.dropout, scale
            new.setdefault(group, {})[where] = adapter.size
    for (kind, r, alpha, dropout, scale), sizes in new.items():
        if kind == "lora":
            add_lora(model, list(sizes), r, alpha, dropout)
        else:
            add_oft(model, list(sizes), sizes, kind, dropout, scale is not None)
    with torch.no_grad():
        for where, (adapter, scale) in found.items():
            layer = model.get_submodule(where)
            for name, parameter in _stored(where, layer).tensors.items():
                parameter.copy_(adapter.tensors[name])
            if scale is not None:
                layer.oft_scale.fill_(scale)
    return model


def _check_base(model: nn.Module, saved: dict, path: Path) -> None:
    base = _describe_base(model)
    if saved["sha256"] != base["sha256"]:
        differences = [
            f"{part}.{name} {saved[part].get(name)} there, {value} here"
            for part in _ARCHITECTURE
            for name, value in base[part].items()
            if saved[part].get(name) != value
        ]
        raise ValueError(f"{path}: adapters of another base: {', '.join(differences)}")


def _match(model, folder: Path, adapters: dict[str, StoredAdapter], config) -> dict[str, StoredAdapter]:
    """A folder's adapters by the model's own module paths, complete and of the right shapes."""
    here = {place_of(path): path for path, module in model.named_modules() if hasattr(module, "in_features")}
    unknown = [path for path in adapters if place_of(path) is None or place_of(path) not in here]
    if unknown:
        raise ValueError(f"{folder}: {len(unknown)} of {len(adapters)} modules aren't in this model: {_some(unknown)}")
    found = {}
    for path, adapter in adapters.items():
        where = here[place_of(path)]
        module = model.get_submodule(where)
        tensors = dict(adapter.tensors)
        blocks = module.in_features // adapter.size
        if config.peft_type == "OFT" and config.block_share and len(tensors["oft_R"]) == 1:
            tensors["oft_R"] = tensors["oft_R"].repeat(blocks, 1)  # the same map; the blocks are independent from now on
        expected = {
            "lora": {"lora_A": (adapter.size, module.in_features), "lora_B": (module.out_features, adapter.size)},
            "cayley": {"oft_R": (blocks, adapter.size * (adapter.size - 1) // 2)},
            "householder": {"oft_R": (module.in_features, adapter.size)},
        }[adapter.kind]
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != expected or (adapter.kind == "cayley" and blocks * adapter.size != module.in_features):
            raise ValueError(f"{folder}: {path} has shapes {shapes}, this model's module needs {expected}")
        found[where] = replace(adapter, tensors=tensors)
    missing = [path for place, path in here.items() if place and path not in found and is_target(config, path)]
    if missing:
        raise ValueError(f"{folder}: {CONFIG} names {len(missing)} modules without weights: {_some(missing)}")
    return found


def _check_same(where: str, layer, adapter: StoredAdapter, scale: float | None) -> None:
    has = _stored(where, layer)
    if layer.merged:
        raise ValueError(f"{where} has its adapter merged: unmerge_adapters first")
    if (has.kind, has.size, has.alpha) != (adapter.kind, adapter.size, adapter.alpha):
        raise ValueError(f"{where} has {has}, the folder {adapter}: they must be alike")
    if (getattr(layer, "oft_scale", None) is None) != (scale is None):
        raise ValueError(f"{where}: a learnable scale in only one of model and folder")


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def merge_adapters(model: nn.Module, *, remove: bool = False) -> nn.Module:
    """Fold all adapters into the base weights, in place: W + (alpha / r) B A, s W R^T; logits stay, up to rounding.

    Args:
        remove: replace the adapted layers by their merged base layers, for good; the model is then a stock one.
    Returns:
        The model.
    Raises:
        ValueError: no adapters, or merged already, or the base is quantised.
    """
    layers = _layers_to_merge(model, merged=False)
    for path, layer in layers.items():
        if not layer.get_submodule("base_layer").weight.is_floating_point():
            raise ValueError(f"{path} is quantised: load the base in full precision and merge into that")
    for path, layer in layers.items():
        layer.merge()
        if remove:
            model.set_submodule(path, layer.base_layer)
    return model


def unmerge_adapters(model: nn.Module) -> nn.Module:
    """Undo `merge_adapters`, in place; the base weights come back up to rounding.

    Raises:
        ValueError: no adapters, or not merged.
    """
    for layer in _layers_to_merge(model, merged=True).values():
        layer.unmerge()
    return model


def _layers_to_merge(model: nn.Module, merged: bool) -> dict[str, OFTLinear | LoraLayer]:
    layers = adapted_modules(model)
    if not layers:
        raise ValueError("the model has no adapters")
    if wrong := [path for path, layer in layers.items() if layer.merged != merged]:
        raise ValueError(f"adapters are {'not ' if merged else 'already '}merged on {_some(wrong)}")
    return layers
