# `make quickstart` and `make test` also set up the environment. Both can be repeated safely.
#   make quickstart   SmolLM2-135M-Instruct learns to add by GRPO through vLLM; ends with a report
#   make test         lint, types, and tests
#   make test-long    run the long tests that `make test` skips
#   make faults       inject CASES faults into real runs and write the table into docs/reliability.md (about 25 minutes);
#                     resumes if interrupted (outputs/faults.jsonl)
#   make long-haul    2,000 rollouts, with vLLM and sampled ahead: memory, descriptors, threads and files must stay; table as above
#   make audit        check the minimum versions in pyproject.toml for known vulnerabilities; needs network access
# Settings: VENV (the virtual environment, default .venv), PYTHON (the interpreter it is made with), WORKERS (of pytest).

VENV ?= .venv
WORKERS ?= 2
CASES ?= 340
# One thread per process: two teams of spinning threads on shared cores are ten times slower than one.
OMP_NUM_THREADS ?= 1
export VENV OMP_NUM_THREADS

.PHONY: quickstart test test-long faults long-haul audit lint setup clean

quickstart: setup
	@env -u OMP_NUM_THREADS $(VENV)/bin/lightrl quickstart

test: lint
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-long: setup
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m long

faults: setup
	$(VENV)/bin/python -m tests.faults.campaign --cases $(CASES) --workers $(WORKERS) --results outputs/faults.jsonl --table docs/reliability.md

audit: setup
	$(VENV)/bin/python scripts/audit.py

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

setup:
	@bash scripts/setup.sh

clean:
	rm -rf outputs lightning_logs .pytest_cache .mypy_cache .ruff_cache
