import json
import subprocess
import sys

import pytest
import torch

from vlftlib import devices
from vlftlib.__main__ import main
from vlftlib.devices import apply_policy, describe_environment, get_device, platform_policy

ON_CPU_ALONE = devices.npu_fault() is not None and devices.cuda_fault() is not None


@pytest.mark.skipif(not ON_CPU_ALONE, reason="an accelerator is present")
def test_cpu_where_nothing_else_is():
    assert get_device() == torch.device("cpu") == get_device("cpu")


@pytest.mark.skipif(not ON_CPU_ALONE, reason="an accelerator is present")
@pytest.mark.parametrize("name", ["npu", "npu:1", "cuda", torch.device("cuda", 0)])
def test_a_named_device_that_is_missing_raises_with_the_reason(name):
    kind = str(name).partition(":")[0]
    reason = devices.npu_fault() if kind == "npu" else devices.cuda_fault()
    with pytest.raises(RuntimeError) as caught:
        get_device(name)
    assert str(name) in str(caught.value) and reason in str(caught.value)


@pytest.mark.parametrize("name", ["gpu", "mps", "npu:one", ""])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match="must be npu, cuda or cpu"):
        get_device(name)


@pytest.fixture
def broken_torch_npu(tmp_path, monkeypatch):
    """A torch_npu that is installed and finds no CANN, with the error that the real one gives."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("torch_npu", None)  # that it is left out


def test_torch_npu_import_error_is_shown(broken_torch_npu):
    with pytest.raises(RuntimeError, match="libhccl.so: cannot open shared object file"):
        get_device("npu")
    with pytest.warns(UserWarning, match="libhccl.so"):
        get_device()
    with pytest.raises(RuntimeError, match="libhccl.so"):
        get_device("npu")


def test_a_run_on_the_cpu_goes_on_beside_a_torch_npu_that_does_not_load(broken_torch_npu):
    # transformers imports torch_npu wherever it is installed.
    info = broken_torch_npu / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    path = f"import sys; sys.path.insert(0, {str(broken_torch_npu)!r}); "
    arguments = "from transformers import TrainingArguments; print(TrainingArguments(output_dir='x', use_cpu=True).device)"
    command = "from vlftlib.__main__ import main; sys.exit(main(['train', '--recipe', 'none', '--output', 'x', '--device', 'cpu']))"
    for code, status, said in (
        (arguments, 1, ""),
        ("import vlftlib; vlftlib.train; " + arguments, 0, "the NPU is passed over"),
        (command, 1, "error: unknown recipe 'none'"),
    ):
        done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True)
        assert done.returncode == status and said in done.stderr, done.stderr
        assert "libhccl.so" in done.stderr and done.stdout == ("" if status else "cpu\n")


@pytest.mark.parametrize(
    "error, reason",
    [
        (None, "torch_npu is not installed"),
        ("ImportError('libhccl.so: cannot open shared object file')", "libhccl.so"),  # no CANN
        ("Exception('ASCEND_HOME_PATH : /nope does not exist. Please run set_env.sh')", "ASCEND_HOME_PATH : /nope"),
        ("ImportError('libtorch_npu.so: undefined symbol: _ZN3c10')", "undefined symbol"),  # made for another torch
    ],
)
def test_the_operator_check_says_why_there_is_no_npu(error, reason, tmp_path, monkeypatch, capsys):
    if error:
        (tmp_path / "torch_npu.py").write_text(f"raise {error}\n")
        monkeypatch.syspath_prepend(tmp_path)
    elif devices.version_of("torch_npu"):
        pytest.skip("torch_npu is installed")
    assert main(["operators", "--device", "npu"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: device 'npu' can't be used: ") and reason in said and "doctor` looks further" in said
    assert said.count("\n") == 1


def test_cuda_build_beside_torch_npu_is_not_even_imported(broken_torch_npu, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RuntimeError, match="CUDA build"):
        get_device("npu")


def test_autoload_failure_names_the_variable(broken_torch_npu):
    # The entry point makes `import torch` itself fail, as an installed torch_npu does; so it is tried in a fresh process.
    info = broken_torch_npu / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    path = f"import sys; sys.path.insert(0, {str(broken_torch_npu)!r}); "
    for code in (
        "from vlftlib import devices; devices.get_device('cpu')",
        "from vlftlib.__main__ import main; sys.exit(main(['plan', '--recipe', 'lora_text']))",
    ):
        done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True)
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert "libhccl.so" in last and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in last


def test_importing_decides_nothing():
    code = "import sys, vlftlib.devices; assert 'torch' not in sys.modules and 'torch_npu' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def npu_policy(monkeypatch, bf16=True, **arguments):
    fake = type("npu", (), {"is_bf16_supported": lambda: bf16, "get_device_name": lambda index: "Ascend910A"})
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    return platform_policy("npu:0", **arguments)


def test_every_setting_has_a_reason(monkeypatch):
    for policy in (platform_policy("cpu"), platform_policy("cuda"), npu_policy(monkeypatch)):
        for name in [*policy.as_dict(), *policy.environment]:
            if name not in ("device", "environment"):
                assert "\n" not in policy.why[name] and len(policy.why[name]) > 8
                assert name in str(policy)
        json.dumps(policy.as_dict())


def test_npu_policy_is_report_a(monkeypatch):
    policy = npu_policy(monkeypatch)
    assert (policy.precision, policy.loss_scale, policy.dtype) == ("fp16", 65536.0, torch.float16)
    assert (policy.optimizer, policy.pin_memory, policy.max_dropout) == ("adamw_torch", False, 0.02)
    assert (policy.backend, policy.reduced_float32) == ("hccl", False)
    with pytest.raises(AttributeError):
        policy.precision = "bf16"


def test_overrides(monkeypatch):
    policy = npu_policy(monkeypatch, precision="bf16", workers=0)
    assert (policy.precision, policy.loss_scale, policy.workers) == ("bf16", None, 0)
    assert policy.why["workers"] == "asked for by the caller"
    with pytest.raises(ValueError, match="Ascend910A has no bf16"):
        npu_policy(monkeypatch, bf16=False, precision="bf16")
    with pytest.raises(ValueError, match="adamw_torch and adamw_torch_npu_fused"):
        npu_policy(monkeypatch, optimizer="adamw_torch_fused")
    with pytest.raises(ValueError, match="worker=0: a policy's settings are .*workers"):
        platform_policy("cpu", worker=0)


def test_fp16_on_the_cpu_is_an_error():
    assert platform_policy("cpu", "bf16").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="accelerate would silently train in float32"):
        platform_policy("cpu", "fp16")
    with pytest.raises(ValueError, match="must be one of float32, bf16, fp16"):
        platform_policy("cpu", "half")


@pytest.mark.parametrize(
    "user, after",
    [
        ({}, ("600", "3600", "3632")),
        ({"HCCL_CONNECT_TIMEOUT": "7200"}, ("7200", "3600", "3632")),
        ({"HCCL_EXEC_TIMEOUT": "7200"}, ("600", "7200", "7232")),
        ({"HCCL_EXEC_TIMEOUT": "0", "HCCL_EVENT_TIMEOUT": "0"}, ("600", "0", "0")),
    ],
)
def test_environment_is_only_raised(monkeypatch, user, after):
    policy = npu_policy(monkeypatch)
    torch.npu.conv = torch.npu.matmul = type("switch", (), {"allow_hf32": True})
    environ = dict(user)
    apply_policy(policy, environ)
    names = ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT")
    assert tuple(environ[name] for name in names) == after
    assert torch.npu.conv.allow_hf32 is False
    assert apply_policy(policy, environ) == []
    with pytest.raises(ValueError, match="HCCL_CONNECT_TIMEOUT='soon'"):
        apply_policy(policy, {"HCCL_CONNECT_TIMEOUT": "soon"})


def test_cpu_policy_changes_nothing():
    environ = {}
    assert apply_policy(platform_policy("cpu"), environ) == [] and environ == {}


def test_describe_environment():
    described = describe_environment("cpu")
    assert described["torch"] == torch.__version__ and described["device"] == "cpu" and described["threads"] >= 1
    assert described["device_name"] and described["python"].startswith("3.")
    json.dumps(described)
