"""fp16 with dynamic loss scaling by torch_npu's own GradScaler, as accelerate uses it on an NPU."""

import pytest

SETUP = """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import GradScalerKwargs, set_seed
    from vlftlib.devices import platform_policy

    policy = platform_policy("npu")

    def prepare(optimizer="AdamW", **options):
        accelerator = Accelerator(
            mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=policy.loss_scale, growth_interval=2)]
        )
        set_seed(0)
        model = torch.nn.Linear(4, 4)
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, **options))

    def step(accelerator, model, optimizer, factor=1.0):
        before = model.weight.detach().clone()
        loss = (model(torch.ones(2, 4, device="npu")) * factor).float().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return {
            "scale": accelerator.scaler.get_scale(),
            "skipped": optimizer.step_was_skipped,
            "changed": not torch.equal(before, model.weight),
        }
"""


def test_overflow_skips_and_halves_recovery_grows_and_state_resumes(on_npu, tmp_path):
    found = on_npu(
        SETUP
        + f"""
    first = prepare()
    found["scaler"], found["dtype"] = type(first[0].scaler).__module__, str(first[1].weight.dtype)
    found["steps"] = [step(*first, factor) for factor in (1.0, 1e4, 1e4, 1.0, 1.0)]
    first[0].save_state({str(tmp_path / "state")!r})
    found["next"] = step(*first)
    second = prepare()
    second[0].load_state({str(tmp_path / "state")!r})
    found["resumed"] = step(*second)
    found["same"] = torch.equal(first[1].weight, second[1].weight)
    """
    )
    assert found["scaler"].startswith("torch_npu") and found["dtype"] == "torch.float32"
    assert [entry["skipped"] for entry in found["steps"]] == [False, True, True, False, False]
    assert [entry["changed"] for entry in found["steps"]] == [True, False, False, True, True]
    assert [entry["scale"] for entry in found["steps"]] == [2**16, 2**15, 2**14, 2**14, 2**15]
    assert found["next"] == found["resumed"] and found["same"] is True


def test_torchs_fused_adam_is_what_the_policy_refuses(on_npu):
    found = on_npu(
        SETUP
        + """
    try:
        step(*prepare(fused=True))
    except TypeError as error:
        found["error"] = str(error)
    """
    )
    assert "unexpected keyword argument 'grad_scaler'" in found["error"]
