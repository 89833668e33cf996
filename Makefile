# Every habit of the project. Each target sets up what it needs in .venv first; nothing has to be installed by hand.
SHELL := /bin/bash
.DEFAULT_GOAL := help
RUN := scripts/with-environment --tests --lint --
PYTEST := $(RUN) python -m pytest
# The theme tells of the next version of mkdocs at every start.
SITE := NO_MKDOCS_2_WARNING=1 scripts/with-environment --tests --docs -- mkdocs
REPEATS ?= 50

.PHONY: help
help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do printf '%-14s %s\n' "$$name" "$$text"; done

.PHONY: build
build: ## build the package and install it into .venv
	$(RUN) python -c 'import dsl; print("dsl", dsl.__version__)'

.PHONY: build-release
build-release: ## build and check wheels (glibc and musl, x86_64 and aarch64) and the source archive in dist/
	scripts/with-environment --tests --release -- python scripts/release.py

.PHONY: try-release
try-release: ## try the wheels of dist/ on other systems (as root)
	scripts/with-environment --tests --release -- python scripts/try_wheels.py dist/*.whl

.PHONY: test
test: ## all tests, fast ones first
	scripts/test

.PHONY: test-rust
test-rust: ## the engine's own tests (no Python involved)
	scripts/test rust

.PHONY: test-py
test-py: ## Python tests that start no job, the fast half: a test of each module
	scripts/test unit

.PHONY: test-contract
test-contract: ## Python tests that start no job, the other half: answers recorded from other tools
	scripts/test contract

.PHONY: test-package
test-package: ## what is shipped: the wheel, the source archive, and the wheels of a release
	scripts/test package

.PHONY: test-pythons
test-pythons: ## Python tests on 3.10 and on the newest Python of this machine
	scripts/test pythons

.PHONY: test-site
test-site: ## the site: its links, and its pages in a browser
	scripts/test site

.PHONY: test-proc
test-proc: ## tests that start real workers on this machine
	scripts/test proc matrix

.PHONY: test-fallbacks
test-fallbacks: ## engine tests under each forced kernel fallback
	scripts/test fallbacks

.PHONY: test-cluster
test-cluster: ## tests across several hosts in network namespaces (as root)
	scripts/test cluster

.PHONY: stress
stress: ## the kill matrix, each case REPEATS times (default 50), every fault on several hosts, 100 000 histories of jobs
	$(PYTEST) tests/unit/conductor tests/faults tests/proc tests/cluster -m 'faults or stress' --repeats $(REPEATS) --timeout 7200

.PHONY: fuzz
fuzz: ## property tests of every parser, with many more examples
	PROPTEST_CASES=20000 $(RUN) cargo test --release --package dsl-engine --package dsl-control
	$(RUN) cargo test --release --package dsl-control ten_million -- --ignored
	$(PYTEST) tests/unit tests/contract --hypothesis-profile=slow --timeout 1800

.PHONY: lint
lint: ## formatting, clippy, ruff, types, stub, documents: all that CI asks for
	scripts/lint

.PHONY: audit
audit: ## licences and sources of our dependencies, and what the world knows against them (needs the network)
	scripts/audit

.PHONY: format
format: ## format all code
	$(RUN) cargo fmt --all
	$(RUN) ruff check --fix --exit-zero --quiet .
	$(RUN) ruff format .

.PHONY: typecheck
typecheck: ## mypy, strict
	$(RUN) mypy

.PHONY: stubtest
stubtest: ## compare the extension's stub with the built extension
	$(RUN) python -m mypy.stubtest dsl._core --mypy-config-file pyproject.toml

.PHONY: docs
docs: ## write the pages, man pages and completion that are made from code; check the documents; build the site into target/site
	$(RUN) python scripts/api_docs.py
	$(RUN) python scripts/messages.py
	$(RUN) python scripts/command_files.py
	$(RUN) python scripts/reading_path.py
	$(RUN) python scripts/check_docs.py
	$(SITE) build --quiet

.PHONY: pictures
pictures: ## draw the pictures of the documents: diagrams, a recorded run, the charts and tables of `make bench`
	scripts/with-environment --tests --docs -- python scripts/pictures.py

.PHONY: docs-serve
docs-serve: ## show the site at http://127.0.0.1:8000/dsl/ while you write
	$(SITE) serve --no-strict

.PHONY: guarantees
guarantees: ## list the guarantees of docs/design.md, each with the tests that hold it
	@python3 scripts/guarantees.py

.PHONY: bench
bench: ## compare with torchrun, deepspeed and the bare kernel; results in bench-results/
	$(RUN) python benches/run.py

.PHONY: bench-page
bench-page: ## measure the rows of docs/benchmarks.md alone
	$(RUN) python benches/run.py --only page

.PHONY: example
example: ## a two-worker torch training on this machine
	scripts/example

.PHONY: clean
clean: ## remove what was built (the environment in .venv stays)
	rm -rf target dist bench-results .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find python tests scripts examples benches -name __pycache__ -type d -prune -exec rm -rf {} +
