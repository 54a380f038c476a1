"""Choose the device, and the settings that a platform needs; the only module that knows `torch_npu` and environment variables.

Unusual here: torch is imported inside the functions, because an installed torch_npu that finds no CANN makes `import torch`
itself fail, and the doctor must still run to say so. Nothing is decided when this module is imported.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import warnings
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vlftlib.platforms import HCCL_TIMEOUTS, cpu_settings, cuda_settings, npu_settings

if TYPE_CHECKING:
    import torch

DEVICE_TYPES = ("npu", "cuda", "cpu")  # in the order of preference
REHEARSAL = "npu (rehearsal)"  # the device of a run on the stand-in for CANN
PRECISIONS = ("float32", "bf16", "fp16")
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_left_out: dict[str, str] = {}  # why this process goes on without an installed torch_npu
STAND_IN_MARK = "vlftlib_stand_in"  # a symbol that only the rehearsal's libascendcl.so exports


def import_torch():
    """torch, or an error that names the way out when torch_npu's autoload makes its import fail.

    Raises:
        RuntimeError: torch_npu is installed and doesn't load (no CANN, set_env.sh not sourced, another torch).
    """
    try:
        import torch
    except RuntimeError as error:
        if "backend extension" not in str(error):
            raise
        raise RuntimeError(
            f"import torch fails because torch_npu doesn't load: {first_line(error.__cause__ or error)}. Source CANN's "
            f"set_env.sh, or set {AUTOLOAD}=0 to go on without the NPU; `python -m vlftlib doctor` says what is missing"
        ) from error
    return torch


def environment() -> dict[str, str]:
    """A copy of the process's environment variables."""
    return dict(os.environ)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def npu_fault(index: int = 0) -> str | None:
    """Why `npu:index` can't be used, or None where it can.

    torch_npu fails in its own ways, as ImportError, RuntimeError or bare Exception, so whatever it raises is the reason given.
    """
    if sys.modules.get("torch_npu", "unknown") is None:
        return _left_out["torch_npu"]
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    torch = import_torch()
    # Asked before the import: with CANN present, loading torch_npu under a CUDA build aborts the process (seen with 2.14).
    if "torch_npu" not in sys.modules and torch.version.cuda:
        return f"torch {torch.__version__} is a CUDA build, and torch_npu needs a CPU build of torch"
    try:
        import torch_npu  # noqa: F401
    except Exception as error:
        return f"import torch_npu fails: {first_line(error)}"
    count = torch.npu.device_count()
    if count == 0:
        return "CANN is present and shows no device (npu-smi info; ASCEND_RT_VISIBLE_DEVICES)"
    return None if index < count else f"there are {count} NPUs, npu:0 to npu:{count - 1}"


def cuda_fault(index: int = 0) -> str | None:
    """Why `cuda:index` can't be used, or None where it can."""
    torch = import_torch()
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    count = torch.cuda.device_count()
    if count == 0:
        return f"torch {torch.__version__} sees no GPU (nvidia-smi; CUDA_VISIBLE_DEVICES)"
    return None if index < count else f"there are {count} GPUs, cuda:0 to cuda:{count - 1}"


def get_device(name: str | torch.device | None = None) -> torch.device:
    """The device that is named, or else the first there is of npu, cuda and cpu.

    Args:
        name: "npu", "cuda", "cpu", or one of them with a number ("npu:1"). Without a number an accelerator's is LOCAL_RANK,
            which launchers set for every process, or 0.

    Returns:
        The device, with its number on an accelerator.

    Raises:
        RuntimeError: the named device can't be used; the message says why.
        ValueError: no such type of device.
    """
    torch = import_torch()
    if name is None:
        name = next((kind for kind, fault in (("npu", npu_fault), ("cuda", cuda_fault)) if fault() is None), "cpu")
    match = re.fullmatch(rf"({'|'.join(DEVICE_TYPES)})(?::(\d+))?", str(name))
    if not match:
        raise ValueError(f"device {str(name)!r}: must be npu, cuda or cpu, or an accelerator with its number, as npu:0")
    kind, number = match.groups()
    if kind != "npu":
        leave_out_torch_npu()
    if kind == "cpu":
        return torch.device("cpu")
    index = int(number if number is not None else os.environ.get("LOCAL_RANK", 0))
    fault = npu_fault(index) if kind == "npu" else cuda_fault(index)
    if fault is not None:
        raise RuntimeError(f"device {str(name)!r} can't be used: {fault}; `python -m vlftlib doctor` looks further")
    return torch.device(kind, index)


def leave_out_torch_npu() -> None:
    """Warn of an installed torch_npu that can't be used, and keep one that doesn't load out of this process.

    transformers imports torch_npu wherever it is installed, so its error would end a run on the CPU too. To be called before
    transformers is imported.
    """
    if importlib.util.find_spec("torch_npu") is None or (fault := npu_fault()) is None:
        return
    warnings.warn(f"the NPU is passed over though torch_npu is installed: {fault}", stacklevel=3)
    if "torch_npu" not in sys.modules:
        _left_out["torch_npu"] = fault
        sys.modules["torch_npu"] = None  # Python's own mark for a module that is not to be imported


def is_rehearsal() -> bool:
    """Whether the NPU in this process is the rehearsal's stand-in for CANN, told by its library, not by the environment."""
    if sys.modules.get("torch_npu") is None:
        return False
    # torch_npu has already loaded this library, so this opens the very one that it runs on.
    return hasattr(ctypes.CDLL("libascendcl.so"), STAND_IN_MARK)


@dataclass(frozen=True)
class PlatformPolicy:
    """The settings that differ between platforms; `print` it to see each with its reason.

    Args:
        device: "npu", "cuda" or "cpu".
        precision: "float32", "bf16" or "fp16" of the forward; trainable parameters are float32 in all three.
        loss_scale: where the dynamic loss scale starts; None where nothing is scaled.
        optimizer: transformers' `optim`.
        attention: transformers' `attn_implementation`; "auto" is the fastest that `operators.choose_attention` finds right.
        pin_memory: whether the loader's batches go to page-locked memory.
        workers: processes that prepare batches.
        start_method: how they start; None is Python's default.
        max_dropout: a recipe's larger dropout is cut to this; None leaves it.
        backend: torch.distributed's backend.
        graph_backend: torch.compile's backend, where graph mode is asked for.
        reduced_float32: whether float32 products may be rounded to TF32 (cuda) or HF32 (npu).
        environment: variables and the least value each should have.
        why: for every setting the reason and its source.
    """

    device: str
    precision: str
    loss_scale: float | None
    optimizer: str
    attention: str
    pin_memory: bool
    workers: int
    start_method: str | None
    max_dropout: float | None
    backend: str
    graph_backend: str
    reduced_float32: bool
    environment: dict[str, int] = field(hash=False)
    why: dict[str, str] = field(hash=False, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """The forward's dtype."""
        torch = import_torch()
        return {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]

    def as_dict(self) -> dict:
        """The settings without the reasons, for a run record."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "why"}

    def __str__(self) -> str:
        rows = [(name, value) for name, value in self.as_dict().items() if name not in ("device", "environment")]
        rows += self.environment.items()
        return "\n".join(
            [f"policy for {self.device}"] + [f"  {name:<20} {value!s:<22} {self.why[name]}" for name, value in rows]
        )


def platform_policy(device: str | torch.device, precision: str | None = None, **overrides) -> PlatformPolicy:
    """The settings for a device: Report A's lessons on Ascend, the vendor's and the libraries' documentation.

    Args:
        device: what `get_device` returned; only its type counts, and for bf16 what the chip has.
        precision: "float32", "bf16" or "fp16"; None takes the platform's.
        overrides: other fields of `PlatformPolicy`, as workers=0, with the caller's value.

    Returns:
        The policy, frozen.

    Raises:
        ValueError: no such device, precision or field; fp16 on the CPU; bf16 that the chip lacks; torch's fused Adam with
            fp16 on the NPU.
    """
    kind = str(device).partition(":")[0]
    if kind not in DEVICE_TYPES:
        raise ValueError(f"device {str(device)!r}: there is a policy for {', '.join(DEVICE_TYPES)}")
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"precision {precision!r}: must be one of {', '.join(PRECISIONS)}")
    settings = {"npu": npu_settings, "cuda": cuda_settings, "cpu": cpu_settings}[kind]()
    if kind == "cuda" and not import_torch().cuda.is_bf16_supported(including_emulation=False):
        settings["precision"] = ("fp16", "this GPU has no bf16 (compute capability below 8.0)")
    if precision is not None:
        settings["precision"] = (precision, "asked for by the caller")
    check_precision(kind, settings["precision"][0])
    if settings["precision"][0] == "fp16":
        settings["loss_scale"] = (2.0**16, "fp16 loses gradients below 6e-8: dynamic scaling from 2^16 (Report A; GradScaler)")
    else:
        settings["loss_scale"] = (None, f"{settings['precision'][0]} has float32's range of exponents")
    for name, value in overrides.items():
        if name not in settings or name == "precision":
            raise ValueError(f"{name}={value!r}: a policy's settings are {', '.join(settings)}")
        settings[name] = (value, "asked for by the caller")
    values, why = ({name: pair[i] for name, pair in settings.items()} for i in (0, 1))
    if kind == "npu" and values["precision"] == "fp16" and values["optimizer"] in ("adamw_torch_fused", "adam_torch_fused"):
        raise ValueError(
            f"optimizer {values['optimizer']!r} with fp16 on npu: torch_npu's GradScaler calls it with grad_scaler=, which it "
            "doesn't take, and its kernel would step on overflows; adamw_torch and adamw_torch_npu_fused are right"
        )
    environment = {}
    if kind == "npu":
        environment = {name: least for name, (least, _, _) in HCCL_TIMEOUTS.items()}
        why |= {name: reason for name, (_, _, reason) in HCCL_TIMEOUTS.items()}
    return PlatformPolicy(device=kind, environment=environment, why=why, **values)


def check_precision(kind: str, precision: str) -> None:
    """Refuse a precision that a platform would not really compute in."""
    if kind == "cpu" and precision == "fp16":
        raise ValueError("precision 'fp16' on the CPU: accelerate would silently train in float32; float32 or bf16 is right")
    if precision != "bf16" or kind == "cpu":
        return
    torch = import_torch()
    has = torch.npu.is_bf16_supported() if kind == "npu" else torch.cuda.is_bf16_supported(including_emulation=False)
    if not has:
        chip = torch.npu.get_device_name(0) if kind == "npu" else torch.cuda.get_device_name()
        raise ValueError(f"precision 'bf16' on {kind}: {chip} has no bf16; fp16 (scaled) or float32 is right")


def apply_policy(policy: PlatformPolicy, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Put into effect what a process must set for itself: the environment variables and float32's rounding.

    Call it before torch.distributed starts: HCCL reads its variables then.

    Args:
        policy: from `platform_policy`.
        environ: where the variables are raised.

    Returns:
        One line for each change.

    Raises:
        ValueError: a variable holds something other than a number of seconds.
    """
    changes = []
    for name, least in policy.environment.items():
        now = environ.get(name)
        if now is not None and not now.strip().isdigit():
            raise ValueError(f"environment variable {name}={now!r}: must be a whole number of seconds")
        if name == "HCCL_EVENT_TIMEOUT":
            least = max(least, int(environ.get("HCCL_EXEC_TIMEOUT", 0)) + 32)
        # 0 is "wait for ever" for the two timeouts of a running operator, so it is above every other value.
        for_ever = now is not None and int(now) == 0 and name != "HCCL_CONNECT_TIMEOUT"
        if not for_ever and int(now or HCCL_TIMEOUTS[name][1]) < least:
            environ[name] = str(least)
            changes.append(f"{name}: {now or 'not set'} -> {least}")
    torch = import_torch()
    switches = {"npu": ("npu.conv", "npu.matmul"), "cuda": ("backends.cudnn", "backends.cuda.matmul"), "cpu": ()}
    for path in switches[policy.device]:
        owner = torch
        for part in path.split("."):
            owner = getattr(owner, part)
        switch = "allow_hf32" if policy.device == "npu" else "allow_tf32"
        if getattr(owner, switch) != policy.reduced_float32:
            setattr(owner, switch, policy.reduced_float32)
            changes.append(f"torch.{path}.{switch}: {not policy.reduced_float32} -> {policy.reduced_float32}")
    return changes


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_environment(device: str | torch.device | None = None) -> dict[str, str | int | None]:
    """What a run record says about the machine and the software it ran on.

    Args:
        device: the run's device; None asks `get_device`.

    Returns:
        Versions (None: not installed), the device (`REHEARSAL` on the stand-in for CANN), its name, the processor,
        threads and platform; plain values that JSON holds.
    """
    torch = import_torch()
    device = get_device(device)
    packages = ("torch", "transformers", "peft", "accelerate", "torch_npu")
    described = {"python": platform.python_version()} | {package: version_of(package) for package in packages}
    described["torch"] = torch.__version__  # with the build: +cpu, +cu130
    described["cann"] = cann_version() if device.type == "npu" else None
    described["cuda"] = torch.version.cuda
    described["device"] = REHEARSAL if device.type == "npu" and is_rehearsal() else device.type
    described["device_name"] = cpu_model()
    if device.type != "cpu":
        described["device_name"] = getattr(torch, device.type).get_device_name(device.index)
    described["device_count"] = 1 if device.type == "cpu" else getattr(torch, device.type).device_count()
    described |= {"cpu": cpu_model(), "threads": torch.get_num_threads(), "platform": platform.platform()}
    return described


def cann_version() -> str:
    """CANN's version as the runtime in this process tells it; "unknown" before CANN 8.1, which can't."""
    if is_rehearsal():
        return "none (stand-in)"
    from torch_npu.npu import utils

    return utils.get_cann_version("CANN") or "unknown" if hasattr(utils, "get_cann_version") else "unknown"


def cpu_model() -> str:
    """The processor's name, as Linux tells it, or else Python."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        # "model name" on x86; ARM kernels, which Ascend servers mostly run, give none.
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()
