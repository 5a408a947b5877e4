# shellcheck shell=bash
# Reads the JSON reports of ginkgo (--ginkgo.json-report), in which csi-sanity and Kubernetes' suite write their results.
# Sourced, never run.

# report_is_complete REPORT: whether the report exists and has specs.
report_is_complete() { jq -e '.[0].SpecReports | length > 0' "$1" >/dev/null 2>&1; }

# report_counts REPORT: prints how many specs passed, failed, are pending, and were skipped.
report_counts() {
    jq -r '[.[].SpecReports[] | select(.LeafNodeType == "It") | .State]
        | [map(select(. == "passed")), map(select(IN("passed", "pending", "skipped") | not)),
           map(select(. == "pending")), map(select(. == "skipped"))]
        | map(length) | @tsv' "$1"
}

# report_failures REPORT: prints each failure, with its place and message.
report_failures() {
    jq -r '.[].SpecReports[] | select(.State | IN("passed", "pending", "skipped") | not)
        | "  failed: \((.ContainerHierarchyTexts // []) + [.LeafNodeText] | join(" "))",
          (.Failure | "    \(.Location.FileName | split("/") | last):\(.Location.LineNumber)",
           (.Message | split("\n")[] | "    \(.)"))' "$1"
}

# report_specs REPORT STATE: prints the name of each spec in this state, a tab, and the reason.
report_specs() {
    jq -r --arg state "$2" '.[].SpecReports[] | select(.LeafNodeType == "It" and .State == $state)
        | [((.ContainerHierarchyTexts // []) + [.LeafNodeText] | join(" ")), (.Failure.Message // "")] | @tsv' "$1"
}
