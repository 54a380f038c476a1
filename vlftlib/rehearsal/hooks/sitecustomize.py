"""Python runs this at its start, in every process of a rehearsal: it waits for torch_npu, then gives it the CPU's arithmetic.

So scripts, dataloader workers, launched ranks and notebook kernels need no line of their own.
"""

import importlib.abc
import importlib.util
import sys


class AfterTorchNpu(importlib.abc.MetaPathFinder):
    """Finds torch_npu as usual, and runs `npu_on_host.install` when its import is done."""

    looking = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch_npu" or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        if spec is not None:
            run = spec.loader.exec_module

            def run_and_install(module):
                run(module)
                import npu_on_host

                npu_on_host.install()

            spec.loader.exec_module = run_and_install
        return spec


sys.meta_path.insert(0, AfterTorchNpu())
