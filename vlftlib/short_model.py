"""A full model cut to one layer of each kind, with inputs of true shape for each of its parts."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

GRID = (12, 20)  # patches of the random picture: the windows at its edges are cut, as in most real pictures
VISION_PARTS, TEXT_PARTS = ("norm1", "attn", "mlp"), ("input_layernorm", "self_attn", "mlp")


def build_shell(model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, dict[str, str]]:
    """A copy of a model on the CPU with one layer of each kind, its frozen weights rounded to a dtype.

    Returns:
        The short model, and for each part to check its path there and its name in the full model.
    """
    full = next(module for module in model.modules() if hasattr(module, "lm_head") and hasattr(module, "config"))
    vision, text = full.model.visual, full.model.language_model
    full_attention = set(vision.fullatt_block_indexes)
    blocks = one_of_each(vision.blocks, lambda i: i in full_attention)
    layers = one_of_each(text.layers, lambda i: text.config.layer_types[i])
    config = copy.deepcopy(full.config)
    config.vision_config.depth = len(blocks)
    config.vision_config.fullatt_block_indexes = [k for k, i in enumerate(blocks) if i in full_attention]
    config.text_config.num_hidden_layers = len(layers)
    config.text_config.layer_types = [text.config.layer_types[i] for i in layers]
    with torch.device("meta"):
        shell = type(full)._from_config(config, attn_implementation=full.config._attn_implementation)
    # Attention layers ask their own config how to attend, so the copies must hold the short model's.
    memo = {id(full.config): shell.config}
    memo |= {id(full.config.vision_config): shell.config.vision_config, id(full.config.text_config): shell.config.text_config}
    names = {}

    def take(owner: str, part: str, index: Sequence[int] | None = None, parts: Sequence[str] = ()) -> None:
        source, target = full.get_submodule(owner), shell.get_submodule(owner)
        if index is None:
            setattr(target, part, copy.deepcopy(getattr(source, part), memo))
            names[f"{owner}.{part}".lstrip(".")] = f"{owner}.{part}".lstrip(".")
            return
        setattr(target, part, nn.ModuleList(copy.deepcopy(getattr(source, part)[i], memo) for i in index))
        for k, i in enumerate(index):
            names.update({f"{owner}.{part}.{k}.{piece}": f"{owner}.{part}.{i}.{piece}" for piece in parts})

    for part in ("patch_embed", "rotary_pos_emb", "merger"):
        take("model.visual", part)
    take("model.visual", "blocks", blocks, VISION_PARTS)
    for part in ("embed_tokens", "rotary_emb", "norm"):
        take("model.language_model", part)
    take("model.language_model", "layers", layers, TEXT_PARTS)
    take("", "lm_head")
    names |= adapters_of(shell, names)
    shell.eval().to("cpu")
    adapted = [module for module in shell.modules() if hasattr(module, "base_layer")]
    frozen = {id(parameter) for module in adapted for parameter in module.base_layer.parameters()}
    adapters = {id(parameter) for module in adapted for parameter in module.parameters()} - frozen
    for parameter in shell.parameters():
        if parameter.is_floating_point() and id(parameter) not in adapters:  # adapters stay in float32, as in training
            parameter.data = parameter.data.to(dtype)
    return shell, names


def one_of_each(layers: nn.ModuleList, kind: Callable[[int], object]) -> list[int]:
    """The first index of every kind of layer: by `kind`, by its modules' classes and its parameters' shapes."""
    first = {}
    for i, layer in enumerate(layers):
        modules = tuple((name, type(module)) for name, module in layer.named_modules())
        shapes = tuple((name, parameter.shape, parameter.requires_grad) for name, parameter in layer.named_parameters())
        first.setdefault((kind(i), modules, shapes), i)
    return list(first.values())


def adapters_of(shell: nn.Module, names: dict[str, str]) -> dict[str, str]:
    """One adapted linear layer for every class and size, under its name in the full model."""
    found = {}
    for path, module in shell.named_modules():
        owner = next((part for part in names if path.startswith(f"{part}.")), None)
        if owner and hasattr(module, "base_layer"):
            found.setdefault((type(module), module.base_layer.weight.shape), (path, names[owner] + path.removeprefix(owner)))
    return dict(found.values())


def random_inputs(config, seed: int) -> dict[str, Tensor]:
    """A batch of three rows, each a random picture in random text: one of full length, one padded right, one padded left."""
    generator = torch.Generator().manual_seed(seed)
    vision, (height, width), rows = config.vision_config, GRID, 3
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    images = height * width // vision.spatial_merge_size**2
    special = [config.image_token_id, config.video_token_id, config.vision_start_token_id]
    words = torch.tensor([word for word in range(256) if word not in special])
    ids = words[torch.randint(len(words), (rows, images + 12), generator=generator)]
    attention_mask = torch.ones_like(ids)
    attention_mask[1, -5:] = 0
    attention_mask[2, :5] = 0
    ids[:, 5], ids[:, 6 : 6 + images] = config.vision_start_token_id, config.image_token_id
    return {
        "input_ids": ids,
        "attention_mask": attention_mask,
        "labels": ids.masked_fill(attention_mask == 0, -100),
        "pixel_values": torch.randn(rows * height * width, patch, generator=generator),
        "image_grid_thw": torch.tensor([[1, height, width]] * rows),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
        "use_cache": False,
    }


def capture(shell: nn.Module, names: dict[str, str], inputs: dict[str, Tensor]) -> dict[str, tuple]:
    """Arguments and keyword arguments of every part in a forward of the whole in float32, by path."""
    whole, captured, hooks = on_cpu_in_float32(shell), {}, []
    for path in names:

        def keep(module, args, kwargs, path=path):
            captured.setdefault(path, tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs)))

        hooks.append(whole.get_submodule(path).register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad():
        whole(**inputs)
    return captured


def on_cpu_in_float32(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).to(device="cpu", dtype=torch.float32)
