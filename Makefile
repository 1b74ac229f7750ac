# SPDX-License-Identifier: Apache-2.0
# Thin names for the scripts; each sets up what it needs.
.DEFAULT_GOAL := help
.PHONY: help setup demo test bench soak format lint clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: ## install what building and running need (apt; only what is missing)
	@scripts/setup

demo: ## train a small MoE model on a real text over four ranks and report
	@scripts/setup
	@scripts/demo

test: ## build and test everything, sanitizers included (about an hour on two cores)
	@scripts/test

bench: ## measure this machine and write bench/results
	@scripts/setup
	@scripts/bench-cpu

soak: ## a million small random exchanges, bit-checked (long)
	@scripts/setup
	@scripts/soak

format: ## format the C++ sources in place
	@scripts/setup test
	@scripts/format

lint: ## clang-tidy on all C++ sources
	@scripts/setup test
	@scripts/lint

clean: ## remove the build directories of the presets
	rm -rf build/cpu build/cpu-asan build/cpu-tsan build/cuda build/fuzz build/gpu-check
