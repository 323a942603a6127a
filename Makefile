# make demo    train with and without balancing, and compare
# make test    all tests
# make laws    the laws of plans on 10,000 random steps instead of 2,000
# make soak    ten minutes of random balanced steps against unbalanced ones
# make trust   docs/trust.md, from the newest results in benchmarks/
# make check   formatting, lint, types, vulnerabilities and licences of what we depend on
# make bench   planning time and routing, as JSON

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.hpp csrc/*/*.cpp csrc/*/*.hpp)

# One thread per process: ranks share the cores.
export OMP_NUM_THREADS := 1

.PHONY: demo test laws soak trust check bench clean

demo: $(INSTALLED)
	$(BIN)/knapformer demo

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

laws: $(INSTALLED)
	$(BIN)/python -m pytest tests/plans -k laws --law-cases 10000

soak: $(INSTALLED)
	$(BIN)/python scripts/soak.py

trust: $(INSTALLED)
	$(BIN)/python scripts/trust.py --write

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/supply.py

bench: $(INSTALLED)
	$(BIN)/python benchmarks/planning_time.py
	$(BIN)/python benchmarks/routing.py

$(INSTALLED): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist runs .hypothesis .pytest_cache .ruff_cache .mypy_cache
