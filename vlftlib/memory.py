"""Memory of a run: the peak, in bytes, of an accelerator's allocator or of this process."""

import resource
import sys
from pathlib import Path

import torch

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement; on the CPU that needs Linux, elsewhere the peak stays that of the whole process."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")  # resets VmHWM, see proc_pid_clear_refs(5)


def peak_memory_bytes(device: torch.device) -> int:
    """The peak since the last reset: allocated tensors on an accelerator; on the CPU the process's resident set."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    if STATUS.exists():
        fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes but on macOS
