# Names of the commands that CONTRIBUTING.md uses. `make` lists them. hack/test.sh and .ci/run are the
# entry points of the tests.
SHELL := bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help build demo lint test full one names bench e2e soak fuzz

help: ## this list
	@sed -nE 's/^([a-z0-9]+):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

build: ## the binary, target/debug/csi-loopback
	@cargo build --locked

demo: ## the main job on real data; SCENE=session: another scene of hack/demo.sh --list
	@hack/demo.sh $(SCENE)

lint: ## format and clippy
	@cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features --locked -- -D warnings

test: ## the default tier; T=crash: a binary, or tests and steps whose names contain it, at full size
	@hack/test.sh $(T)

full: ## every test; CI runs this
	@hack/test.sh --full

one: ## one test, without other binaries: make one T=a_delta_from_a_deleted_base_is_exact
	@file=$$(grep -rlE "fn $(T)\(" --include='*.rs' tests src | head -n 1 || true)
	[[ -n $$file ]] || { echo "no test $(T)"; exit 1; }
	package=$$(dirname $$file)
	until [[ -e $$package/Cargo.toml ]]; do package=$$(dirname $$package); done
	target=--lib
	[[ $$package != . || $$file != tests/* ]] || target="--test $$(cut -d / -f 2 <<<$$file)"
	cargo test --locked --manifest-path $$package/Cargo.toml --all-features $$target $(T) -- \
	    --include-ignored --nocapture

names: ## update what is generated, after a change of flags, metrics or .proto files
	@UPDATE_NAMES=1 cargo test --locked --all-features --test no_root -- names:: generated::

bench: ## the figures of docs/design/performance.md; ROW=delta: one row
	@hack/bench.sh $(ROW)

e2e: ## a cluster with every pod; S=backup: one scenario of hack/e2e.sh list
	@hack/e2e.sh run $(S)

soak: ## long versions of the proofs with fresh seeds; MINUTES=60
	@hack/soak.sh $(MINUTES)

fuzz: ## one fuzz target with libFuzzer: make fuzz T=catalog; needs cargo-fuzz
	@RUSTC_BOOTSTRAP=1 cargo fuzz run --sanitizer none $(T) fuzz/seeds/$(T)
