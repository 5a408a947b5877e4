//! The table of the rules on docs/reference/conformance.md.

use std::fmt::Write as _;

use super::rules::all;

/// A row for each rule, in Markdown.
pub fn rules() -> String {
    let mut text = String::from("| rule | severity | a driver does this | source | otherwise |\n");
    text += "|---|---|---|---|---|\n";
    for rule in all() {
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} | {} |",
            rule.id,
            rule.severity.name(),
            rule.sentence,
            rule.source,
            rule.consequence
        );
    }
    text
}
