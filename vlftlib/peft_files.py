"""PEFT's adapter folders, read and written: adapter_config.json and adapter_model.safetensors.

Where PEFT's conventions differ from ours, they are translated here and nowhere else:
- OFT: PEFT's exact map is (I - Q)(I + Q)^-1, ours (I + Q)(I - Q)^-1, so Q changes its sign. PEFT's Neumann map has our
  sign but is no rotation beyond small Q, so such a folder keeps that map here, and goes back to disk with it.
- HRA: PEFT's vectors in PEFT's order are ours (`orthogonal.householder`); with its Gram-Schmidt, they are read as its result.
- A field that changes the arithmetic in a way that we have no counterpart for is refused by name, never dropped.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import HRAConfig, LoraConfig, OFTConfig, PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_PEFT_KEYS = {
    "LORA": {".lora_A.weight": "lora_A", ".lora_B.weight": "lora_B"},
    "OFT": {".oft_R.weight": "oft_R"},
    "HRA": {".hra_u": "oft_R"},
}
_CONFIGS = {"LORA": LoraConfig, "OFT": OFTConfig, "HRA": HRAConfig}
# Fields that may have any value: translated below, about the choice of modules (the weights' keys decide), about the start
# of a training that is over, or mere notes. Every other field must have PEFT's default.
_FREE = set(
    "r lora_alpha lora_dropout use_rslora rank_pattern alpha_pattern oft_block_size module_dropout block_share eps "
    "use_cayley_neumann num_cayley_neumann_terms apply_GS target_modules exclude_modules layers_to_transform layers_pattern "
    "init_weights inference_mode base_model_name_or_path revision task_type peft_type peft_version auto_mapping runtime_config "
    "loftq_config eva_config corda_config lora_ga_config megatron_core qalora_group_size ensure_weight_tying".split()
)


@dataclass(frozen=True)
class StoredAdapter:
    """One module's adapter in our form, with all that its arithmetic needs but a learnable scale.

    Attributes:
        kind: "lora", "cayley", "householder" or "cayley_neumann".
        size: r, block size or number of reflections.
        tensors: lora: lora_A (r, in), lora_B (out, r); cayley: oft_R (in // b, b (b - 1) / 2), one row for all blocks if
            they are shared; householder: oft_R (in, n). float32.
        alpha: LoRA's, else None.
        dropout: of LoRA's input or of OFT's blocks.
        neumann_terms: of PEFT's series, else None.
        block_share: whether all blocks are one.
    """

    kind: str
    size: int
    tensors: Mapping[str, Tensor] = field(repr=False)
    alpha: float | None = None
    dropout: float = 0.0
    neumann_terms: int | None = None
    block_share: bool = False

    @property
    def settings(self) -> tuple:
        """What modules of one PEFT configuration have in common."""
        return self.kind, self.size, self.alpha, self.dropout, self.neumann_terms, self.block_share


def read_folder(folder: Path, config_file: str = CONFIG) -> tuple[dict[str, StoredAdapter], PeftConfig]:
    """Read a PEFT folder (LoRA, OFT, HRA).

    Returns:
        Adapters by module path as on disk, without PEFT's prefix; and PEFT's configuration.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: pickled, broken or incomplete weights, another PEFT method, or a setting that we cannot represent.
    """
    raw = json.loads((folder / config_file).read_text())
    method = raw.get("peft_type")
    defaults = check_config(raw, folder / config_file)
    if method == "OFT" and "use_cayley_neumann" not in raw:
        raise ValueError(f"{folder / config_file}: no use_cayley_neumann: saved by a PEFT before 0.16, whose OFT is another")
    if method == "OFT" and raw["use_cayley_neumann"]:
        version = raw.get("peft_version") or "0.17"  # 0.18 was the first to write it
        if tuple(map(int, version.split(".")[:2])) < (0, 18):
            raise ValueError(
                f"{folder / config_file}: use_cayley_neumann with peft_version {raw.get('peft_version')!r}: before 0.18 the series "
                "ended in twice its last power, so that today's PEFT reads another rotation, too"
            )
    config = _CONFIGS[method](**{name: raw[name] for name in raw if name in defaults and name != "peft_type"})
    if config.target_modules is None:
        raise ValueError(f"{folder / config_file}: target_modules is missing")
    by_module: dict[str, dict[str, Tensor]] = {}
    strange = []
    for key, tensor in _read_weights(folder).items():
        suffix = next((suffix for suffix in _PEFT_KEYS[method] if key.endswith(suffix)), None)
        if suffix is None or not key.startswith(PREFIX):
            strange.append(key)
        else:
            path = key.removeprefix(PREFIX).removesuffix(suffix)
            by_module.setdefault(path, {})[_PEFT_KEYS[method][suffix]] = tensor.float()
    if strange or not by_module:
        raise ValueError(f"{folder / WEIGHTS}: not {method} weights: {', '.join(strange[:5]) or 'no tensor at all'}")
    return {path: _translate(folder, config, path, tensors) for path, tensors in by_module.items()}, config


def check_config(config: Mapping, where: object) -> dict:
    """Refuse a PEFT configuration that says what has no counterpart here; returns PEFT's defaults for its method.

    Args:
        config: as in adapter_config.json.
        where: it is, for the error.

    Raises:
        ValueError: another method than LoRA, OFT and HRA, or a setting that cannot be represented, by name.
    """
    method = config.get("peft_type")
    if method not in _CONFIGS:
        raise ValueError(f"{where}: peft_type is {method!r}; LORA, OFT and HRA can be represented")
    defaults = _CONFIGS[method](target_modules=["any"]).to_dict()
    allowed = {"init_lora_weights": (True, False, "gaussian", "eva", "orthogonal")}  # the others change the base's weights too
    for name, value in config.items():
        unset = not value and not defaults.get(name)  # also a switch of a later PEFT, off
        right = allowed.get(name, (defaults.get(name),))
        if name not in _FREE and not unset and value is not None and value not in right:
            only = " or ".join(map(repr, right))
            raise ValueError(f"{where}: {name} is {value!r}, which has no counterpart here (only {only})")
    return defaults


def _read_weights(folder: Path) -> dict[str, Tensor]:
    if not (folder / WEIGHTS).is_file():
        pickled = " (adapter_model.bin is pickled and not read: save it again as safetensors)"
        raise FileNotFoundError(f"{folder}: no {WEIGHTS}" + pickled * (folder / "adapter_model.bin").exists())
    try:
        return load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS}: broken: {error}") from error


def _translate(folder: Path, config: PeftConfig, path: str, tensors: dict[str, Tensor]) -> StoredAdapter:
    """PEFT's tensors of one module in our form."""
    if config.peft_type == "LORA":
        if set(tensors) != {"lora_A", "lora_B"}:
            raise ValueError(f"{folder / WEIGHTS}: {path} has {', '.join(tensors)} alone, LoRA needs lora_A and lora_B")
        r = tensors["lora_A"].shape[0]
        if r != (named := config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), path), config.r)):
            raise ValueError(f"{folder / WEIGHTS}: {path} has rank {r}, {CONFIG} says {named}")
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), path), config.lora_alpha)
        return StoredAdapter("lora", r, tensors, alpha * math.sqrt(r) if config.use_rslora else alpha, config.lora_dropout)
    values = tensors["oft_R"]
    if config.peft_type == "OFT":
        # PEFT adjusts a block size that doesn't divide, layer by layer, and only the tensor's shape says so.
        size = (1 + math.isqrt(1 + 8 * values.shape[1])) // 2
        if size * (size - 1) // 2 != values.shape[1]:
            raise ValueError(f"{folder / WEIGHTS}: {path} has {values.shape[1]} values a block, no b (b - 1) / 2")
        common = dict(dropout=config.module_dropout, block_share=config.block_share)
        if not config.use_cayley_neumann:
            return StoredAdapter("cayley", size, {"oft_R": -values}, **common)
        terms = config.num_cayley_neumann_terms
        if type(terms) is not int or terms < 1:
            raise ValueError(f"{folder / CONFIG}: num_cayley_neumann_terms is {terms!r}, it must be at least 1")
        return StoredAdapter("cayley_neumann", size, {"oft_R": values}, neumann_terms=terms, **common)
    if values.shape[1] % 2:
        raise ValueError(f"{folder / WEIGHTS}: {path} has {values.shape[1]} reflections; an odd number is no rotation")
    if values.shape[1] > values.shape[0]:
        raise ValueError(f"{folder / WEIGHTS}: {path} has {values.shape[1]} reflections of {values.shape[0]} inputs: too many")
    if config.apply_GS:  # up to their signs, which a reflection ignores, QR's columns are Gram-Schmidt's
        values = torch.linalg.qr(values.double()).Q.float()
    return StoredAdapter("householder", values.shape[1], {"oft_R": values})


def is_target(config: PeftConfig, path: str) -> bool:
    """Whether a PEFT configuration means the module at `path`."""
    return bool(check_target_module_exists(config, path))


def write_folder(folder: Path, adapters: Mapping[str, StoredAdapter], base_name: str | None, config_file: str = CONFIG) -> None:
    """Write modules' adapters, alike in their settings, as a folder that stock PEFT loads.

    Args:
        folder: a new folder.
        adapters: by module path.
        base_name: the base model's hub name, for PEFT's AutoPeftModel.
        config_file: another name hides the folder from PEFT, for what its form cannot say.
    """
    ((kind, size, alpha, dropout, terms, block_share),) = {adapter.settings for adapter in adapters.values()}
    common = dict(target_modules=list(adapters), base_model_name_or_path=base_name, inference_mode=True)
    if kind == "lora":
        config = LoraConfig(r=size, lora_alpha=alpha, lora_dropout=dropout, **common)
    elif kind in ("cayley", "cayley_neumann"):
        common |= dict(num_cayley_neumann_terms=terms) if terms is not None else {}
        common |= dict(module_dropout=dropout, block_share=block_share, use_cayley_neumann=terms is not None)
        config = OFTConfig(oft_block_size=size, **common)
    else:
        config = HRAConfig(r=size, **common)
    suffixes = {name: suffix for suffix, name in _PEFT_KEYS[config.peft_type.value].items()}
    weights = {}
    for path, adapter in adapters.items():
        for name, tensor in adapter.tensors.items():
            tensor = tensor.detach().float().cpu()
            weights[f"{PREFIX}{path}{suffixes[name]}"] = -tensor if kind == "cayley" else tensor.contiguous()
    folder.mkdir()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    content = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    (folder / config_file).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
