# Two commands for a fresh Debian or Ubuntu machine with Rust: `make demo` and `make test`.
#
# This file only installs missing packages: PostgreSQL's programs and a C compiler, and in CI also
# valgrind, faketime and Chromium. Everything else is `cargo xtask`, or `postrider-demo`. Extra
# arguments: make demo ARGS=--keep

CARGO ?= $(shell command -v cargo || echo "$$HOME/.cargo/bin/cargo")

.PHONY: help demo test prerequisites

help:
	@echo "make demo   a throw-away PostgreSQL, a Pub/Sub emulator, writers, the relay, a SIGKILL: about 30 s"
	@echo "make test   formatting, lints, documentation and every test"

# `postrider-demo` runs the program `postrider` that is in the same folder, so build both.
demo: prerequisites
	$(CARGO) build --locked --package postrider --package postrider-demo
	"$${CARGO_TARGET_DIR:-target}"/debug/postrider-demo $(ARGS)

test: prerequisites
	$(CARGO) xtask ci

# Debian keeps initdb out of PATH. POSTRIDER_PG_BIN can name another folder that has initdb.
prerequisites:
	@set -e; \
	missing=; \
	command -v cc >/dev/null || missing="gcc libc6-dev"; \
	if [ -z "$$POSTRIDER_PG_BIN" ] && ! command -v initdb >/dev/null \
	    && ! ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then \
	    missing="$${missing:+$$missing }postgresql"; \
	fi; \
	if [ -n "$$CI" ] && ! command -v valgrind >/dev/null; then \
	    missing="$${missing:+$$missing }valgrind"; \
	fi; \
	if [ -n "$$CI" ] && ! command -v faketime >/dev/null; then \
	    missing="$${missing:+$$missing }faketime"; \
	fi; \
	browser=; \
	if [ -n "$$CI" ] && ! command -v chromium >/dev/null; then browser=chromium; fi; \
	[ -n "$$missing$$browser" ] || exit 0; \
	as_root=; \
	if [ "$$(id -u)" != 0 ]; then \
	    if [ -t 0 ]; then as_root="sudo"; else as_root="sudo -n"; fi; \
	fi; \
	if ! command -v apt-get >/dev/null; then \
	    [ -n "$$missing" ] || exit 0; \
	    echo "This needs $$missing, and there is no apt-get here: install them, or set" >&2; \
	    echo "POSTRIDER_PG_BIN to the folder with PostgreSQL's initdb and postgres." >&2; \
	    exit 1; \
	fi; \
	install() { \
	    echo "Installing:" "$$@"; \
	    $$as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq </dev/null \
	        && $$as_root env DEBIAN_FRONTEND=noninteractive \
	            apt-get install -y -qq --no-install-recommends "$$@" </dev/null; \
	}; \
	[ -z "$$missing" ] || install $$missing || { \
	    echo "Could not install the packages. Ask an administrator to run: apt-get install" $$missing >&2; \
	    exit 1; \
	}; \
	[ -z "$$browser" ] || install $$browser \
	    || echo "SKIPPED: the page in a browser (apt-get install chromium)"
