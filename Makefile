# Everything that a checkout needs. The environment and Rust's build directory live outside the checkout, in the user's cache.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
# Cargo profile of the editable install: dev or release.
PROFILE ?= $(or $(ROLLSPAN_BUILD_PROFILE),dev)
CACHE := $(or $(ROLLSPAN_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rollspan)
TRAIN_OUT ?= build/models
# One environment for each checkout, Python and lock file; another lock makes another environment.
VENV := $(CACHE)/venv-$(shell (cat requirements-dev.lock; pwd; $(PYTHON) -VV) | cksum | tr ' ' '-')
# One build directory for each checkout: cargo goes by file times, and would take one checkout's crates for another's.
TARGET := $(CACHE)/target-$(shell pwd | cksum | tr ' ' '-')
RUN := $(VENV)/bin/python -m
UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo $(CACHE)/uv/bin/uv)

export CARGO_TARGET_DIR ?= $(TARGET)
export UV_HTTP_TIMEOUT ?= 300
export PATH := $(VENV)/bin:$(PATH)
export VIRTUAL_ENV := $(VENV)

.PHONY: help setup demo test test-gpu lint format bench train lock wheel clean environment cargo where uv

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo: setup ## See rollouts across a live weight update, each token coloured by the weights that sampled it
	@rollspan demo

test: setup ## Run every test: Rust, Python, both frontends, packaging
	@if cargo nextest --version >/dev/null 2>&1; \
	then cargo nextest run --workspace --locked --status-level slow; else cargo test --workspace --locked; fi
	@$(RUN) pytest $(PYTEST_ARGUMENTS)

test-gpu: setup ## Run what needs an NVIDIA GPU: attention and graphs against the model's own, and both measured
	@$(VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "error: torch finds no NVIDIA GPU")'
	@$(RUN) pytest tests/unit/kernels/test_attention_varlen.py tests/unit/engine/test_cuda_graphs.py \
		tests/unit/engine/test_transfer_cuda.py $(PYTEST_ARGUMENTS)
	@for flags in "--no-cuda-graphs --no-async-scheduling" --no-async-scheduling --no-cuda-graphs ""; do \
		echo "== $${flags:-graphs and asynchronous scheduling}"; \
		rollspan bench throughput --device cuda --dtype bfloat16 $$flags $(BENCH_ARGUMENTS); \
	done

lint: environment cargo ## Check style and types of both languages
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@cargo fmt --all --check
	@$(RUN) mypy
	@cargo clippy --workspace --all-targets --locked -- -D warnings

format: environment cargo ## Rewrite the sources in the project's style
	@$(RUN) ruff check --fix .
	@$(RUN) ruff format .
	@cargo fmt --all

setup: environment cargo ## Create the environment and install this checkout into it (PROFILE=release for speed)
	@echo "installing this checkout (Rust profile: $(PROFILE))"
	@$(UV) pip install --python $(VENV)/bin/python --no-deps --no-build-isolation --reinstall-package rollspan \
		--config-settings profile=$(PROFILE) --editable .

bench: PROFILE := release
bench: setup ## Measure throughput and latency on the embedded model, through each frontend
	@for frontend in rust python; do \
		exec 3< <(exec rollspan serve --port 0 --events --log-level warning --frontend $$frontend); server=$$!; \
		trap 'kill $$server 2>/dev/null || true' EXIT; \
		url=$$(sed -n '/"ready"/ { s/.*"url": "\([^"]*\)".*/\1/p; q }' <&3); \
		echo "== $$frontend frontend"; \
		rollspan bench serve --url "$$url" $(BENCH_ARGUMENTS); \
		kill $$server; wait $$server; \
	done

train: setup ## Train the embedded model's checkpoints again, into TRAIN_OUT=build/models
	@$(RUN) rollspan.models.train --out $(TRAIN_OUT)

lock: $(UV) ## Compile the lock files from pyproject.toml
	@$(UV) pip compile --quiet --universal --python-version 3.10 --generate-hashes --custom-compile-command "make lock" \
		--output-file requirements.lock pyproject.toml
	@$(UV) pip compile --quiet --universal --python-version 3.10 --generate-hashes --custom-compile-command "make lock" \
		--extra dev --output-file requirements-dev.lock pyproject.toml

wheel: environment cargo ## Build the release wheel and the source archive into dist/
	@$(UV) build --python $(VENV)/bin/python --no-build-isolation --out-dir dist .

where: ## Print the environment's directory
	@echo $(VENV)

clean: ## Remove what was built in this checkout, its environment and its build directory
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis python/rollspan/_native*.so $(VENV) $(TARGET)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

environment: $(VENV)/complete

# Environments and build directories of checkouts that are gone are removed on the way, and this one's older environments.
$(VENV)/complete: requirements-dev.lock | $(UV)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: Python 3.10 or later is needed: make PYTHON=...")'
	@for old in $(CACHE)/venv-*/checkout $(CACHE)/target-*/checkout; do \
		if [ -f "$$old" ]; then \
			owner=$$(cat "$$old"); \
			if [ ! -d "$$owner" ]; then rm -rf "$$(dirname "$$old")"; fi; \
			if [ "$$owner" = "$(CURDIR)" ] && [[ "$$old" == */venv-* ]]; then rm -rf "$$(dirname "$$old")"; fi; \
		fi; \
	done
	@echo "creating the environment $(VENV) (the first time downloads several GB: PyTorch comes with its CUDA libraries)"
	@$(UV) venv --quiet --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(VENV)
	@mkdir -p $(TARGET)
	@echo "$(CURDIR)" | tee $(VENV)/checkout > $(TARGET)/checkout
	@$(UV) pip sync --python $(VENV)/bin/python --compile-bytecode --require-hashes requirements-dev.lock
	@touch $@

$(CACHE)/uv/bin/uv:
	@echo "installing uv into $(CACHE)/uv"
	@PIP_ROOT_USER_ACTION=ignore $(PYTHON) -m pip install --quiet --upgrade --target $(CACHE)/uv "uv>=0.9"

uv: ;

cargo:
	@cargo --version >/dev/null 2>&1 || { echo "error: Rust 1.90 or later is needed, and cargo is not on PATH: install a Rust toolchain" >&2; exit 1; }
