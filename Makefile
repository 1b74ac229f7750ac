# SPDX-License-Identifier: Apache-2.0
# Thin names for the scripts; each sets up what it needs.
.DEFAULT_GOAL := help
.PHONY: help setup demo check test nightly consumers bench doors soak soak-deaths format lint clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: ## install what building and running need (apt; only what is missing)
	@scripts/setup

demo: ## train a small MoE model on a real text over four ranks and report
	@scripts/setup demo
	@scripts/demo

check: ## build, unit tests, Python tests, lint of what changed: the quick part of test
	@scripts/test --check

test: ## build and test everything, sanitizers included
	@scripts/test

nightly: ## the same with GPU code for all architectures, the whole of clang-tidy, larger models, the soak, random lives, and make consumers
	@scripts/test --nightly

consumers: ## the calls of vLLM, SGLang, FlashInfer, Megatron-Core, DeepSpeed and NeMo Automodel, read from their packages or run over Weft
	@scripts/test consumers

bench: ## measure this machine and write bench/results
	@scripts/setup bench
	@scripts/bench-cpu

doors: ## time the calls of DeepEP's, HybridEP's and fused_a2a's names on this machine's GPU
	@scripts/setup build
	@scripts/python
	@build/venv/bin/python bench/doors_bench.py --json build/doors.json

soak: ## a million small random exchanges, bit-checked (long)
	@scripts/setup test
	@scripts/soak

soak-deaths: ## 10,000 ranks lost at random, the results of the others bit-checked (long)
	@scripts/setup test
	@scripts/soak-deaths

format: ## format the C++ sources in place
	@scripts/setup test
	@scripts/format

lint: ## clang-tidy on all C++ sources
	@scripts/setup test
	@scripts/lint

clean: ## remove the build directories of the presets
	rm -rf build/cpu build/cpu-asan build/cpu-tsan build/cuda build/gpu-check build/demo build/bench
