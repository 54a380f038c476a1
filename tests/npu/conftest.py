"""The rehearsal's tests: skipped, with the reason, where there is no rehearsal."""

import json
import textwrap
from pathlib import Path

import pytest

from vlftlib import rehearsal

CACHE = Path(__file__).parents[2] / rehearsal.CACHE


def pytest_collection_modifyitems(items):
    reason = rehearsal.obstacle()
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


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
