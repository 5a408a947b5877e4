#!/usr/bin/env bash
# hack/advisories.sh: checks the crates of Cargo.lock against the RustSec advisory database, as of now. Run it on a schedule:
# an advisory appears without a commit.
#
# Exit codes:
#   0    no advisory
#   1    an advisory that deny.toml does not list under [advisories] ignore
#   77   not checked: no connection to the database or the registry, or cargo-deny cannot be built
#
# Git fetches the database, with its configuration of proxies and mirrors. The programs of hack/tools are not checked, since
# they run only in tests.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
cd "$repo"

handle_help "$@"

not_checked() { # not_checked REASON
    printf '%s: not checked: %s\n' "${0##*/}" "$1" >&2
    exit 77
}

deny=$(cargo_deny) || not_checked "cargo-deny cannot be built"
"$deny" fetch db >&2 || not_checked "cannot fetch the advisory database; next: connect to github.com, or configure a mirror in git"
cargo fetch --locked --quiet >&2 || not_checked "cannot fetch the crates"
# Offline: from here, every failure is an advisory.
"$deny" --locked --offline check advisories
