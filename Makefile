# Everything there is to do with the tree. Each target installs the Debian packages that it needs and are missing.
.PHONY: help build install demo test calls soak lint bench tcb rig-shell clean
.DEFAULT_GOAL := help
SHELL := /bin/bash

PREFIX ?= /usr/local
target := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
release := $(target)/x86_64-unknown-linux-gnu/release
dist := $(target)/dist
rig := tests/rig

help:
	@echo "make demo        a real job in a microVM: what went in, what came out, what kept it in"
	@echo "make test        all tests; ends with the count of passed and failed"
	@echo "make calls       the tests, and whether VMMs call all that their lists allow; for a change of resources/seccomp"
	@echo "make soak SEED=n the tests with full counts and the random choices of seed n"
	@echo "make lint        formatting, warnings, shell scripts"
	@echo "make bench       times and costs beside QEMU, in one table"
	@echo "make tcb         what has to be trusted, counted by process"
	@echo "make rig-shell   a shell in the emulated KVM host that the tests use where there is no real one"
	@echo "make install     into PREFIX ($(PREFIX)), under DESTDIR if set"
	@echo "make build       the programs, laid out as installed, in $(dist)"
	@echo "make clean       removes what was built here; the cache of kernels and images is kept"

build:
	@$(rig)/need gcc libc6-dev cpio
	@$(rig)/toolchain
	cargo build --release --locked -p vmm -p netfilter -p guest -p jailer -p bulkhead
	@rm -rf "$(dist)" && mkdir -p "$(dist)/bin" "$(dist)/lib/bulkhead" "$(dist)/initramfs"
	@install -m 755 "$(release)/bulkhead" "$(dist)/bin/bulkhead"
	@install -m 755 "$(release)/bulkhead-vmm" "$(dist)/lib/bulkhead/bulkhead-vmm"
	@install -m 755 "$(release)/bulkhead-netfilter" "$(dist)/lib/bulkhead/bulkhead-netfilter"
	@install -m 755 "$(release)/bulkhead-jailer" "$(dist)/lib/bulkhead/bulkhead-jailer"
	@install -m 755 "$(release)/bulkhead-guest" "$(dist)/initramfs/init"
	@resources/kernels/cpio.sh "$(dist)/initramfs" >"$(dist)/lib/bulkhead/agent.cpio" && rm -r "$(dist)/initramfs"

install: build
	install -d "$(DESTDIR)$(PREFIX)/bin" "$(DESTDIR)$(PREFIX)/lib/bulkhead"
	install -m 755 "$(dist)/bin/bulkhead" "$(DESTDIR)$(PREFIX)/bin/bulkhead"
	install -m 755 "$(dist)/lib/bulkhead/bulkhead-vmm" "$(DESTDIR)$(PREFIX)/lib/bulkhead/bulkhead-vmm"
	install -m 755 "$(dist)/lib/bulkhead/bulkhead-netfilter" "$(DESTDIR)$(PREFIX)/lib/bulkhead/bulkhead-netfilter"
	install -m 755 "$(dist)/lib/bulkhead/bulkhead-jailer" "$(DESTDIR)$(PREFIX)/lib/bulkhead/bulkhead-jailer"
	install -m 644 "$(dist)/lib/bulkhead/agent.cpio" "$(DESTDIR)$(PREFIX)/lib/bulkhead/agent.cpio"

demo: build
	@home=$$($(rig)/state.sh debian) && \
	BULKHEAD_HOME="$$home" BULKHEAD_DIST="$(dist)" resources/demo/demo.sh

test: build
	@$(rig)/need strace acpica-tools
	@cargo build --release --locked -p e2e -p payload -p probe
	@mkdir -p "$(dist)/test" "$(dist)/initramfs" && install -m 755 "$(release)/payload" "$(dist)/test/payload"
	@install -m 755 "$(release)/probe" "$(dist)/test/probe"
	@install -m 755 "$(release)/payload" "$(dist)/initramfs/init"
	@resources/kernels/cpio.sh "$(dist)/initramfs" >"$(dist)/test/payload.cpio" && rm -r "$(dist)/initramfs"
	@home=$$($(rig)/state.sh busybox $(if $(BULKHEAD_SOAK),nettools)) && sources=$$(tests/images/sources.sh "$(dist)/test/payload") && \
	BULKHEAD_HOME="$$home" BULKHEAD_DIST="$(dist)" BULKHEAD_SOURCES="$$sources" BULKHEAD_E2E="$(release)/e2e" $(rig)/suite

calls: export BULKHEAD_CALLS := 1
calls: test

soak: export BULKHEAD_SOAK := 1
soak: export SEED ?= 1
soak: export BULKHEAD_E2E_SECONDS ?= 14400
soak: test

lint:
	@$(rig)/lint

bench: build
	@cargo build --release --locked -p probe -p payload
	@mkdir -p "$(dist)/test" && install -m 755 "$(release)/probe" "$(release)/jail-cost" "$(release)/payload" "$(dist)/test/"
	@home=$$($(rig)/state.sh busybox fio) && \
	BULKHEAD_HOME="$$home" BULKHEAD_DIST="$(dist)" tests/bench/run

tcb:
	@tests/tcb

rig-shell:
	@$(rig)/run

clean:
	cargo clean
