# Entry points; the work is in scripts/ and CMakeLists.txt.
#   TORCH_VERSION=2.11.0 make test    another version, in its own build folder
#   Torch_DIR=... make test           a libtorch that is already there

COMPAT_VERSIONS ?= 2.11.0 2.15.0

.PHONY: demo test test-long bench dev-build asan tsan tidy format format-check compat clean

demo:
	@scripts/demo.sh

test:
	@scripts/test.sh

test-long:
	@scripts/test.sh --long

# GROUP=engine|collectives|memory: only these rows; QUICK=1: five minutes at most.
bench:
	@scripts/bench.sh

# Every source on its own, as no unity batch hides a missing include.
dev-build:
	@scripts/setup.sh
	@scripts/build.sh dev

asan tsan:
	@scripts/setup.sh
	@scripts/build.sh $@
	@ctest --preset $@ -j2

tidy:
	@scripts/tidy.sh

format:
	@scripts/format.sh

format-check:
	@scripts/format.sh --check

compat:
	@set -e; for version in $(COMPAT_VERSIONS); do \
	  echo "== torch $$version"; \
	  TORCH_VERSION=$$version scripts/test.sh; \
	done

clean:
	@rm -rf build
