"""Fine-tune Qwen2.5-VL by LoRA, OFT or both on CUDA, Ascend NPU and CPU, and compare the platforms from run records."""

import importlib

__version__ = "0.1.0"

# Public name -> module; imported on first use, so that `import vlftlib` is quick and touches no device.
_NAMES = {
    name: module
    for module, names in {
        "adapters": "select_modules apply_lora apply_oft apply_recipe count_parameters save_adapters load_adapters "
        "merge_adapters unmerge_adapters check_merge",
        "dataset": "load_examples VisionLanguageDataset VisionLanguageCollator",
        "devices": "get_device platform_policy describe_environment",
        "evaluation": "evaluate predict",
        "figures": "save_figure",
        "images": "load_image",
        "models": "load_model load_processor",
        "oft": "OFTLinear",
        "operator_check": "check_operators",
        "operators": "operator_census ascend_fallbacks",
        "orthogonal": "cayley householder orthogonality_error",
        "plan": "plan_memory",
        "recipes": "get_recipe",
        "runs": "RunRecord load_runs",
        "stock_folder": "write_merged",
        "trainer": "TrainConfig train",
    }.items()
    for name in names.split()
}
__all__ = sorted(_NAMES)


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module 'vlftlib' has no attribute {name!r}")
    if _NAMES[name] != "devices":
        importlib.import_module("vlftlib.devices").leave_out_torch_npu()  # before transformers is imported
    return getattr(importlib.import_module(f"vlftlib.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
