"""The repository itself: versions held together, imports that go down only, notebooks executed, files where README says."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import vlftlib

ROOT = Path(__file__).parent.parent
MODULES = sorted(path for path in (ROOT / "vlftlib").glob("*.py") if path.stem not in ("__init__", "__main__"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def constraints() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}


def test_constraints_meet_every_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for group in project["optional-dependencies"].values() for line in group]
    exact = constraints()
    for requirement in map(Requirement, project["dependencies"] + extras):
        version = exact[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), f"{requirement} excludes {version} of constraints.txt"


def test_environment_and_makefile_install_by_the_constraints():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert "python=3.11" in environment["dependencies"]
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pip == ["-c constraints.txt", "-e .[notebooks,test]"]
    installs = re.findall(r"pip install.*", (ROOT / "Makefile").read_text())
    assert len(installs) == 3 and all("-c constraints.txt -e" in line for line in installs)


def test_the_named_versions():
    exact = constraints()
    wanted = {"torch": "2.13.0", "transformers": "5.24.0", "peft": "0.21.2", "accelerate": "1.15.0"}
    assert {name: exact[name] for name in wanted} == wanted


def test_package_version_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert vlftlib.__version__ == project["version"] == citation["version"]
    assert project["license"] == citation["license"] == "Apache-2.0"


def imports_of(path: Path) -> set[str]:
    """Top-level packages and our own modules that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "vlftlib":
            found |= {f"vlftlib.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


def test_imports_have_no_cycle_and_nothing_imports_the_command_line():
    names = {path.stem for path in MODULES}
    graph = {path.stem: {name.split(".")[1] for name in imports_of(path) if name.startswith("vlftlib.")} for path in MODULES}
    graph = {name: own & (names | {"__main__"}) for name, own in graph.items()}
    assert all("__main__" not in own for own in graph.values())
    done: set[str] = set()
    while len(done) < len(graph):
        free = {name for name, own in graph.items() if name not in done and own <= done}
        assert free, f"imports go in a circle among {sorted(graph.keys() - done)}"
        done |= free


# Who alone may import what.
OWNERS = {
    "torch_npu": {"devices", "rehearsal"},
    "peft": {"attach", "merging", "oft_benchmark", "peft_files", "saving"},
    "matplotlib.pyplot": {"figures"},
    "seaborn": {"figures"},
    "argparse": {"arguments", "tiny_base"},
    "imagehash": {"copies"},
    "sklearn.metrics": {"evaluation"},
    "sacrebleu": {"evaluation"},
}


@pytest.mark.parametrize("package", OWNERS)
def test_each_library_has_its_owners(package):
    users = {path.stem for path in MODULES if any(f"{name}.".startswith(f"{package}.") for name in imports_of(path))}
    assert users <= OWNERS[package]


def test_import_is_quick_and_loads_no_torch():
    code = "import sys, time; t = time.process_time(); import vlftlib; print(time.process_time() - t, 'torch' in sys.modules)"
    seconds, torch = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert float(seconds) < 0.3 and torch == "False"


def test_every_public_name_is_there():
    for name in vlftlib.__all__:
        assert getattr(vlftlib, name).__doc__, name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_executed_from_top_to_bottom(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(len("".join(cell["source"]).splitlines()) <= 12 for cell in cells)
    ignored = [cell for cell in cells if "NBVAL_IGNORE_OUTPUT" in "".join(cell["source"])]
    with_output = [cell for cell in cells if cell["outputs"]]
    assert len(ignored) <= max(1, len(with_output) // 5), f"{len(ignored)} of {len(with_output)} outputs are not compared"
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])


def test_sanitising_rules_are_pairs_that_parse():
    lines = [line for line in (ROOT / "tests" / "nbval_sanitize.cfg").read_text().splitlines() if line.strip()]
    rules = [line for line in lines if not line.startswith(("#", "["))]
    assert len(rules) % 2 == 0
    for regex, replace in zip(rules[::2], rules[1::2]):
        assert regex.startswith("regex: ") and re.compile(regex.removeprefix("regex: "))
        assert replace.startswith("replace: ") and replace.removeprefix("replace: ").strip()


def test_readme_names_every_module_and_target():
    readme = (ROOT / "README.md").read_text()
    missing = [path.name for path in MODULES if path.name not in readme]
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    missing += [f"make {target}" for target in targets if f"make {target}" not in readme]
    assert not missing, f"README.md doesn't name {missing}"
