#!/usr/bin/env bash
# hack/crds.sh: generates deploy/crds and deploy/crds-upstream from the Rust types. Run it after a change of a custom
# resource type in src/kubernetes.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
cd "$repo"

# Remove definitions of deleted types.
rm -f deploy/crds{,-upstream}/*.yaml
cargo run --quiet --locked --example crds -- deploy
