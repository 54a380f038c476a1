"""Execute the notebooks in place, as they are to be committed: python notebooks/execute.py [NAME ...] [--output FOLDER]

With --output the executed copies go there, and the committed notebooks stay as they are.
"""

import argparse
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

VIEW = "application/vnd.jupyter.widget-view+json"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("names", nargs="*", help="as 04 or 04_oft_on_ascend; all by default")
parser.add_argument("--output", type=Path, help="a folder for the executed notebooks; their own by default")
parser.add_argument("--timeout", type=int, default=180, help="seconds that a cell may take")
arguments = parser.parse_args()
for path in sorted(Path(__file__).parent.glob("*.ipynb")):
    if arguments.names and path.stem not in arguments.names and path.stem[:2] not in arguments.names:
        continue
    notebook, began = nbformat.read(path, as_version=4), time.perf_counter()
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=arguments.timeout, record_timing=False, resources=resources).execute()
    # A widget's state holds timings and random ids; without it a viewer shows the text.
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(VIEW, None)
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, (arguments.output or path.parent) / path.name)
    print(f"{path.name}: {time.perf_counter() - began:.0f} s")
