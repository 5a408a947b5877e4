#!/usr/bin/env bash
# hack/fuzz.sh [SECONDS] [TARGET...]: explores with libFuzzer. Runs each fuzz target of fuzz/ (or those named) for so
# many seconds (20), as many at once as there are processors, from the seeds in fuzz/seeds and from what former
# runs have found. For 0 seconds they are only built.
#
# Not a part of hack/test.sh: its tests fuzz:: replay the seeds and run a bounded number of inputs, without libFuzzer.
# An input that this script finds runs there with FUZZ_INPUT=FILE cargo test --all-features --test no_root fuzz::TARGET.
#
# One line per target, "ok TARGET: …" or "FAILED TARGET: …", the latter with the input that made it
# fail and how to run it again. Exit code 77: cargo-fuzz cannot be had here, the last line says why.
# All files are in the target directory: target/fuzz/corpus and target/fuzz/artifacts.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
cd "$repo"

seconds=${1:-20}
[[ $seconds =~ ^(0|[1-9][0-9]*)$ ]] || die "$seconds is not a number of seconds"
shift || true

command -v c++ >/dev/null || install_missing g++ || {
    echo "no C++ compiler, which libFuzzer is built with"
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
# The fuzzer's flags are those of nightly compilers. No sanitizer: there is no unsafe code in what is
# fuzzed, and they halve the number of inputs.
RUSTC_BOOTSTRAP=1 "$tool" fuzz build --sanitizer none --codegen-units 16 >&2
((seconds > 0)) || exit 0

targets=("$@")
if ((${#targets[@]} == 0)); then
    mapfile -t targets < <(sed -n 's/^path = "fuzz_targets\/\(.*\)\.rs"$/\1/p' fuzz/Cargo.toml)
fi

# Bounded: 1 GiB of memory and 20 s for an input, inputs of 8 KiB.
limits=(-rss_limit_mb=1024 -timeout=20 -max_len=8192)
binaries=()
for target in "${targets[@]}"; do
    binary=$(find "$work" -path "*/release/$target" -type f -executable -print -quit)
    [[ -n $binary ]] || die "there is no target $target"
    binaries+=("$binary")
done
pids=()
for index in "${!targets[@]}"; do
    while (($(jobs -rp | wc -l) >= $(nproc))); do
        sleep 0.2
    done
    target=${targets[index]} corpus=$work/corpus/${targets[index]} artifacts=$work/artifacts/${targets[index]}/
    mkdir -p "$corpus" "$artifacts"
    # What is new goes into the first directory.
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
        [[ -z $input ]] || echo "    run it again: ${binaries[index]} $input"
    fi
done
exit "$failed"
