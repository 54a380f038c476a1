"""The rehearsal's tests: skipped, with the reason, where there can be no rehearsal, unless REHEARSAL=required."""

import json
import os
import textwrap
from pathlib import Path

import pytest

from vlftlib import rehearsal

CACHE = Path(__file__).parents[2] / rehearsal.CACHE


@pytest.fixture(scope="session", autouse=True)
def prepared():
    """The stand-in compiled and torch_npu installed beside it, once; CI sets REHEARSAL=required, so that it can't pass without."""
    try:
        rehearsal.prepare(CACHE)
    except RuntimeError as error:
        if os.environ.get("REHEARSAL") == "required":
            raise
        pytest.skip(str(error))


@pytest.fixture
def on_npu(tmp_path):
    """`on_npu(code)` runs a script that fills the dict `found`, in a process that has an NPU, and gives the dict."""

    def run(code: str, **options) -> dict:
        script = tmp_path / "script.py"
        script.write_text(f"import json\nfound = {{}}\n{textwrap.dedent(code)}\nprint('\\n' + json.dumps(found))\n")
        done = rehearsal.rehearse([str(script)], cache=CACHE, capture=True, **options)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run
