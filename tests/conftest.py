"""What several test files share: the tiny base, and a few products drawn once."""

import random

import pytest
import torch

from vlftlib.forms import Example
from vlftlib.models import TINY_BASE, load_model, load_processor
from vlftlib.samples import QUESTION, draw_product, random_product, shop_floor


@pytest.fixture
def base():
    """A fresh tiny base, which the test may change."""
    return load_model(TINY_BASE)


@pytest.fixture(scope="session")
def processor():
    return load_processor(TINY_BASE)


def make_examples(folder, count: int, seed: int = 5, catalogue: bool = False) -> list[Example]:
    rng, made = random.Random(seed), []
    for i in range(count):
        product = random_product(rng)
        picture = draw_product(product, rng)
        path = folder / f"{i}.png"
        (picture if catalogue else shop_floor(picture, rng)).save(path)
        content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": product.answer}]}
        made.append(Example((str(path),), [{"role": "user", "content": content}, answer], str(path), 1))
    return made


@pytest.fixture(scope="session")
def draw_examples():
    return make_examples


@pytest.fixture(scope="session")
def examples(tmp_path_factory):
    """Sixteen shop-floor pictures with their answers."""
    return make_examples(tmp_path_factory.mktemp("shop_floor"), 16)


@pytest.fixture(autouse=True)
def same_random_numbers():
    torch.manual_seed(0)
