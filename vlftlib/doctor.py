"""Say what is wrong with this machine before a long run does: `python -m vlftlib doctor`.

Reads versions from disk without importing anything of Ascend's, then lets a child process import torch, choose the device and
compute, so that an import that fails, aborts or hangs is a line of the diagnosis and not its end.
Layers are given in the order in which they build on each other: driver, firmware, CANN, torch_npu. Mend the first fault first.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from vlftlib import devices
from vlftlib.ascend.installed import (
    cann_root,
    driver_root,
    fitting,
    in_ranges,
    judge_pair,
    parse_npu_smi,
    read_cann_version,
    read_key_values,
    version_table,
)

PROBE_TIMEOUT_S = 300  # an NPU compiles its first operators, which alone can take minutes
SMALL_SHARED_MEMORY = 512 * 2**20  # Docker gives 64 MiB unless asked for more: workers then die with "bus error"
SMALL_DISK = 5 * 2**30


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis: what was looked at, what was found, and what to do where that isn't right."""

    name: str
    value: str
    verdict: str = "ok"  # ok, warning or fault
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings in order; `print` it, or take `as_dict()` or `to_json()`."""

    findings: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == "fault")

    def as_dict(self) -> dict:
        return {"faults": [finding.name for finding in self.faults], "findings": [asdict(finding) for finding in self.findings]}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            mark = {"ok": "", "warning": "warning: ", "fault": "FAULT: "}[finding.verdict]
            lines.append(f"{finding.name:<20} {finding.value}")
            if finding.advice:
                lines.append(f"{'':<20}   {mark}{finding.advice}")
        names = ", ".join(finding.name for finding in self.faults)
        lines.append(f"{len(self.faults)} faults, mend them in this order: {names}" if names else "no faults")
        return "\n".join(lines)


def ascend_layers(root: Path, environ: Mapping[str, str]) -> list[Finding]:
    """Driver, firmware and CANN as their files on disk tell them."""
    findings, place = [], driver_root(root)
    files = {layer: place / layer / "version.info" for layer in ("driver", "firmware")}
    known = {layer: read_key_values(file) if file.exists() else {} for layer, file in files.items()}
    for layer, values in known.items():
        # On some releases Version is a component's number; package_version is the one that release notes speak of.
        version = values.get("package_version") or values.get("Version")
        missing = f"install the {layer} for this card, or mount {files[layer].parent} into the container"
        findings.append(Finding(layer, version) if version else Finding(layer, "not found", "fault", missing))
    firmware, ranges = known["firmware"].get("Version"), known["driver"].get("compatible_version_fw")
    if firmware and ranges and not in_ranges(firmware, ranges):
        advice = f"the driver takes firmware {ranges}: install the firmware of the driver's release"
        findings[-1] = Finding("firmware", f"{findings[-1].value} ({firmware})", "fault", advice)
    home = cann_root(root, environ)
    if home is None:
        findings.append(Finding("CANN", "not found", "fault", "install the toolkit and the kernels, then source set_env.sh"))
    elif not home.exists():
        advice = "ASCEND_HOME_PATH names no folder: source set_env.sh of the CANN that is installed"
        findings.append(Finding("CANN", f"{home} is missing", "fault", advice))
    else:
        version = read_cann_version(home)
        value = f"{version or 'unknown version'} in {home}"
        if not environ.get("ASCEND_HOME_PATH"):
            findings.append(Finding("CANN", value, "fault", f"its environment isn't set: source {home}/set_env.sh"))
        elif version is None:
            findings.append(Finding("CANN", value, "warning", "no version file of a known form: is the installation whole?"))
        else:
            findings.append(Finding("CANN", value))
    return findings


def ascend_environment(environ: Mapping[str, str], chips: int) -> list[Finding]:
    """The environment variables that are set to something that fails or does nothing."""
    findings = []
    visible = environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is not None:
        name, ids = "ASCEND_RT_VISIBLE_DEVICES", visible.split(",")
        if not all(part.isdecimal() for part in ids) or [int(part) for part in ids] != sorted({int(part) for part in ids}):
            advice = "ascending numbers and commas alone, as 0,1,3: the rest is cut off"
            findings.append(Finding(name, visible, "fault", advice))
        elif chips and int(ids[-1]) >= chips:
            findings.append(Finding(name, visible, "fault", f"there are {chips} chips, 0 to {chips - 1}"))
        else:
            findings.append(Finding(name, visible))
    if "PYTORCH_ALLOC_CONF" in environ and "PYTORCH_NPU_ALLOC_CONF" in environ:
        advice = "torch_npu exits when both are set: unset one (PYTORCH_ALLOC_CONF from torch 2.10 on)"
        findings.append(Finding("PYTORCH_NPU_ALLOC_CONF", "and PYTORCH_ALLOC_CONF", "fault", advice))
    if environ.get("INF_NAN_MODE_ENABLE") == "0":
        advice = "overflows saturate, so that loss scaling never sees them: unset it"
        findings.append(Finding("INF_NAN_MODE_ENABLE", "0", "fault", advice))
    for name, value, advice in (
        ("ASCEND_LAUNCH_BLOCKING", "1", "every operator waits for the chip: for finding errors, not for training"),
        ("HCCL_OP_TIMEOUT", None, "nothing reads it; HCCL_EXEC_TIMEOUT is what was meant"),
    ):
        if name in environ and value in (None, environ[name]):
            findings.append(Finding(name, environ[name], "warning", advice))
    return findings


def npu_smi(tool: Callable) -> tuple[list[Finding], list[dict]]:
    """What npu-smi says of the chips."""
    text = tool("npu-smi", "info")
    if text is None:
        return [Finding("npu-smi", "not found", "warning", "it comes with the driver; in a container mount it")], []
    chips = parse_npu_smi(text)
    sick = [f"NPU {chip['npu']} chip {chip['chip']}: {chip['health']}" for chip in chips if chip["health"] != "OK"]
    value = ", ".join(f"{c['name']} {c['memory_used_mb']}/{c['memory_total_mb']} MB" for c in chips) or "no chip in its table"
    if sick or not chips:
        return [Finding("npu-smi", value, "fault", "; ".join(sick) or f"it says: {text.strip().splitlines()[0][:100]}")], chips
    return [Finding("npu-smi", value)], chips


def device_files(root: Path) -> list[Finding]:
    """The chips' files under /dev, and whether this user may open them."""
    cards = sorted(path.name for path in (root / "dev").glob("davinci[0-9]*"))
    helpers = [f"/dev/{name}" for name in ("davinci_manager", "devmm_svm", "hisi_hdc") if not (root / "dev" / name).exists()]
    if not cards or helpers:
        missing = ", ".join(([] if cards else ["/dev/davinci0"]) + helpers)
        advice = f"missing: {missing}; start the container with --device for each, or load the driver"
        return [Finding("/dev", ", ".join(cards) or "no NPU", "fault", advice)]
    closed = [name for name in cards if not os.access(root / "dev" / name, os.R_OK | os.W_OK)]
    if closed:
        return [Finding("/dev", ", ".join(cards), "fault", f"no right to open {', '.join(closed)}: join the group HwHiAiUser")]
    return [Finding("/dev", ", ".join(cards))]


def run_tool(*command: str) -> str | None:
    """A tool's output, None where it isn't installed; a tool that fails or hangs says so in the output."""
    # Ascend's tools lie in folders that a service's PATH often lacks.
    path = shutil.which(command[0]) or shutil.which(command[0], path="/usr/local/bin:/usr/local/sbin")
    if path is None:
        return None
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return f"{command[0]} gave no answer in 60 s"
    return done.stdout + done.stderr


def compute_check(device: str) -> dict:
    """Matrix product, softmax and backward on a device against the CPU, both in float32.

    Returns:
        relative_error of the gradient (largest difference over largest value) and seconds of the second run: the first one
        also compiles.
    """
    import torch

    inputs = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0))
    gradients = {}
    for place in ("cpu", device, device):
        x, w = (part.to(place) for part in inputs)
        w.requires_grad_()
        began = time.perf_counter()
        ((x @ w).softmax(-1) * x).sum().backward()
        gradients[place] = w.grad.cpu()  # waits for the device
        seconds = time.perf_counter() - began
    error = (gradients[device] - gradients["cpu"]).abs().max() / gradients["cpu"].abs().max()
    return {"relative_error": error.item(), "seconds": round(seconds, 4)}


def probe(name: str | None) -> dict:
    """What only importing torch tells: the device, why there is none, versions, and whether it computes."""
    report = {}
    try:
        if devices.version_of("torch_npu"):
            report["npu_fault"] = devices.npu_fault()
        device = devices.get_device(name)
        report["environment"] = devices.describe_environment(device)
        report["compute"] = compute_check(str(device))
    except Exception as error:  # whatever it is, it is the finding
        report["fault"] = devices.first_line(error)
    return report


def run_probe(name: str | None) -> dict:
    """`probe` in a child process; a child that dies or hangs is a fault in the report."""
    code = f"import json; from vlftlib.doctor import probe; print('\\n' + json.dumps(probe({name!r})))"
    # Without autoload `import torch` works even beside a torch_npu that doesn't load, and the child can say why.
    environment = devices.environment() | {devices.AUTOLOAD: "0"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"fault": f"the device gave no answer in {PROBE_TIMEOUT_S} s"}
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        return {"fault": f"the process died with exit code {done.returncode}: {last}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def machine(root: Path, tool: Callable, cuda: str | None) -> list[Finding]:
    """The GPU's driver, shared memory and disk; `cuda` is the CUDA that torch is built for."""
    gpus = tool("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    if gpus is None:
        findings = [Finding("GPU driver", "none")]
    else:
        unused = cuda is None
        advice = "this torch is built without CUDA and can't use it" if unused else ""
        findings = [Finding("GPU driver", "; ".join(gpus.strip().splitlines()), "warning" if unused else "ok", advice)]
    shared = root / "dev/shm"
    if shared.exists():
        size = shutil.disk_usage(shared).total
        small = size < SMALL_SHARED_MEMORY
        advice = "dataloader workers need more: docker run --shm-size=8g, or workers=0" if small else ""
        findings.append(Finding("shared memory", f"{size / 2**30:.1f} GiB", "warning" if small else "ok", advice))
    free = shutil.disk_usage(Path.cwd()).free
    small = free < SMALL_DISK
    advice = "two checkpoints of a 7B model's adapters and optimizer take several GB" if small else ""
    findings.append(Finding("disk", f"{free / 2**30:.1f} GiB free", "warning" if small else "ok", advice))
    return findings


def diagnose(
    device: str | None = None,
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    tool: Callable[..., str | None] = run_tool,
    run_probe: Callable[[str | None], dict] = run_probe,
) -> Diagnosis:
    """Look at everything that a run stands on.

    Args:
        device: "npu", "cuda" or "cpu" where a run needs just that; None takes what there is.
        root: the file system's root; tests give a folder.
        environ: the environment variables; None takes the process's.
        tool: runs a command and gives its output, or None where it isn't installed.
        run_probe: imports torch elsewhere and reports on the device.

    Returns:
        The findings, in the order in which faults are to be mended.
    """
    environ = devices.environment() if environ is None else environ
    findings = [Finding("Python", platform.python_version())]
    for package in ("torch", "transformers", "peft", "accelerate"):
        version = devices.version_of(package)
        missing = Finding(package, "not installed", "fault", f"pip install {package}")
        findings.append(Finding(package, version) if version else missing)
    torch_npu, torch = devices.version_of("torch_npu"), devices.version_of("torch")
    report = run_probe(device)
    described = report.get("environment", {})
    on_npu = described.get("device", "").startswith("npu")
    traces = torch_npu or environ.get("ASCEND_HOME_PATH") or any((root / "dev").glob("davinci*")) or driver_root(root).exists()
    if described.get("device") == "npu (rehearsal)":
        findings += [Finding("CANN", "none: this is the rehearsal's stand-in"), Finding("torch_npu", torch_npu)]
    elif traces:
        chip_findings, chips = npu_smi(tool)
        layers = ascend_layers(root, environ) + device_files(root) + chip_findings
        if on_npu:  # it computes, so a file that isn't where it was looked for is no fault
            layers = [Finding(f.name, f.value, "warning", f.advice) if f.verdict == "fault" else f for f in layers]
        findings += layers
        home = cann_root(root, environ)
        cann = read_cann_version(home) if home and home.exists() else None
        if torch_npu is None:
            advice = f"install {fitting(torch or '', cann, version_table())}"
            findings.append(Finding("torch_npu", "not installed", "fault", advice))
        else:
            if report.get("npu_fault"):
                advice = f"{report['npu_fault']}; until then set {devices.AUTOLOAD}=0, without which `import torch` fails too"
                findings.append(Finding("torch_npu", torch_npu, "fault", advice))
            else:
                findings.append(Finding("torch_npu", torch_npu))
            verdict, line = judge_pair(torch or "0", torch_npu, cann)
            findings.append(Finding("version row", line.partition(": ")[0], verdict, line.partition(": ")[2]))
        findings += ascend_environment(environ, len(chips))
    else:
        findings.append(Finding("Ascend", "nothing of it here"))
    findings += machine(root, tool, described.get("cuda"))
    if described:
        findings.append(Finding("device", f"{described['device']}, {described['device_name']}"))
    if report.get("fault"):
        findings.append(Finding("device", device or "none", "fault", report["fault"]))
    elif report.get("compute"):
        error, seconds = report["compute"]["relative_error"], report["compute"]["seconds"]
        time_said = "" if described["device"] == "npu (rehearsal)" else f", {seconds} s"
        value = f"matmul, softmax, backward: relative error {error:.1e}{time_said}"
        wrong = not error < 1e-3  # NaN is wrong too
        advice = "the device computes something else than the CPU: run `python -m vlftlib operators`" if wrong else ""
        findings.append(Finding("compute", value, "fault" if wrong else "ok", advice))
    return Diagnosis(tuple(findings))
