"""A model's adapters on disk: a folder for each PEFT configuration, and vlftlib.json with what PEFT's form has no place for."""

import hashlib
import json
import os
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import peft
import torch
import transformers
from peft.tuners.lora import LoraLayer
from torch import nn

import vlftlib
from vlftlib.attach import adapted_modules, adapter_parameters, add_lora, add_oft, check_free, some
from vlftlib.mapping import batch_rotations
from vlftlib.oft import OFTLinear
from vlftlib.orthogonal import NEUMANN_ERROR, orthogonality_error
from vlftlib.peft_files import CONFIG, StoredAdapter, check_config, is_target, read_folder, write_folder
from vlftlib.scopes import SCOPES, place_of, scope_of, tower_of

MANIFEST = "vlftlib.json"
SCALED_CONFIG = "scaled_adapter_config.json"  # PEFT would load the folder and lose the scale, so it must not find a config
# What comes before a module's place, in one or another transformers or in an inner model. A place alone would do for another
# model's encoder.layers.0, too.
_LAYOUTS = ("", "model.", "language_model.", "model.language_model.")
_ARCHITECTURE = {
    "vision_config": "depth hidden_size intermediate_size num_heads out_hidden_size patch_size spatial_merge_size "
    "temporal_patch_size window_size fullatt_block_indexes",
    "text_config": "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size",
}


def _describe_base(model: nn.Module) -> dict:
    """The sizes that decide whether an adapter fits and means the same, and their hash; none of what a version adds."""
    sizes = {part: {n: getattr(getattr(model.config, part), n) for n in names.split()} for part, names in _ARCHITECTURE.items()}
    return {"sha256": hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest(), **sizes}


def _stored(path: str, layer: OFTLinear | LoraLayer) -> StoredAdapter:
    """A layer's adapter as it goes to disk."""
    if isinstance(layer, OFTLinear):
        size = layer.oft_R.shape[1] if layer.parametrization == "householder" else layer.block_size
        options = dict(dropout=layer.dropout, neumann_terms=layer.neumann_terms, block_share=layer.block_share)
        return StoredAdapter(layer.parametrization, size, {"oft_R": layer.oft_R}, **options)
    name = _lora_name(path, layer)
    if layer.lora_variant or layer.lora_bias[name]:
        raise ValueError(f"{path}: a LoRA variant (DoRA, bias, ...): save it by PEFT")
    dropout = getattr(layer.lora_dropout[name], "p", 0.0)
    tensors = {"lora_A": layer.lora_A[name].weight, "lora_B": layer.lora_B[name].weight}
    # alpha by way of the scaling, so that rank-stabilised LoRA (alpha / sqrt(r)) is folded into plain LoRA
    return StoredAdapter("lora", layer.r[name], tensors, _plain(layer.scaling[name] * layer.r[name]), dropout)


def _refuse_what_else_was_trained(model: nn.Module) -> None:
    """Base weights that train, and PEFT configurations that the layers alone don't show: modules_to_save, bias, PiSSA."""
    adapters = {id(item.parameter) for item in adapter_parameters(model)}
    if others := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in adapters]:
        raise ValueError(f"{some(others)} can be trained and would be lost, adapters alone are saved: freeze it first")
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        check_config(config.to_dict(), f"PEFT's adapter {name}")


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def _lora_name(path: str, layer: LoraLayer) -> str:
    if len(layer.lora_A) != 1 or list(layer.lora_A) != layer.active_adapters:
        active = ", ".join(layer.active_adapters) or "none"
        raise ValueError(f"{path} has the LoRA adapters {', '.join(layer.lora_A)}, active {active}: there can be one, active")
    return next(iter(layer.lora_A))


def _folder_names(groups: Iterable[tuple]) -> list[str]:
    """`lora`, `oft-b64`, `hra`; where two configurations would share one, with all that tells them apart."""
    short, long = [], []
    for (kind, size, alpha, dropout, terms, block_share), tower in groups:
        name = {"lora": "lora", "householder": "hra"}.get(kind, f"oft-b{size}")
        details = {"lora": f"-r{size}-alpha{alpha}", "householder": f"-r{size}"}.get(kind, "")
        details += f"-neumann{terms}" * (terms is not None) + "-shared" * block_share
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
    _refuse_what_else_was_trained(model)
    groups: dict[tuple, dict[str, StoredAdapter]] = {}
    scales, tower_scales = {}, {}
    for where, layer in layers.items():
        if place_of(where) is None:
            raise ValueError(f"{where} has an adapter outside the known scopes ({', '.join(SCOPES)}): save it by PEFT")
        stored, scale = _stored(where, layer), getattr(layer, "oft_scale", None)
        if scale is not None and scale is not tower_scales.setdefault(tower_of(where), scale):
            raise ValueError(f"{where} has a scale of its own: the layers of a tower share one (apply_oft)")
        group = stored.settings, tower_of(where) if scale is not None else None
        groups.setdefault(group, {})[_unwrapped(where)] = stored
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
            settings = {"config": config, "dropout": group[0][3], "scale": scales[group]}  # HRA's config has no dropout
            manifest["folders"][folder] = settings | {"modules": dict(scopes)}
        (new / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        old = Path(temporary) / "old"
        try:
            if path.exists():
                path.rename(old)
            new.rename(path)
        except BaseException:
            if old.exists() and not path.exists():
                old.rename(path)
            raise
    return path


def load_adapters(model: nn.Module, path: str | os.PathLike) -> nn.Module:
    """Put saved adapters on a model, in place: a folder of `save_adapters`, or one of PEFT's (LoRA, OFT, HRA).

    Layers that have such an adapter already get its values; others are wrapped. Module paths of older transformers are
    recognised. Everything is read and checked before the model changes. PEFT's OFT in its default, the Neumann series, is
    kept as that: it trains, merges and saves as in PEFT, and a warning tells where it is no rotation. PEFT stores a block
    dropout and never applies it; here it is applied.

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
        folders = {path / name: entry for name, entry in manifest["folders"].items()}
    elif (path / CONFIG).is_file():
        folders = {path: {"config": CONFIG, "scale": None}}
    else:
        raise FileNotFoundError(f"{path}: no adapters here: neither {MANIFEST} nor PEFT's {CONFIG}")
    found: dict[str, tuple[StoredAdapter, float | None]] = {}
    for folder, entry in folders.items():
        adapters = _match(model, folder, *read_folder(folder, entry["config"]))
        if twice := adapters.keys() & found.keys():
            raise ValueError(f"{folder}: {min(twice)} has an adapter in another folder too")
        for where, adapter in adapters.items():
            found[where] = replace(adapter, dropout=entry.get("dropout", adapter.dropout)), entry["scale"]
    present = adapted_modules(model)
    if (path / MANIFEST).is_file() and (lacking := present.keys() - found.keys()):
        raise ValueError(f"{path}: no values for the model's adapters on {some(lacking)}")
    for where, (adapter, scale) in found.items():
        if where in present:
            _check_same(where, present[where], adapter, scale)
    check_free(model, [where for where in found if where not in present])
    new: dict[tuple, dict[str, int]] = {}
    for where, (adapter, scale) in found.items():
        if where not in present:
            group = replace(adapter, tensors={}, size=adapter.size if adapter.kind == "lora" else 0).settings, scale
            new.setdefault(group, {})[where] = adapter.size
    for ((kind, r, alpha, dropout, terms, block_share), scale), sizes in new.items():
        if kind == "lora":
            add_lora(model, list(sizes), r, alpha, dropout)
        else:
            options = dict(neumann_terms=terms, block_share=block_share)
            add_oft(model, list(sizes), sizes, kind, dropout, scale is not None, **options)
    with torch.no_grad():
        for where, (adapter, scale) in found.items():
            layer = model.get_submodule(where)
            for name, parameter in _stored(where, layer).tensors.items():
                parameter.copy_(adapter.tensors[name])
            if scale is not None:
                layer.oft_scale.fill_(scale)
    if any(adapter.kind != "lora" for adapter, _ in found.values()):
        batch_rotations(model)  # norms that no step led to
    _warn_of_no_rotations({where: model.get_submodule(where) for where in found})
    return model


def _warn_of_no_rotations(layers: Mapping[str, nn.Module]) -> None:
    series = {where: layer for where, layer in layers.items() if getattr(layer, "neumann_terms", None) is not None}
    errors = {where: orthogonality_error(layer.rotation()) for where, layer in series.items()}
    if errors and max(errors.values()) > NEUMANN_ERROR:
        where = max(errors, key=errors.get)
        warnings.warn(
            f"PEFT's Neumann series is no rotation on {sum(error > NEUMANN_ERROR for error in errors.values())} of {len(errors)} "
            f"modules: |R^T R - I| is {errors[where]:.1e} on {where} (use_cayley_neumann=False in PEFT is exact)",
            stacklevel=3,
        )


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
    here.pop(None, None)
    before = {path: _unwrapped(path).removesuffix(place_of(path) or "") for path in adapters}
    if unknown := [path for path in adapters if place_of(path) not in here or before[path] not in _LAYOUTS]:
        scopes = ", ".join(SCOPES)
        raise ValueError(f"{folder}: {len(unknown)} of {len(adapters)} modules aren't in this model's {scopes}: {some(unknown)}")
    found = {}
    for path, adapter in adapters.items():
        where = here[place_of(path)]
        module = model.get_submodule(where)
        blocks = module.in_features // adapter.size
        expected = {
            "lora": {"lora_A": (adapter.size, module.in_features), "lora_B": (module.out_features, adapter.size)},
            "householder": {"oft_R": (module.in_features, adapter.size)},
        }.get(adapter.kind, {"oft_R": (1 if adapter.block_share else blocks, adapter.size * (adapter.size - 1) // 2)})
        shapes = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}
        if shapes != expected or (config.peft_type == "OFT" and blocks * adapter.size != module.in_features):
            raise ValueError(f"{folder}: {path} has shapes {shapes}, this model's module needs {expected}")
        if where in found:
            raise ValueError(f"{folder}: {where} has weights under two names, one of them {path}")
        found[where] = adapter
    inside = tuple(f"{path}." for path in adapted_modules(model))
    kinds = (nn.Linear, nn.Embedding, nn.Conv3d, OFTLinear, LoraLayer)
    modules = [path for path, module in model.named_modules() if isinstance(module, kinds) and not path.startswith(inside)]
    # the configuration names modules in the layout that the keys are in, or in this model's
    layouts = {tower_of(path): prefix for path, prefix in before.items()}
    own = {path: _unwrapped(path) for path in modules}
    older = own | {path: layouts[tower_of(path)] + place_of(path) for path in modules if tower_of(path) in layouts}
    named, otherwise = ({path for path in modules if is_target(config, names[path])} for names in (older, own))
    if found.keys() in (named, otherwise):
        return found
    if missing := named - found.keys():
        raise ValueError(f"{folder}: {CONFIG} names {len(missing)} modules without weights: {some(missing)}")
    left_over = found.keys() - named
    raise ValueError(f"{folder}: weights for {len(left_over)} modules that {CONFIG} doesn't name: {some(left_over)}")


def _unwrapped(path: str) -> str:
    """A module path without what DDP, torch.compile and PEFT put before it."""
    return re.sub(r"^(module\.|_orig_mod\.|base_model\.model\.)+", "", path)


def _check_same(where: str, layer, adapter: StoredAdapter, scale: float | None) -> None:
    has = _stored(where, layer)
    if layer.merged:
        raise ValueError(f"{where} has its adapter merged: unmerge_adapters first")
    if replace(has, dropout=0).settings != replace(adapter, dropout=0).settings:
        raise ValueError(f"{where} has {has}, the folder {adapter}: they must be alike")
    if (getattr(layer, "oft_scale", None) is None) != (scale is None):
        raise ValueError(f"{where}: a learnable scale in only one of model and folder")
