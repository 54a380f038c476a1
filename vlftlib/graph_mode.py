"""Graph mode: the model's blocks under torch.compile, for devices where starting an operator costs more than computing it.

Blocks are compiled one by one and for the very shapes that come, because what lies between them asks the pictures' grids and
can't be compiled. So every new shape compiles anew: `grids` keeps their number small, and the collator pads texts to multiples
of `TEXT_MULTIPLE`. Only training runs compiled; generation, whose length grows with each token, doesn't.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch

TEXT_MULTIPLE = 64  # tokens
# Graphs that a function may have. torch's own limit, 8, is below a few grids' number for each kind of block, and past it torch
# goes on without compiling and hardly says so; here that is an error.
LIMIT = 64


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The parts that repeat and are most of the work: both towers' blocks; and the merger."""
    parts = next(module for module in model.modules() if hasattr(module, "visual") and hasattr(module, "language_model"))
    return [*parts.visual.blocks, parts.visual.merger, *parts.language_model.layers]


@contextlib.contextmanager
def compiled(model: torch.nn.Module, backend: str | Callable) -> Iterator[None]:
    """A `with` block in which a model's blocks run compiled; names, parameters and hooks stay as they are.

    Args:
        model: with its adapters.
        backend: torch.compile's, as a policy's `graph_backend`.

    Raises:
        RuntimeError: torch has no such backend here. Inside the block torch raises `FailOnRecompileLimitHit` past `LIMIT`.
    """
    import torch._dynamo

    known = torch._dynamo.list_backends(exclude_tags=())
    if isinstance(backend, str) and backend not in known:
        raise RuntimeError(f"graph_mode: torch.compile has no backend {backend!r} here, it has {', '.join(known)}")
    limits = dict(recompile_limit=LIMIT, accumulated_recompile_limit=64 * LIMIT, fail_on_recompile_limit_hit=True)
    blocks = blocks_of(model)
    with torch._dynamo.config.patch(limits):
        for block in blocks:
            block.compile(backend=backend, dynamic=False)
        try:
            yield
        finally:
            for block in blocks:
                block._compiled_call_impl = None  # as nn.Module.compile found it


def uncompiled(model: torch.nn.Module) -> contextlib.AbstractContextManager:
    """A `with` block in which a compiled model runs as it was before."""
    if all(module._compiled_call_impl is None for module in model.modules()):
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
