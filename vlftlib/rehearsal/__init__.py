"""Run a script on device "npu" without an NPU: the genuine torch_npu over an inert stand-in for CANN.

Real are torch_npu's registrations, CPU fallbacks, dtype rules, autocast, autograd, loss scaling and API, and what transformers,
accelerate and PEFT do on an NPU. Not real are speed, the chip's rounding, the dtypes and sizes that its kernels refuse, and
communication between chips. `fake_cann.c` is the stand-in, `hooks/npu_on_host.py` the arithmetic.
"""

import hashlib
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vlftlib.devices import environment, version_of

TORCH_NPU = "2.13.0"  # pairs with torch 2.13.0 alone
HERE = Path(__file__).parent
CACHE = Path(".rehearsal")
# torch_npu links or opens CANN under these names; the stand-in is all of them.
LIBRARIES = "libascendcl libhccl libacl_op_compiler libge_runner libgraph libacl_tdt_channel libmsprofiler libprofapi".split()


def obstacle() -> str | None:
    """Why this machine can't rehearse, or None where it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"torch_npu is built for Linux on x86_64 and aarch64, not for {sys.platform} on {platform.machine()}"
    if shutil.which("gcc") is None:
        return "gcc is not installed, and the stand-in for CANN is compiled"
    torch = version_of("torch") or "none"
    if torch.partition("+")[0] != TORCH_NPU:
        return f"torch {torch} is installed, and torch_npu {TORCH_NPU} takes torch {TORCH_NPU}"
    return None


def prepare(cache: Path = CACHE) -> tuple[Path, Path]:
    """Compile the stand-in and install torch_npu beside it, once.

    Args:
        cache: a folder of its own, which git ignores.

    Returns:
        The folder of libraries and the folder of packages.

    Raises:
        RuntimeError: this machine can't rehearse, the compiler fails, or pip does.
    """
    if (reason := obstacle()) is not None:
        raise RuntimeError(f"no rehearsal here: {reason}")
    cache = cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n")
    source = HERE / "fake_cann.c"
    libraries = cache / f"lib-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    packages = cache / f"torch_npu-{TORCH_NPU}-{sysconfig.get_config_var('SOABI')}"
    if not libraries.exists():
        with tempfile.TemporaryDirectory(dir=cache) as made:
            library = Path(made, "libascendcl.so")
            command("gcc", "-shared", "-fPIC", "-O1", "-w", str(source), "-Wl,-soname,libascendcl.so", "-o", str(library))
            for name in LIBRARIES[1:]:
                Path(made, f"{name}.so").symlink_to("libascendcl.so")
            for folder in ("runtime", "compiler", "opp"):  # torch_npu looks whether CANN's folder has these
                Path(made, folder).mkdir()
            move(Path(made), libraries)
    if not packages.exists():
        with tempfile.TemporaryDirectory(dir=cache) as made:
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", made)
            command(*pip, f"torch-npu=={TORCH_NPU}")
            move(Path(made), packages)
    return libraries, packages


def move(made: Path, place: Path) -> None:
    """Put a finished folder in its place in one step; another process may have been first."""
    try:
        shutil.copytree(made, made.with_suffix(".done"), symlinks=True).rename(place)
    except OSError:
        shutil.rmtree(made.with_suffix(".done"))
        if not place.exists():
            raise


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")


def rehearsal_environment(
    chip: str = "Ascend910B2", devices: int = 1, allow_fallbacks: bool = False, cache: Path = CACHE
) -> dict[str, str]:
    """The environment variables under which any Python process, and its children, finds `devices` NPUs.

    Args:
        chip: as torch_npu names it; "Ascend910A" has no bf16.
        devices: how many; 0 is CANN without a chip.
        allow_fallbacks: False makes an operator that has no NPU kernel an error instead of a copy to the CPU.
        cache: as in `prepare`.

    Returns:
        This process's variables with the rehearsal's.
    """
    libraries, packages = prepare(cache)
    variables = environment()

    def before(name: str, *paths: Path) -> str:
        return ":".join([*map(str, paths), *filter(None, [variables.get(name)])])

    return variables | {
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", libraries),
        "PYTHONPATH": before("PYTHONPATH", HERE / "hooks", packages),
        "ASCEND_HOME_PATH": str(libraries),
        "ASCEND_OPP_PATH": str(libraries / "opp"),
        "TASK_QUEUE_ENABLE": "0",  # operators run where they are called, so that errors come from there
        "TORCH_NPU_FALLBACK_CPU_DISABLE": str(int(not allow_fallbacks)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",  # `import torch` brings the NPU, as on an Ascend server
        "STAND_IN_CHIP": chip,
        "STAND_IN_DEVICES": str(devices),
    }


def rehearse(
    arguments: Sequence[str],
    *,
    chip: str = "Ascend910B2",
    devices: int = 1,
    allow_fallbacks: bool = False,
    cache: Path = CACHE,
    capture: bool = False,
) -> subprocess.CompletedProcess:
    """Run a Python script, unchanged, where torch finds an NPU.

    Args:
        arguments: what follows `python`: ["train.py", "--device", "npu"] or ["-m", "package", ...].
        chip, devices, allow_fallbacks, cache: as in `rehearsal_environment`.
        capture: keep the output, as text, instead of letting it through.

    Returns:
        The finished process.

    Raises:
        RuntimeError: this machine can't rehearse.
        FileNotFoundError: there is no such script.
    """
    if not arguments:
        raise ValueError("rehearse what? Give a script and its arguments, or -m and a module")
    if not arguments[0].startswith("-") and not Path(arguments[0]).exists():
        raise FileNotFoundError(f"no script {arguments[0]}")
    variables = rehearsal_environment(chip, devices, allow_fallbacks, cache)
    return subprocess.run([sys.executable, *arguments], env=variables, capture_output=capture, text=True)
