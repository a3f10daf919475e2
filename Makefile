# make demo    the whole pipeline on a small model, on this machine's CPU or GPU
# make test    the tests
# make check   ruff and mypy
# make clean   removes what these made, the environment too; outputs/ stays
#
# ARGS goes to the program: make demo ARGS='experiment=quick', make test ARGS='-k config'.
# PYTHON names the interpreter that the environment is made from.

PYTHON ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test check clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/python -m nemo_qad.train +recipe=four_over_six $(ARGS)

# One process a core, up to 4, with one thread each; a file's tests stay together, as they share what they built.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# .ready is written last, so an environment that was left half-made is made again from nothing.
$(READY): pyproject.toml constraints.txt
	@python=$$(PYTHON='$(PYTHON)' .ci/find_python) || exit 1; \
	if [ ! -f $(READY) ] || ! $(BIN)/python -c '' 2>/dev/null; then \
	    echo "Making $(VENV) with $$python and installing PyTorch, Megatron-Core and ModelOpt:"; \
	    echo "6 GB and 3 to 8 minutes the first time, by network and disk."; \
	    rm -rf $(VENV) && "$$python" -m venv $(VENV) || exit 1; \
	else \
	    echo "Dependencies changed: bringing $(VENV) up to date."; \
	fi; \
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' || exit 1; \
	touch $(READY)
