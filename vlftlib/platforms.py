"""The platforms' settings as data: each with its reason and its source; `devices.platform_policy` makes a policy of them."""

# Seconds below which a variable is raised; a user's larger value stays. Only variables that something reads are here.
# https://www.hiascend.com/document (envref) and torch_npu's ProcessGroupHCCL.cpp
HCCL_TIMEOUTS = {
    "HCCL_CONNECT_TIMEOUT": (600, 120, "loading weights takes some ranks longer than the default 120 s (ms-swift's value)"),
    "HCCL_EXEC_TIMEOUT": (3600, 1836, "saving or evaluating on one rank holds the others up past 1836 s (Report A: raise it)"),
    "HCCL_EVENT_TIMEOUT": (3632, 1868, "must exceed HCCL_EXEC_TIMEOUT, as its default does by 32 s (ProcessGroupHCCL.cpp)"),
}


def npu_settings() -> dict[str, tuple]:
    """Ascend NPU."""
    return {
        "precision": ("fp16", "steadier there than bf16, whose loss jumped near step 800 (Report A)"),
        "optimizer": ("adamw_torch", "torch's fused Adam fails with fp16 under torch_npu's GradScaler (seen with 2.13, 2.14)"),
        "attention": ("auto", "SDPA gave NaN and wrong masks on some versions (Report A; Qwen3-VL#1265): probe before use"),
        "pin_memory": (False, "page-locked batches were unstable there (Report A)"),
        "workers": (2, "few: each is a process on a host that also feeds the queue (Report B)"),
        "start_method": ("spawn", "an NPU context doesn't survive a fork (torch_npu.npu: use the 'spawn' start method)"),
        "max_dropout": (0.02, "more is unsteady there, and the masks come from another stream than CUDA's (Report C)"),
        "backend": ("hccl", "the only collective library for the chip (accelerate's state.py)"),
        "graph_backend": ("npu", "torch_npu's own; this project has never run it: graph mode on an NPU is untested"),
        "reduced_float32": (False, "torch.npu.conv.allow_hf32 defaults to True and would round the patch embedding"),
    }


def cuda_settings() -> dict[str, tuple]:
    """NVIDIA GPU; one without bf16 gets fp16."""
    return {
        "precision": ("bf16", "float32's range, no scaling (Report A)"),
        "optimizer": ("adamw_torch_fused", "one kernel a step; transformers' default"),
        "attention": ("sdpa", "needs no further package; flash_attention_2 needs flash-attn"),
        "pin_memory": (True, "lets the copy to the device overlap (torch.utils.data)"),
        "workers": (4, "keeps the processor's work on pictures off the training process"),
        "start_method": (None, "workers never touch the device, so Python's default is safe"),
        "max_dropout": (None, "no limit known"),
        "backend": ("nccl", "torch.distributed's choice for CUDA"),
        "graph_backend": ("inductor", "torch.compile's default; used in graph mode alone"),
        "reduced_float32": (False, "cuDNN's TF32 is on by default and would round a float32 patch embedding"),
    }


def cpu_settings() -> dict[str, tuple]:
    """The reference."""
    return {
        "precision": ("float32", "the reference that the accelerators are compared with"),
        "optimizer": ("adamw_torch", "the NPU's, so that losses can be compared step by step"),
        "attention": ("sdpa", "right and fast there; transformers' default"),
        "pin_memory": (False, "there is no device to copy to"),
        "workers": (1, "prepares the next batch while this one trains; more would take the cores that train"),
        "start_method": (None, "the worker touches no device, so Python's default is safe"),
        "max_dropout": (None, "no limit known"),
        "backend": ("gloo", "torch.distributed's choice for CPUs"),
        "graph_backend": ("inductor", "torch.compile's default; used in graph mode alone"),
        "reduced_float32": (False, "nothing rounds float32 there"),
    }
