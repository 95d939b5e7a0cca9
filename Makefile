# Two commands: `make study` measures, `make test` tests. Each prepares the environment it needs.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Test processes: as many as there are cores, to 12, since each has memory of its own on a GPU.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 12 ? n : 12)))
# Tests and studies start hundreds of Pythons, which should not compile the same sources again, whatever the caller's setting.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: study test test-gpu check format clean

study: $(VENV)/ready
	$(RUN) -m fusewise study rope --preset rope-quick
	$(RUN) -m fusewise study gelu --preset gelu-quick

test: $(VENV)/ready
	TRITON_INTERPRET=1 $(RUN) -m pytest -q -n $(WORKERS) -m interpreter
	$(RUN) -m pytest -q -n $(WORKERS) --dist loadfile -m "not interpreter"

# What `make test` has for a GPU, alone. Kernels take most of the time to compile, so their tests are handed out one by one.
test-gpu: $(VENV)/ready
	$(RUN) -m pytest -q -n $(WORKERS) --dist worksteal -m gpu

check: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/ready
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

$(VENV)/ready: scripts/environment.py $(wildcard requirements/*.txt) pyproject.toml
	$(PYTHON) scripts/environment.py $(VENV)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
