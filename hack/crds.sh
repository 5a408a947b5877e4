#!/usr/bin/env bash
# hack/crds.sh: writes deploy/crds anew from the Rust types. To be run after every change of a type of
# src/kubernetes that Kubernetes stores.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
cd "$repo"

# A type that is gone leaves no definition behind.
rm -f deploy/crds/*.yaml
cargo run --quiet --locked --example crds -- deploy/crds
