import sys

import pytest
import torch

from vlftlib.memory import peak_memory_bytes, reset_peak_memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the CPU's peak can only be reset on Linux")
def test_the_peak_is_that_of_its_own_stretch():
    cpu = torch.device("cpu")
    held = torch.ones(64 * 2**20)  # 256 MiB, touched
    big = peak_memory_bytes(cpu)
    del held
    reset_peak_memory(cpu)
    small = peak_memory_bytes(cpu)
    assert big - small > 200 * 2**20
    again = torch.ones(64 * 2**20)
    assert peak_memory_bytes(cpu) - small > 200 * 2**20 and len(again)
