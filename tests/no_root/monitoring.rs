//! deploy/monitoring: dashboard and alerts use metrics that exist, and each alert is documented.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::tree::read;

fn rules() -> Vec<Value> {
    let mut rules: Value = serde_saphyr::from_str(&read("deploy/monitoring/rules.yaml")).unwrap();
    serde_json::from_value(rules["groups"][0]["rules"].take()).unwrap()
}

/// Full names of metrics, from the committed list of registered names. A registry adds its prefixes;
/// those of other modules are included for modules that register in several.
fn exported() -> BTreeSet<String> {
    let list = read("tests/data/metrics.txt");
    let lines = || list.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let prefixes: Vec<_> = lines().filter(|line| line[1] == "prefix").map(|line| line[2]).collect();
    let mut names = BTreeSet::new();
    for line in lines().filter(|line| line[1] != "prefix") {
        names.insert(line[1].to_owned());
        for outer in &prefixes {
            names.insert(format!("{outer}_{}", line[1]));
            names.extend(prefixes.iter().map(|inner| format!("{outer}_{inner}_{}", line[1])));
        }
    }
    names
}

/// The metrics in a text, without the suffixes that the exposition format adds.
fn used(text: &str) -> BTreeSet<String> {
    let is_name =
        |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_';
    let words = text.split(|letter| !is_name(letter));
    let ours = words.filter(|word| {
        word.starts_with("csi_loopback_") || word.starts_with("snapshot_metadata_controller_")
    });
    ours.map(|word| {
        let suffixes = ["_total", "_bucket", "_count", "_sum"];
        let name = suffixes.iter().find_map(|suffix| word.strip_suffix(suffix));
        name.unwrap_or(word).to_owned()
    })
    .collect()
}

#[test]
fn dashboard_and_alerts_use_exported_metrics() {
    let exported = exported();
    for file in ["deploy/monitoring/dashboard.json", "deploy/monitoring/rules.yaml"] {
        let used = used(&read(file));
        assert!(used.len() > 8, "{file}: {used:?}");
        let unknown: Vec<_> = used.difference(&exported).collect();
        assert!(unknown.is_empty(), "{file}: not in tests/data/metrics.txt: {unknown:?}");
    }
}

/// Each has a case in which it fires: `hack/soak.sh` runs the cases with promtool, whose build takes
/// four minutes.
#[test]
fn each_alert_is_documented_and_has_a_case() {
    let page = read("docs/guide/operations.md");
    let cases = read("tests/data/rules.test.yaml");
    for rule in rules() {
        let alert = rule["alert"].as_str().unwrap();
        assert!(
            page.contains(&format!("| `{alert}` |")),
            "{alert}: not in docs/guide/operations.md"
        );
        assert!(rule["expr"].is_string() && rule["annotations"]["summary"].is_string(), "{alert}");
        assert!(cases.contains(alert), "{alert}: not in tests/data/rules.test.yaml");
    }
}

/// A counter with a label begins with its first event, which is no increase.
#[test]
fn an_alert_on_an_increase_sees_the_first_event() {
    let from_the_start = ["csi_loopback_rpc_failures_total{code"];
    for rule in rules() {
        let text = rule["expr"].as_str().unwrap();
        let is_increase = text.contains("increase(") || text.contains("rate(");
        let is_seen =
            text.contains("unless") || from_the_start.iter().any(|series| text.contains(series));
        assert!(!is_increase || is_seen, "{}: {text}", rule["alert"]);
    }
}

#[test]
fn the_dashboard_is_valid_json_with_unique_panels() {
    let board: Value = serde_json::from_str(&read("deploy/monitoring/dashboard.json")).unwrap();
    let panels = board["panels"].as_array().unwrap();
    for panel in panels {
        let text = panel["description"].as_str().unwrap_or_default();
        assert!(text.ends_with('.'), "panel {} has no description", panel["id"]);
    }
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());
}
