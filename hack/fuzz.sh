#!/usr/bin/env bash
# hack/fuzz.sh [SECONDS] [TARGET...]: runs fuzz targets with libFuzzer, all of fuzz/ by default,
# each for SECONDS (20), in parallel on all processors. They start with the seeds in fuzz/seeds and
# the corpus of earlier runs. With 0 seconds, the targets are only built.
#
# hack/test.sh does not run this script. Its tests fuzz:: replay the seeds and a fixed number of
# inputs without libFuzzer. To replay an input there: FUZZ_INPUT=FILE cargo test --all-features
# --test no_root fuzz::TARGET.
#
# Prints one line per target, "ok TARGET: …" or "FAILED TARGET: …" with the failing input and the
# command to repeat it. Exits with 77 if cargo-fuzz cannot be installed; the last line gives the
# reason. All files are in the target directory: target/fuzz/corpus and target/fuzz/artifacts.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
cd "$repo"

seconds=${1:-20}
[[ $seconds =~ ^(0|[1-9][0-9]*)$ ]] || die "$seconds is not a number of seconds"
shift || true

command -v c++ >/dev/null || install_missing g++ || {
    echo "libFuzzer needs a C++ compiler"
    exit 77
}
reason=$(mktemp)
trap 'rm -f "$reason"; jobs -rp | xargs --no-run-if-empty kill' EXIT
if ! tool=$(cargo_fuzz 2>"$reason"); then
    tail -n 1 "$reason"
    exit 77
fi

work=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")/fuzz
export CARGO_TARGET_DIR=$work
# The fuzzer needs flags of nightly compilers. No sanitizer: the fuzzed code has no unsafe blocks,
# and a sanitizer halves the number of inputs.
RUSTC_BOOTSTRAP=1 "$tool" fuzz build --sanitizer none --codegen-units 16 >&2
((seconds > 0)) || exit 0

targets=("$@")
if ((${#targets[@]} == 0)); then
    mapfile -t targets < <(sed -n 's/^path = "fuzz_targets\/\(.*\)\.rs"$/\1/p' fuzz/Cargo.toml)
fi

# At most 1 GiB of memory, 20 s per input, and 8 KiB per input.
limits=(-rss_limit_mb=1024 -timeout=20 -max_len=8192)
binaries=()
for target in "${targets[@]}"; do
    binary=$(find "$work" -path "*/release/$target" -type f -executable -print -quit)
    [[ -n $binary ]] || die "unknown target $target; the targets are in fuzz/Cargo.toml"
    binaries+=("$binary")
done
pids=()
for index in "${!targets[@]}"; do
    while (($(jobs -rp | wc -l) >= $(nproc))); do
        sleep 0.2
    done
    target=${targets[index]} corpus=$work/corpus/${targets[index]} artifacts=$work/artifacts/${targets[index]}/
    mkdir -p "$corpus" "$artifacts"
    # libFuzzer adds new inputs to the first directory.
    "${binaries[index]}" "$corpus" "fuzz/seeds/$target" "${limits[@]}" -max_total_time="$seconds" \
        -artifact_prefix="$artifacts" -print_final_stats=1 >"${artifacts}log" 2>&1 &
    pids+=("$!")
done
failed=0
for index in "${!targets[@]}"; do
    target=${targets[index]} log=$work/artifacts/${targets[index]}/log
    if wait "${pids[index]}"; then
        inputs=$(sed -n 's/^stat::number_of_executed_units: //p' "$log")
        echo "ok $target: $inputs inputs in $seconds s"
    else
        failed=1
        input=$(sed -n "s|.*Test unit written to ||p" "$log" | tail -n 1)
        echo "FAILED $target: ${input:-$log}"
        grep -a -A 3 'panicked at\|ERROR: libFuzzer' "$log" | sed -n '1,12 s/^/    /p' || true
        [[ -z $input ]] || echo "    to repeat: ${binaries[index]} $input"
    fi
done
exit "$failed"
