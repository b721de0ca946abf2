# Two commands to know: `make quickstart` (the whole story on real text) and `make test`.
# Everything else is here because CI and daily work need it.

PYTHON ?= python3.11
VENV ?= .venv
# Where the CPU build of PyTorch comes from. Plain PyPI has only the CUDA build of it, so there:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
RUN := runs/quickstart
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Local Ray clusters ask for a token (Ray writes one to ~/.ray/auth_token); tests switch it off.
export RAY_AUTH_MODE ?= token
export RAY_USAGE_STATS_ENABLED ?= 0
export DS_ACCELERATOR ?= cpu

.PHONY: setup quickstart test check format bench-count bench-train bench-precompute bench-lookup clean-quickstart

setup: $(READY)

$(READY): constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' constraints.txt)
	@grep -q '^cuda.*= None' $(VENV)/lib/python3*/site-packages/torch/version.py || { \
	  echo "error: this PyTorch is a CUDA build; run: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu"; \
	  echo "(on GPU machines see 'On GPUs' in README.md)"; exit 1; }
	@echo "installing the pinned environment (about 4 GB, some minutes)"
	$(BIN)/pip install -q --no-deps -r constraints.txt
	$(BIN)/pip install -q --no-deps -e .
	@touch $(READY)

quickstart: $(READY)
	$(BIN)/python pipelines/end_to_end.py --root $(RUN)

# Two processes take one file of tests after another: one works while the other waits for Ray.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --durations 20 tests/ray tests/contract tests/unit
	$(BIN)/python -m pytest --durations 10 tests/serve

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports --no-cache

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Peers are compared where they are: TOKENGRAMS=<folder>, KENLM_COUNT=<binary>.
bench-count: $(READY)
	POLARS_MAX_THREADS=1 RAYON_NUM_THREADS=1 $(BIN)/python -m benchmarks.bench_count

bench-train: $(READY)
	$(BIN)/python -m benchmarks.bench_train

bench-precompute: $(READY)
	$(BIN)/python -m benchmarks.bench_precompute

# Needs 14 GB of disk (BENCH_FOLDER=<folder>) and as much memory; fio, if it is there, is a peer.
bench-lookup: $(READY)
	NUMBA_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.bench_lookup

clean-quickstart:
	rm -rf $(RUN)
