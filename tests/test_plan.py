"""The plan against bytes that are really kept, on blocks of the real width; and what a user reads off it."""

import weakref
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from vlftlib import mapping, oft
from vlftlib.adapters import apply_recipe, count_parameters
from vlftlib.dataset import labelled_only
from vlftlib.memory import Batch, LiveBytes, StepCounter, checkpoint_blocks
from vlftlib.models import empty_model, full_size_config
from vlftlib.plan import FRAGMENTATION, GIB, plan_memory, weight_bytes
from vlftlib.plan_reported import WAYS, compare_reported
from vlftlib.recipes import LoRA, OFT, Recipe, get_recipe
from vlftlib.tiny_base import build_model, build_tokenizer

README = Path(__file__).parent.parent / "README.md"
SIDE = 8  # patches along a picture's side: 16 image tokens
KINDS = {
    "no adapters": (),
    "LoRA": (LoRA(("text.attention", "vision.attention"), r=32, alpha=64, dropout=0.05),),
    "LoRA on the last vision block": (LoRA(("vision.attention",), r=8, alpha=8, last_n_blocks=1),),
    "OFT on inputs": (OFT(("vision.attention", "vision.merger"), block_size=64),),
    "OFT on weights": (OFT(("text.attention",), block_size=64),),
    "Householder": (OFT(("text.attention", "text.mlp"), parametrization="householder", num_reflections=8, scale=True),),
}


def narrow(size: str, depth: int = 2, layers: int = 2):
    """The real widths, few blocks (the last vision block is a full one), and a short vocabulary, to be quick."""
    config = full_size_config(size)
    config.vision_config.depth, config.vision_config.fullatt_block_indexes = depth, [depth - 1]
    text = config.text_config
    text.num_hidden_layers, text.vocab_size, text.layer_types = layers, 4096, text.layer_types[:layers]
    config.image_token_id, config.vision_start_token_id, config.video_token_id = 4090, 4091, 4092
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    return config


def batch_for(config, examples: int, text_tokens: int, side: int = SIDE) -> dict[str, torch.Tensor]:
    """A padded micro-batch of one picture an example."""
    pictures = [config.vision_start_token_id] + [config.image_token_id] * (side // 2) ** 2
    ids = torch.tensor([pictures + [1] * (text_tokens - 1)] * examples)
    attended = torch.ones_like(ids)
    attended[0, -2:] = 0
    shown = (ids == config.image_token_id).long()
    labels = ids.masked_fill(shown.bool(), -100)
    pixels = torch.zeros(examples * side**2, 1176)
    grid = torch.tensor([[1, side, side]] * examples)
    texts = dict(input_ids=ids, attention_mask=attended, labels=labels, mm_token_type_ids=shown)
    return labelled_only(texts | dict(pixel_values=pixels, image_grid_thw=grid))


def really_kept(model, batch, monkeypatch) -> int:
    """Bytes kept after a real forward, each storage once: saved tensors, inputs of checkpointed blocks, mapped rotations."""
    before = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *batch.values())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in before:
            kept[storage._cdata] = weakref.ref(storage)  # checkpointing also saves what a frozen block drops at once
        return tensor

    def keep_input(module, args, output):
        if module.gradient_checkpointing and output.requires_grad:
            keep(args[0])

    monkeypatch.setattr(mapping, "_same", keep)  # which otherwise hides the maps' saved tensors from hooks around it
    for block in (*model.model.visual.blocks, *model.model.language_model.layers):
        block.register_forward_hook(keep_input)
    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    for module in model.modules():
        if isinstance(module, oft.OFTLinear):
            [keep(factor) for factor in module.slot.factors]
    assert loss.isfinite()
    return sum(storage.nbytes() for reference in kept.values() if (storage := reference()) is not None)


def adapted(config, kind: str, checkpointed: bool):
    model = empty_model(config).to(torch.bfloat16).train().requires_grad_(False)
    if KINDS[kind]:
        apply_recipe(model, Recipe("kind", "", "", KINDS[kind], learning_rate=1e-4, chosen=()))
    if checkpointed:
        checkpoint_blocks(model)
    return model


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("size", ["3B", pytest.param("7B", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_parts_of_real_width_keep(kind, size, checkpointed, monkeypatch):
    config, text_tokens = narrow(size), 24
    if kind == "OFT on weights":  # k and v have 256 outputs on 3B, 512 on 7B: with more tokens their weight is rotated
        text_tokens = 248
    real = adapted(config, kind, checkpointed).to_empty(device="cpu")
    for tensor in (*real.parameters(), *real.buffers()):
        tensor.data = torch.zeros(tensor.shape, dtype=tensor.dtype)  # only touched where read, unlike zero_()
    with monkeypatch.context() as patch:
        kept = really_kept(real, batch_for(config, 2, text_tokens), patch)
    del real
    counter = StepCounter(adapted(config, kind, checkpointed), torch.bfloat16)
    costs = counter.count(Batch(2, 2, SIDE**2, SIDE**2 // 4 + text_tokens, True, text_tokens - 1))
    planned = sum(cost.kept for cost in costs.values())
    print(f"{size}, {kind}: kept {kept:,}, planned {planned:,}")
    assert planned == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("name", ["lora_dual", "oft_dual"])
def test_the_peak_of_a_whole_step(name, checkpointed):
    overrides = {"block_size": 64} if name == "oft_dual" else {}
    recipe = get_recipe(name, batch_size=4, **overrides)
    model = build_model(build_tokenizer())
    apply_recipe(model, recipe)
    model.train()
    if checkpointed:
        checkpoint_blocks(model)
    batch = batch_for(model.config, 4, 400)
    model(**batch).loss.backward()  # gradients are there from now on
    with LiveBytes() as live:
        loss = model(**batch).loss
        loss.backward()

    words = dict(max_pixels=(SIDE * 14) ** 2, text_tokens=400, precision="float32")
    plan = plan_memory(model.config, recipe, gradient_checkpointing=checkpointed, **words)
    fixed = ("weights", "adapters", "their", "optimizer", "batch", "allowance")
    planned = sum(size for part, size in plan.parts.items() if not part.startswith(fixed))
    print(f"{name}: peak {live.peak:,}, planned {planned:,}")
    assert planned == pytest.approx(live.peak, rel=0.1)


def test_live_bytes_follow_storages():
    held = torch.ones(1000)
    with LiveBytes() as live:
        held.add_(1)
        assert live.now == 0  # from before
        twice = held * 2
        view = twice[:10]
        del twice
        assert live.now == 4000
        del view
    assert (live.now, live.peak) == (0, 4000)


def activations(plan) -> dict[str, int]:
    words = {"vision": "vision blocks", "merger": "merger", "text": "text layers"}
    return {part: next(s for n, s in plan.parts.items() if n.startswith("activations") and w in n) for part, w in words.items()}


def test_what_lies_below_the_first_adapter_keeps_nothing():
    config = narrow("3B", depth=8)
    text_only = activations(plan_memory(config, get_recipe("lora_text"), batch_size=1))
    assert text_only["vision"] == text_only["merger"] == 0 < text_only["text"]
    merger = activations(plan_memory(config, get_recipe("hybrid_staged"), batch_size=1))
    assert merger["vision"] == 0 < merger["merger"]
    last = activations(plan_memory(config, get_recipe("lora_text_vision"), batch_size=1))
    every = activations(plan_memory(config, get_recipe("lora_text_vision", last_n_blocks=8), batch_size=1))
    assert last["vision"] == pytest.approx(every["vision"] * 6 / 8, rel=0.05)
    assert not any(activations(plan_memory(config, None)).values())


def test_checkpointing_keeps_an_input_for_each_block():
    config = narrow("3B", depth=3, layers=4)
    kept = activations(plan_memory(config, get_recipe("oft_vision"), batch_size=2, gradient_checkpointing=True))
    assert kept["vision"] == pytest.approx(3 * 2 * 1024 * 1280 * 2, rel=0.01)
    assert kept["text"] == pytest.approx(4 * 2 * (256 + 64) * 2048 * 2, rel=0.01)


@pytest.mark.parametrize("size", ["3B", "7B"])
def test_weights_adapters_and_optimizer(size):
    config, recipe = narrow(size, depth=6), get_recipe("lora_text_vision")
    model = empty_model(config)
    apply_recipe(model, recipe)
    count = count_parameters(model)
    parts = plan_memory(config, recipe, batch_size=1).parts
    assert parts["weights"] == 2 * (count.total - count.trainable)
    assert parts["adapters, float32"] == parts["their gradients"] == 4 * count.trainable
    assert parts["optimizer (AdamW, two moments)"] == 8 * count.trainable
    assert plan_memory(config, recipe, batch_size=1, precision="float32").parts["weights"] == 2 * parts["weights"]


def test_quantised_weights_leave_embeddings_head_and_norms():
    model = empty_model(full_size_config("7B")).to(torch.bfloat16)
    whole, four, eight = (weight_bytes(model, bits) for bits in (None, 4, 8))
    tables = 2 * 2 * 152064 * 3584
    kept = four["weights not quantised (embeddings, head, norms, biases)"]
    assert tables < kept < tables + 10e6 and eight["weights not quantised (embeddings, head, norms, biases)"] == kept
    quantised = (whole["weights"] - kept) / 2  # weights that are quantised
    assert four["weights in 4 bits"] == pytest.approx(quantised * (1 / 2 + 4 / 64), rel=1e-3)
    assert eight["weights in 8 bits"] == pytest.approx(quantised, rel=1e-2)


def test_four_bits_are_as_many_as_bitsandbytes_holds():
    nn = pytest.importorskip("bitsandbytes", reason="bitsandbytes holds the 4-bit weights").nn
    model = build_model(build_tokenizer())
    planned, held = weight_bytes(model, 4)["weights in 4 bits"], 0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
            features = module.in_features, module.out_features
            layer = nn.Linear4bit(*features, quant_type="nf4", compress_statistics=False).to("cpu")
            held += layer.weight.nbytes + layer.weight.quant_state.absmax.nbytes
    assert planned == held


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_the_largest_batch_is_where_the_device_ends(checkpointed):
    words = dict(max_pixels=112 * 112, gradient_checkpointing=checkpointed, device_bytes=2 * GIB)
    config, recipe = narrow("3B"), get_recipe("oft_vision")
    most = plan_memory(config, recipe, **words).largest_batch
    here, above = (plan_memory(config, recipe, batch_size=size, **words) for size in (most, most + 1))
    assert here.total <= 2 * GIB < above.total and here.fits and not above.fits
    assert here.largest_batch == above.largest_batch == most > 8


def test_advice_saves_what_it_says_until_it_fits():
    words = dict(precision="float32", attention="eager")
    config, recipe = narrow("7B"), get_recipe("lora_dual")
    asked = plan_memory(config, recipe, **words)
    device = int(1.6 * GIB)  # 4-bit weights and the context take 1
    plan = plan_memory(config, recipe, device_bytes=device, **words)
    assert plan.total == asked.total and plan.largest_batch == 0 and not plan.fits
    first = ("sdpa in place", "gradient checkpointing", "batch size 1 and 8 times", "bf16", "4-bit")
    assert len(plan.advice) >= 4 and all(change.startswith(start) for (change, _), start in zip(plan.advice, first))
    assert plan.total - sum(saved for _, saved in plan.advice) <= device
    assert all(saved > 0 for _, saved in plan.advice)
    assert "does not fit; largest batch as it is: none" in str(plan)


def test_a_device_that_nothing_helps():
    plan = plan_memory(narrow("3B"), get_recipe("lora_text"), device_bytes=GIB // 2)
    assert "even so it does not fit" in str(plan)


@pytest.mark.parametrize("weights", ["4bit", "8bit"])
def test_quantised_weights_in_a_plan(weights):
    config, recipe = narrow("3B"), get_recipe("hybrid_staged")
    plain, plan = (plan_memory(config, recipe, batch_size=2, weights=word) for word in (None, weights))
    kept, without = activations(plan), activations(plain)
    # in 8 bits every product keeps its input; in 4 bits none does
    assert kept["text"] == without["text"] if weights == "4bit" else kept["text"] > 1.2 * without["text"]
    assert sum(size for name, size in plan.parts.items() if name.startswith("weights")) < plain.parts["weights"]


def test_allowance_is_stated_and_table_adds_up():
    plan = plan_memory(narrow("3B"), get_recipe("lora_text"), batch_size=1)
    text = str(plan)
    assert f"{FRAGMENTATION:.0%} fragmentation" in text and f"{plan.total / GIB:.2f} GiB" in text.splitlines()[-1]
    assert plan.fits is None and plan.largest_batch is None


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(precision="int8"), "precision 'int8': must be one of float32, bf16, fp16"),
        (dict(weights="2bit"), "weights '2bit': must be one of None, 8bit, 4bit"),
        (dict(attention="fast"), "attention 'fast'"),
        (dict(batch_size=0), "batch_size is 0: must be at least 1"),
        (dict(max_pixels=100), r"max_pixels 100 is below one token's 28 x 28 = 784 pixels"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        plan_memory("3B", get_recipe("lora_text"), **values)


def test_a_given_configuration_stays_as_it_is():
    config = narrow("3B")
    before = config.to_json_string()
    plan_memory(config, get_recipe("lora_text"), batch_size=1, attention="eager")
    assert config.to_json_string() == before and config._attn_implementation != "eager"


def test_blocks_alike_are_counted_once():
    model = empty_model(full_size_config("3B")).to(torch.bfloat16).requires_grad_(False)
    apply_recipe(model, get_recipe("lora_text_vision"))
    counter = StepCounter(model, torch.bfloat16)
    costs = counter.count(Batch(2, 2, 256, 80, True, 16))
    assert len(costs) == 32 + 1 + 36 + 1 and len(counter.costs) <= 10


@pytest.mark.slow
def test_the_reports_peaks_and_readmes_table():
    """Each reported peak is near 7B's with checkpointing and all logits, and near no other column's throughout."""
    compared = compare_reported()
    table, _, notes = str(compared).partition("\n\n")
    assert table in README.read_text() and "within 10 %" in notes
    reported = compared.table["reported GB"]
    near = {way: ((compared.table[way] / reported - 1).abs() < 0.1).all() for way in WAYS}
    assert near == {"3B": False, "7B": False, "7B, checkpointed": False, "and all logits": True}
