import pytest
import torch

from vlftlib.evaluation import UNPARSABLE, ask, evaluate, parse_answer, predict, score, text_similarity
from vlftlib.forms import Example
from vlftlib.models import TINY_BASE, load_model, load_processor
from vlftlib.samples import QUESTION, draw_product, random_product


@pytest.mark.parametrize(
    "text, attributes",
    [
        ("colour: red, defect: none", {"colour": "red", "defect": "none"}),
        ("colour: red\ndefect: none\n", {"colour": "red", "defect": "none"}),
        (" a:b ; c : d:e", {"a": "b", "c": "d:e"}),
        ('{"colour": "red", "count": 3}', {"colour": "red", "count": "3"}),
        ("a red one", None),
        ("colour: red, and so on", None),
        ("", None),
        (": red", None),
        ("[1, 2]", None),
        ("3", None),
    ],
)
def test_parsing(text, attributes):
    assert parse_answer(text) == attributes


def test_scores_by_hand():
    expected = ["c: red, d: a", "c: red, d: b", "c: blue, d: a", "c: blue, d: a"]
    given = ["d: a, c: red", "c: blue, d: b", "c: blue", "nonsense"]
    result = score(expected, given, split="test")
    assert result.accuracy == 0.25
    assert result.unparsable == 2  # one lacks an attribute, one has none
    assert result.attributes["c"].accuracy == 0.5
    # red: precision 1, recall 1/2; blue: precision 1/2, recall 1/2
    assert result.attributes["c"].macro_f1 == pytest.approx((2 / 3 + 1 / 2) / 2)
    # a: precision 1, recall 1/3; b: 1 and 1; what can't be parsed is no class of its own
    assert result.attributes["d"].macro_f1 == pytest.approx((1 / 2 + 1) / 2)
    assert result.attributes["d"].classes == 2


def test_text_without_attributes_is_compared_as_text():
    result = score(["a cat", "two dogs"], ["a cat ", "2 dogs"], split="test")
    assert (result.accuracy, result.attributes, result.unparsable) == (0.5, {}, 0)
    assert result.as_dict()["metrics"]["chrF"] == result.metrics["chrF"]


def test_free_text_by_its_characters():
    """By hand: of "abcd" and "abce" 3 of 4 characters, 2 of 3 pairs, 1 of 2 triples agree, none of 1 fours; F is their mean."""
    assert text_similarity([("abcd", "abce")]) == pytest.approx((3 / 4 + 2 / 3 + 1 / 2 + 0) / 4)
    assert text_similarity([("a red bolt", "a red bolt"), ("螺栓有裂纹", "螺栓有裂纹")]) == 1
    near, far = (text_similarity([("the bolt has a crack", given)]) for given in ("a crack in the bolt", "all is well"))
    assert near > 0.5 > 2 * far
    mixed = score(["c: red", "a cat"], ["c: red", "a cot"], split="test")
    assert mixed.metrics["chrF"] == text_similarity([("a cat", "a cot")]) and "c" in mixed.attributes
    assert score(["c: red"], ["c: blue"], split="test").metrics == {}


def test_the_mark_for_unparsable_is_no_possible_value():
    assert score([f"a: {UNPARSABLE}"], ["?"], split="test").accuracy == 0


@pytest.fixture(scope="module")
def base():
    return load_model(TINY_BASE), load_processor(TINY_BASE)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    import random

    rng, folder, made = random.Random(5), tmp_path_factory.mktemp("pictures"), []
    for i, size in enumerate([(224, 224), (100, 300), (336, 140), (224, 224), (60, 60)]):
        product = random_product(rng)
        path = folder / f"{i}.png"
        draw_product(product, rng).resize(size).save(path)
        content = [{"type": "image"}, {"type": "text", "text": QUESTION + " Please." * (i % 3)}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": product.answer}]}
        made.append(Example((str(path),), [{"role": "user", "content": content}, answer], str(path), 1))
    return made


def test_batched_generation_equals_one_by_one(base, pictures):
    """Different sizes and questions, so that left padding matters; compared by tokens' logits too, not by the answers alone."""
    model, processor = base
    alone = predict(model, processor, pictures, batch_size=1)
    assert predict(model, processor, pictures, batch_size=5) == alone
    assert predict(model, processor, pictures, batch_size=2) == alone
    assert len(set(alone)) > 1


def test_evaluation_reads_catalogue_pictures(base, pictures):
    result = evaluate(*base, pictures[:1], split="catalogue")
    assert result.accuracy == 1 and result.images_per_second > 0
    assert list(result.attributes) == ["colour", "defect", "number"]
    with pytest.raises(ValueError, match="no example"):
        evaluate(*base, [])


def test_the_models_mode_is_kept(base, pictures):
    model, processor = base
    model.train()
    predict(model, processor, pictures[:1])
    assert model.training
    model.eval()


def test_ask_answers_what_can_be_read(base, pictures, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    path = pictures[0].images[0]
    (_, error), (same, answer) = ask(*base, [tmp_path / "broken.png", path], QUESTION)
    assert "broken.png" in str(error) and same == path
    assert answer == pictures[0].answer
    with torch.no_grad():
        assert ask(*base, [], QUESTION) == []
