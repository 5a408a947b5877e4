//! deploy/chart: its page and its schema have the values of values.yaml, each on one line with its
//! comment above it. tests/deploy/manifests/chart.rs renders it.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use crate::tree::{read, root};

/// A value: its keys joined by dots, its default, and its comment.
struct Entry {
    key: String,
    default: String,
    comment: String,
}

fn entries() -> Vec<Entry> {
    let text = read("deploy/chart/values.yaml");
    let (mut found, mut section, mut comment) = (Vec::new(), "", "");
    // The comment at the start is about the file.
    for line in text.lines().skip_while(|line| !line.is_empty()) {
        let words = line.trim_start();
        if let Some(words) = words.strip_prefix("# ") {
            assert!(comment.is_empty(), "one line of comment: {line}");
            comment = words;
            continue;
        }
        let Some((key, default)) = words.split_once(':') else {
            assert!(words.is_empty(), "{line}");
            continue;
        };
        let nested = line.starts_with("  ");
        if default.is_empty() {
            assert!(!nested && comment.is_empty(), "values are on one line: {line}");
            section = key;
            continue;
        }
        let key = if nested { format!("{section}.{key}") } else { key.to_owned() };
        assert!(!comment.is_empty(), "{key} has no comment");
        found.push(Entry { key, default: default.trim().to_owned(), comment: comment.to_owned() });
        comment = "";
    }
    found
}

#[test]
fn the_page_of_the_chart_has_its_values() {
    let page = read("deploy/chart/README.md");
    let (head, _) = page.split_once("\n| value |").unwrap();
    let rows = entries().into_iter().map(|entry| {
        format!(
            "| `{}` | `{}` | {} |\n",
            entry.key,
            entry.default,
            entry.comment.replace('|', "\\|")
        )
    });
    let expected = format!(
        "{head}\n| value | default | purpose |\n|---|---|---|\n{}",
        rows.collect::<String>()
    );
    if std::env::var_os("UPDATE_NAMES").is_some() {
        fs::write(root().join("deploy/chart/README.md"), &expected).unwrap();
        return;
    }
    assert_eq!(page, expected, "UPDATE_NAMES=1 cargo test --all-features --test no_root chart::");
}

#[test]
fn the_schema_of_the_chart_knows_its_values_and_no_others() {
    let schema: Value = serde_json::from_str(&read("deploy/chart/values.schema.json")).unwrap();
    let mut known = BTreeSet::new();
    for (name, value) in schema["properties"].as_object().unwrap() {
        // Maps that users fill have no entry in values.yaml for each key.
        let nested = value["properties"].as_object().filter(|_| name != "sidecarDigests");
        match nested {
            Some(inner) => known.extend(inner.keys().map(|key| format!("{name}.{key}"))),
            None => drop(known.insert(name.clone())),
        }
    }
    // Helm gives it to charts that are parts of others.
    known.remove("global");
    let values: BTreeSet<String> = entries().into_iter().map(|entry| entry.key).collect();
    assert_eq!(known, values);
    closed(&schema, "");
}

/// Every object of the schema names its keys, or the type of all of them.
fn closed(schema: &Value, at: &str) {
    if schema["type"] == "object" && at != "/properties/global" {
        assert!(schema.get("additionalProperties").is_some(), "{at}");
    }
    match schema {
        Value::Object(fields) => {
            fields.iter().for_each(|(key, value)| closed(value, &format!("{at}/{key}")));
        }
        Value::Array(items) => items.iter().for_each(|item| closed(item, at)),
        _ => {}
    }
}
