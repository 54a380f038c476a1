# Every target makes .venv by itself. On Ascend: install the CPU build of torch first, see README.
PYTHON ?= python3.11
MODEL ?= data/tiny-base
DATA ?= products
DEVICE ?=
RECIPES ?= lora_text_vision oft_vision
VENV := .venv/bin
STAMP := .venv/installed
export PYTHONUNBUFFERED = 1

.DEFAULT_GOAL := help
.PHONY: help install run test test-long lab benchmark figures rehearse-npu notebooks base clean

help:  ## list the targets
	@awk -F ':.*## +' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv and install the package into it
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "Python 3.10 or later is needed: make PYTHON=..."'
	test -x $(VENV)/python || $(PYTHON) -m venv .venv
	$(VENV)/python -m pip install -q -c constraints.txt -e '.[notebooks,test]'
	touch $@

run: $(STAMP)  ## the whole walk: data, base, recipes, evaluation, figures, table
ifeq ($(DATA),elpv)
	$(VENV)/python -m pip install -q -c constraints.txt -e '.[elpv]'
endif
	$(VENV)/python -m vlftlib compare --model $(MODEL) --data $(DATA) $(if $(DEVICE),--device $(DEVICE)) --recipes $(RECIPES)

test: $(STAMP)  ## tests and notebooks, without the slow ones
	$(VENV)/python -m pytest -m "not slow" --nbval --nbval-sanitize-with tests/nbval_sanitize.cfg --nbval-cell-timeout 180 tests notebooks

test-long: $(STAMP)  ## the slow tests, and those that need an extra
	$(VENV)/python -m pip install -q -c constraints.txt -e '.[elpv,quant,tensorboard]'
	$(VENV)/python -m pytest -m slow tests
	$(VENV)/python -m pytest -m "not slow" -k bit tests/test_oft.py tests/test_checkpointing.py tests/test_plan.py tests/test_quantized.py

lab: $(STAMP)  ## JupyterLab on the notebooks
	$(VENV)/python -m jupyter lab notebooks

benchmark: $(STAMP)  ## measure OFT, the data check, generation and the precisions: over an hour on two quiet cores
	for name in oft check generation precision; do $(VENV)/python -m vlftlib benchmark $$name --output data/reference/benchmarks || exit 1; done

figures: $(STAMP)  ## draw figures/ and README's tables again from the records in data/reference
	$(VENV)/python -m vlftlib compare --show data/reference --readme README.md

rehearse-npu: $(STAMP)  ## all recipes on the genuine torch_npu over a stand-in for CANN
	REHEARSAL=required $(VENV)/python -m pytest tests/npu

notebooks: $(STAMP)  ## execute the notebooks in place
	$(VENV)/python notebooks/execute.py

base: $(STAMP)  ## train data/tiny-base from nothing: about an hour on two cores
	$(VENV)/python -m vlftlib.tiny_base

clean:  ## remove .venv and generated data
	rm -rf .venv data/products data/elpv data/runs
