"""Models that `fully_shard` (FSDP2) has split over processes: whole tensors for files, and files back into parts.

A whole tensor is put together by all processes: each of them calls these functions, in the same order.
"""

import contextlib
import os
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from vlftlib.attach import adapter_parameters
from vlftlib.forms import Example


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds only a part of the model, and takes part in every forward."""
    return isinstance(model, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """The tensor of all parts; one that isn't split is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, split as `like` is; each process has the same whole one."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@contextlib.contextmanager
def whole_adapters(model: nn.Module):
    """Inside a `with` block the model's adapters are whole, to be saved; it can't run there."""
    parts = [(name, parameter) for name, parameter, *_ in adapter_parameters(model) if isinstance(parameter, DTensor)]

    def put(name: str, parameter: nn.Parameter) -> None:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._parameters[leaf] = parameter  # fully_shard watches over assignments

    for name, parameter in parts:
        put(name, nn.Parameter(whole(parameter.detach()), parameter.requires_grad))
    try:
        yield
    finally:
        for name, parameter in parts:
            put(name, parameter)


def whole_state(optimizer: torch.optim.Optimizer) -> dict:
    """The optimizer's state dict with whole tensors."""
    saved = optimizer.state_dict()
    states = {index: {key: whole(value) for key, value in state.items()} for index, state in saved["state"].items()}
    return saved | {"state": states}


def split_state(saved: dict, optimizer: torch.optim.Optimizer) -> dict:
    """A state dict of `whole_state` as this process's optimizer loads it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def split(parameter: Tensor, state: dict) -> dict:
        return {key: split_like(value, parameter) if value.shape == parameter.shape else value for key, value in state.items()}

    return saved | {"state": {index: split(parameters[index], state) for index, state in saved["state"].items()}}


def check_sharding(accelerator: Accelerator, model: nn.Module, examples: Iterable[Example]) -> None:
    """Refuse what would be left out in silence, or hang.

    Args:
        accelerator: the run's.
        model: with its adapters, not split yet.
        examples: all that the model will see.

    Raises:
        ValueError: sharding was asked for where accelerate doesn't shard, FSDP1, a scale that several blocks share, or an
            example without a picture.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
            raise ValueError(
                f"FSDP was asked for, on {accelerator.device.type} with {accelerator.num_processes} process(es): accelerate shards "
                "between several accelerators only and would train without; take a DDP configuration"
            )
        return
    if plugin.fsdp_version != 2:
        raise ValueError("FSDP1 flattens parameters, which rotations can't be read from: set fsdp_version: 2")
    if shared := [item.name for item in adapter_parameters(model) if item.name.endswith("oft_scale")]:
        raise ValueError(f"FSDP splits a parameter in one block, and the whole tower shares {shared[0]}: use DDP, or scale=False")
    if without := next((example for example in examples if not example.images), None):
        raise ValueError(
            f"{without.file} line {without.line} has no picture: with FSDP all processes run the vision tower together, or none "
            "gets on; use DDP, or leave such rows out"
        )
