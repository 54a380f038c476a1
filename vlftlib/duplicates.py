"""Splits of a data set."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from vlftlib.forms import Example


def split_examples(
    examples: Sequence[Example],
    share: float = 0.75,
    stratify: Callable[[Example], Hashable] | None = None,
    seed: int = 0,
) -> tuple[list[Example], list[Example]]:
    """Split examples in two, reproducibly.

    Without `stratify` each example's side hangs on its own pictures and text alone, so adding rows moves none, and the
    first part has about `share` of them. With it, each stratum is cut at `share` exactly, and adding rows can move those
    at the cut.

    Args:
        examples: what to split; the order is kept.
        share: of the first part, between 0 and 1.
        stratify: gives each example's stratum, for instance its answer.
        seed: another seed, another split.

    Returns:
        The first and the second part.

    Raises:
        ValueError: `share` is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"share {share}: give a number between 0 and 1")
    draws = [_draw(example, seed) for example in examples]
    if stratify is None:
        first = [draw < share for draw in draws]
    else:
        strata = defaultdict(list)
        for index, example in enumerate(examples):
            strata[stratify(example)].append(index)
        first = [False] * len(examples)
        for members in strata.values():
            members.sort(key=lambda index: draws[index])
            for index in members[: round(share * len(members))]:
                first[index] = True
    return [e for e, side in zip(examples, first) if side], [e for e, side in zip(examples, first) if not side]


def _draw(example: Example, seed: int) -> float:
    """A number in [0, 1) from what the example is; file names count without their folders, which differ by machine."""
    names = [image if image.startswith("data:") else os.path.basename(image) for image in example.images]
    digest = hashlib.sha256(repr((seed, names, example.messages)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
