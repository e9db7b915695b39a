# Everything a user, a developer and CI run. CI calls `check` and `test` and nothing else.
PYTHON ?= python3
BIN := .venv/bin
PIP_ARGS ?=
STAMP := .venv/.installed
PROTOS := common session link watch inference

.PHONY: run test check bench verify mutants proto lock clean help

help:
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

run: $(STAMP) ## fetch the default model, start a local cluster, ask it one question, stay until Ctrl-C
	$(BIN)/headrace run

test: $(STAMP) ## the whole test suite, two files at a time
	$(BIN)/python -m pytest -m "not verify" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(STAMP) ## ruff and mypy, strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .

bench: $(STAMP) ## the benchmarks; tables go to benchmarks/results/
	$(BIN)/python -m benchmarks $(ARGS)

verify: $(STAMP) ## the long tests, two at a time; their summary goes to docs/verify/, a file for each run
	$(BIN)/python -m pytest -m verify -n 2 --dist loadfile --no-loadscope-reorder --record=docs/verify $(ARGS)

mutants: $(STAMP) ## one-line faults in a copy of the product; each must turn its test red
	$(BIN)/python -m tests.mutants $(ARGS)

proto: $(STAMP) ## generate cluster/stubs from proto/
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Icluster/stubs=proto --python_out=. --grpc_python_out=. \
		--mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS:%=cluster/stubs/%.proto)

lock: $(STAMP) ## write requirements.lock from what is installed
	{ sed '/^[^#]/,$$d' requirements.lock; $(BIN)/python -m pip freeze --all --exclude-editable \
		| sed -E 's/^(torch==[0-9.]+)\+.*/\1/' | LC_ALL=C sort -f; } > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean: ## remove the virtual environment and every cache in this folder
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml requirements.lock $(wildcard engine/native/*.cpp engine/native/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock pip
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c requirements.lock -e '.[test,dev,bench]'
	touch $@
