# Everything a checkout needs. The first target of a day that needs Python makes .venv and installs what
# constraints.txt pins; `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

py    := $(VENV)/bin/python
stamp := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help serve chat test gpu golden schemas torture clients screenshots bench check format docs readme model install clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS="..." goes to the command: make serve ARGS="--port 9000 --hbm-bytes 2GiB"'

serve: $(stamp)  ## serve on 127.0.0.1:8000; the first time fetches the embedded model
	@$(py) -m dormouse_gateway serve $(ARGS)

chat: $(stamp)  ## chat with the server in another terminal
	@$(py) -m dormouse_gateway chat $(ARGS)

test: $(stamp) model  ## the test suite
	$(py) -m pytest $(ARGS)

gpu: $(stamp) model  ## the tests that need a CUDA device
	$(py) -m pytest -m gpu $(ARGS)

golden: $(stamp) model  ## the long exactness runs; ARGS="-k 'long and fp32 and fork'" is one leg
	$(py) -m pytest -m golden --timeout 0 -o faulthandler_timeout=0 -v $(ARGS)

schemas: $(stamp) model  ## 200 random schemas, greedy and at temperature 1, held to by the embedded model
	$(py) -m pytest -m golden --timeout 0 -o faulthandler_timeout=0 -s tests/app/test_schemas.py $(ARGS)

torture: $(stamp) model  ## 200 times kill -9 on a busy server; ARGS="--rounds 3 --seed 7" is fewer
	$(py) -m tests.crash.torture $(ARGS)

clients: $(stamp) model  ## public clients, installed for it, against a real server; ARGS="-k langchain" is one
	$(py) -m pytest tests/clients -m '' -o faulthandler_timeout=0 -v $(ARGS)

screenshots: $(stamp) model  ## the pictures of docs/images, taken of a real server in Chromium
	$(py) -m pytest -m screenshots tests/app/test_admin_page.py $(ARGS)

bench: $(stamp) model  ## figures of this machine; ARGS=--help lists the others
	$(py) -m bench $(or $(ARGS),serve-and-chat)

check: $(stamp)  ## ruff, mypy --strict, import directions
	$(py) -m ruff check .
	$(py) -m ruff format --check .
	$(py) -m mypy
	$(VENV)/bin/lint-imports --no-cache
	$(py) -m pytest -q --durations=0 tests/test_imports.py

format: $(stamp)  ## mend what ruff can mend
	$(py) -m ruff check --fix --unsafe-fixes .
	$(py) -m ruff format .

docs: $(stamp) model  ## write the tables of docs/ that are made from the code
	$(py) -m tests.docs

readme: $(stamp)  ## README.md and docs/quickstart.md, every command of them, on a clean clone; prints the minutes
	$(py) -m tests.docs.readme $(ARGS)

model: $(stamp)  ## fetch the embedded model, once
	@$(py) -m dormouse_gateway model fetch

install: $(stamp)  ## make .venv

# The stamp is written last: an installation that was interrupted is begun again.
$(stamp): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  found=$$($(PYTHON) --version 2>/dev/null) || found=missing; \
	  echo "Dormouse needs Python 3.11 or newer, and $(PYTHON) is $$found." >&2; \
	  echo "Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(py) || $(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  rm -rf $(VENV); exit 1; }
	$(py) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:  ## remove .venv and what builds and tests leave behind
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
