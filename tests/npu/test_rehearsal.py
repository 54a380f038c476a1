"""The stand-in itself: what is torch_npu's own on it, and what vlftlib makes of it."""

from pathlib import Path

import pytest

from vlftlib import rehearsal

CACHE = Path(__file__).parents[2] / rehearsal.CACHE
FOREIGN = str(Path(__file__).parent / "foreign.py")

ERRORS = """
    def error(fn):
        try:
            fn()
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}"
"""


def test_torch_npu_is_itself(on_npu):
    found = on_npu(
        ERRORS
        + """
    import torch  # alone, as in a script for an Ascend server
    import torch.nn.functional as F

    torch.manual_seed(0)
    x = torch.randn(3, 4, device="npu")
    found["device"], found["name"] = str(x.device), torch.npu.get_device_name(0)
    found["double"] = str(x.double().dtype)
    found["fallback"] = error(lambda: torch.linalg.inv(torch.eye(3, device="npu")))
    with torch.autocast("npu", torch.float16):
        found["autocast"] = str((x @ x.T).dtype)
    w = torch.randn(4, 2, requires_grad=True)
    on_device = w.detach().to("npu").requires_grad_()
    q = torch.randn(1, 2, 6, 8)
    for leaf, place in ((w, "cpu"), (on_device, "npu")):
        attended = F.scaled_dot_product_attention(*[q.to(place)] * 3, is_causal=True).mean()
        (F.layer_norm(x.to(place) @ leaf, (2,)).pow(3).sum() * attended).backward()
    found["gradient"] = (on_device.grad.cpu() - w.grad).abs().max().item()
    before, cpu_state = torch.npu.get_rng_state(), torch.get_rng_state()
    dropped = F.dropout(torch.ones(64, device="npu"))
    found["cpu stream untouched"] = torch.equal(cpu_state, torch.get_rng_state())
    again = F.dropout(torch.ones(64, device="npu"))
    torch.npu.set_rng_state(before)
    found["repeats"] = torch.equal(dropped, F.dropout(torch.ones(64, device="npu")))
    found["goes on"] = not torch.equal(dropped, again)
    """
    )
    assert found.pop("gradient") < 1e-6
    assert "linalg_inv_ex" in found["fallback"] and "TORCH_NPU_FALLBACK_CPU_DISABLE=1" in found.pop("fallback")
    assert found == {
        "device": "npu:0",
        "name": "Ascend910B2",
        "double": "torch.float32",
        "autocast": "torch.float16",
        "cpu stream untouched": True,
        "repeats": True,
        "goes on": True,
    }


def test_fallbacks_can_be_allowed(on_npu):
    found = on_npu(
        """
    import torch
    from vlftlib.operators import ascend_fallbacks
    found["inverse"] = torch.linalg.inv(2 * torch.eye(2, device="npu")).tolist()
    # What the running torch_npu has registered, and no table, says so here.
    found["named"] = [fallback.operator for fallback in ascend_fallbacks(lambda: torch.linalg.inv(torch.eye(2, device="npu")))]
    found["made of others"] = len(ascend_fallbacks(lambda: torch.diag_embed(torch.ones(2, device="npu"))))
    """,
        allow_fallbacks=True,
    )
    assert found["inverse"] == [[0.5, 0.0], [0.0, 0.5]]
    assert found["named"] == ["aten::linalg_inv_ex"] and found["made of others"] == 0


def test_devices(on_npu):
    found = on_npu(
        """
    from vlftlib.devices import apply_policy, describe_environment, get_device, is_rehearsal, platform_policy
    import torch

    found["device"], found["rehearsal"] = str(get_device()), is_rehearsal()
    policy = platform_policy(get_device("npu"))
    found["policy"] = policy.as_dict()
    found["changes"], found["again"] = apply_policy(policy), apply_policy(policy)
    found["hf32"] = torch.npu.conv.allow_hf32
    found["bf16"] = platform_policy("npu", "bf16").precision
    found["environment"] = describe_environment()
    """
    )
    assert found["device"] == "npu:0" and found["rehearsal"] is True
    assert found["policy"]["precision"] == "fp16" and found["policy"]["loss_scale"] == 65536 and found["bf16"] == "bf16"
    assert "HCCL_CONNECT_TIMEOUT: not set -> 600" in found["changes"] and found["again"] == []
    assert "torch.npu.conv.allow_hf32: True -> False" in found["changes"] and found["hf32"] is False
    described = found["environment"]
    assert described["device"] == "npu (rehearsal)" and described["device_name"] == "Ascend910B2"
    assert described["torch_npu"] == rehearsal.TORCH_NPU and described["cann"] == "none (stand-in)"


@pytest.mark.parametrize(
    "options, device, message",
    [
        ({"chip": "Ascend910A"}, "npu:0", "Ascend910A has no bf16"),
        ({"devices": 2}, "npu:1", None),
        ({"devices": 1}, "npu:1", "there are 1 NPUs, npu:0 to npu:0"),
        ({"devices": 0}, "npu", "CANN is present and shows no device"),
    ],
)
def test_other_machines(on_npu, options, device, message):
    found = on_npu(
        ERRORS
        + f"""
    from vlftlib.devices import get_device, platform_policy
    found["error"] = error(lambda: platform_policy(get_device({device!r}), "bf16"))
    """,
        **options,
    )
    assert found["error"] is None if message is None else message in found["error"]


def test_bad_calls_say_so(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no script nothing.py"):
        rehearsal.rehearse(["nothing.py"])
    with pytest.raises(ValueError, match="rehearse what"):
        rehearsal.rehearse([])
    monkeypatch.setattr(rehearsal, "version_of", lambda package: "2.9.0")
    with pytest.raises(RuntimeError, match="torch 2.9.0 is installed, and torch_npu 2.13.0 takes torch 2.13.0"):
        rehearsal.prepare(tmp_path)


def test_doctor(on_npu):
    found = on_npu(
        """
    from vlftlib.doctor import diagnose
    found.update(diagnose("npu").as_dict())
    found["text"] = str(diagnose("npu"))
    """
    )
    lines = {finding["name"]: finding["value"] for finding in found["findings"]}
    assert found["faults"] == [] and lines["device"] == "npu (rehearsal), Ascend910B2"
    assert "stand-in" in lines["CANN"] and lines["torch_npu"] == rehearsal.TORCH_NPU
    assert lines["compute"].startswith("matmul, softmax, backward: relative error") and " s" not in lines["compute"][-4:]


@pytest.mark.slow
def test_operators_on_the_command_line():
    words = ["-m", "vlftlib", "operators", "--device", "npu:0", "--recipe", "oft_vision", "--precision", "fp16"]
    done = rehearsal.rehearse(words, cache=CACHE, capture=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert "operators on npu:0 (rehearsal), against the CPU in float32" in lines and "0 of 18 failed" in lines
    assert any("model.visual.blocks.0.attn.proj" in line for line in lines) and " ms" not in done.stdout
    # The chip's own attention kernel is beyond the stand-in, which is said.
    assert any(line.startswith("flash_attention_2") and "aclnnFlashAttention" in line for line in lines)
    assert lines[-1] in ("recommended: sdpa", "recommended: eager")


@pytest.mark.slow
def test_a_foreign_script_with_workers_and_scaling():
    done = rehearsal.rehearse([FOREIGN], cache=CACHE, capture=True)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss")]
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(losses) == 12 and losses[-1] < 0.5 * losses[0] and "on Ascend910B2" in done.stdout


def test_a_foreign_script_with_an_operator_that_falls_back_is_stopped_with_its_name():
    done = rehearsal.rehearse([FOREIGN, "--inverse"], cache=CACHE, capture=True)
    assert done.returncode == 1 and "linalg_inv_ex.inverse' would execute its main computation on CPU" in done.stderr
