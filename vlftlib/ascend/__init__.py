"""Facts about Ascend, as data, and their readers; nothing here imports torch_npu."""
