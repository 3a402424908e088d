# Two targets matter to a newcomer: `make quickstart` and `make test`. Both install what is
# missing (scripts/setup.sh says what it does) and need neither a GPU nor anything of the
# internet but the package registries.

SHELL = /bin/sh
CARGO ?= cargo
SEED ?= 0
OUT ?= runs/quickstart
HARNESS ?=
# Harness pi has a smaller recipe: each of its rollouts starts a Node.js process.
RECIPE ?= recipes/quickstart$(if $(filter pi,$(HARNESS)),-pi).toml

ESPALIER = target/release/espalier
NEXTEST = $(CARGO) nextest run --release --locked --workspace

# What setup.sh installs with cargo lands here.
CARGO_HOME ?= $(HOME)/.cargo
export PATH := $(CARGO_HOME)/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup setup-test setup-long build quickstart test test-long lint docs bench bench-gateway clean

help: ## Say what the targets do
	@echo "usage: make TARGET [SEED=0] [OUT=runs/quickstart] [RECIPE=recipes/quickstart.toml] [HARNESS=pi]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

setup: ## Install what building and running need, if it is missing
	@sh scripts/setup.sh run

setup-long: ## Install what the long tests need, if it is missing
	@sh scripts/setup.sh long

setup-test: ## Install what the tests need, if it is missing
	@sh scripts/setup.sh test

build: setup ## Build target/release/espalier
	$(CARGO) build --release --locked -p espalier

quickstart: build ## Train the built-in policy on the built-in tasks; figures before and after
	$(ESPALIER) train $(RECIPE) --out $(OUT) --seed $(SEED) $(if $(HARNESS),--harness $(HARNESS))

# The tests come last, so that their summary is the last thing to be read.
test: setup-test lint docs ## Everything that needs no GPU: formatting, lints, docs, all tests
	$(CARGO) test --doc --release --locked --workspace --quiet
	$(NEXTEST)

test-long: setup-long build ## What takes minutes or hours: repeated kills, 200 sandboxes, real tasks through pi, training runs to the end
	$(NEXTEST) --profile long --run-ignored ignored-only

lint: ## Formatting and clippy, warnings denied
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --release --locked -p model --all-targets --features cuda -- -D warnings

docs: ## API documentation, warnings denied, in target/doc
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --release --locked --workspace --no-deps

bench: setup ## Measure speed; results in target/criterion
	$(CARGO) bench --locked --workspace

bench-gateway: build ## Measure the gateway beside those of others, which are installed; results in runs/gateway-bench.jsonl
	$(CARGO) build --release --locked -p gateway --examples
	python3 scripts/bench/gateway.py install
	mkdir -p runs
	python3 scripts/bench/gateway.py run runs/gateway-bench.jsonl --repetitions 3
	python3 scripts/bench/gateway.py table runs/gateway-bench.jsonl

clean: ## Remove what was built; runs/ stays
	$(CARGO) clean
