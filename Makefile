# What one needs, by the names that other projects use. Each runs in the active environment.
.PHONY: install test lint format types docs ci

install:  ## the package, editable, with all that the other commands need
	pip install -e ".[dev,docs]"

test:  ## what CI runs: no GPU, no network
	pytest

lint:
	ruff check
	ruff format --check
	lint-imports

format:
	ruff check --fix
	ruff format

types:
	pyright

docs:  ## the site, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict

ci:  ## all of it, in an environment of its own
	.ci/run
