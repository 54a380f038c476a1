"""Execute the notebooks in place, as they are to be committed: python notebooks/execute.py [NAME ...]"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

VIEW = "application/vnd.jupyter.widget-view+json"

for path in sorted(Path(__file__).parent.glob("*.ipynb")):
    if len(sys.argv) > 1 and path.stem not in sys.argv[1:] and path.stem[:2] not in sys.argv[1:]:
        continue
    notebook, began = nbformat.read(path, as_version=4), time.perf_counter()
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=180, record_timing=False, resources=resources).execute()
    # A widget's state holds timings and random ids; without it a viewer shows the text.
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(VIEW, None)
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)
    print(f"{path.name}: {time.perf_counter() - began:.0f} s")
