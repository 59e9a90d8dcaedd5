#!/bin/sh
# Compile the kernels for a 64-bit ARM processor and run them, under emulation, against plain loops in float64 and, for the
# products, to the bit. Debian: apt-get install gcc-aarch64-linux-gnu qemu-user
set -eu
cd "$(dirname "$0")/../.."
for needed in aarch64-linux-gnu-gcc qemu-aarch64; do
    command -v "$needed" > /dev/null || { echo "make check-aarch64 needs $needed (apt-get install gcc-aarch64-linux-gnu qemu-user)" >&2; exit 2; }
done
kernels=src/lagrpo/cpu
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
for flags in -march=armv8-a; do
    aarch64-linux-gnu-gcc -std=gnu11 -O2 $flags -fopenmp -static -Wall -Wextra -Werror -Wno-psabi -I "$kernels" \
        -o "$made/harness" tests/aarch64/harness.c "$kernels"/*.c -lm
    OMP_NUM_THREADS=2 qemu-aarch64 "$made/harness"
    echo "$flags: the kernels are right"
done
