#!/usr/bin/env bash
# hack/actions.sh: checks .github/workflows with actionlint and shellcheck, and that every action is named by a commit.
#
# Exit codes: 0 valid; 1 a problem; 77 actionlint cannot be built
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
cd "$repo"

handle_help "$@"
actionlint=$(go_tool actionlint) || exit 77
install_missing shellcheck || exit 77
"$actionlint" -color=false .github/workflows/*.yml
unpinned=$(grep -nE 'uses: ' .github/workflows/*.yml | grep -vE '@[0-9a-f]{40} # ' || true)
[[ -z $unpinned ]] || die "actions without a commit, or without its release in a comment:
$unpinned"
placeholders=$(grep -hoE 'uses: \S+@0{40}' .github/workflows/*.yml | sed 's/uses: //; s/@.*//' | sort -u | paste -sd ' ')
[[ -z $placeholders ]] || printf 'placeholders of hashes: %s\n' "$placeholders"
