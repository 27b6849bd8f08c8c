# Two commands do everything, the set-up included, and both are safe to repeat.
#   make quickstart   a small model learns two-digit sums by PPO through an embedded vLLM engine; ends with a report
#   make test         lint, types and tests
# Settings: VENV (the virtual environment, default .venv), PYTHON (the interpreter it is made with), WORKERS (of pytest).

VENV ?= .venv
WORKERS ?= 2
# One thread per process: two teams of spinning threads on shared cores are ten times slower than one.
OMP_NUM_THREADS ?= 1
export VENV OMP_NUM_THREADS

.PHONY: quickstart test lint setup clean

quickstart: setup
	@bash scripts/quickstart.sh

test: lint
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

setup:
	@bash scripts/setup.sh

clean:
	rm -rf outputs lightning_logs .pytest_cache .mypy_cache .ruff_cache
