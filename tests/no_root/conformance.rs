//! Generated parts of pages are those of the code: the rules of `conformance`, and the checklist of
//! backup clients.

use std::fs;

use csi_loopback::conformance::rules_page;
use csi_loopback::driver::fault::checklist;

use super::tree::root;

/// Compares the rest of a page after a heading, or writes it if UPDATE_RULES is set.
fn compare(page: &str, heading: &str, rest: &str) {
    let path = root().join("docs/reference").join(page);
    let text = fs::read_to_string(&path).unwrap();
    let (head, found) = text.split_once(heading).unwrap();
    if std::env::var_os("UPDATE_RULES").is_some() {
        fs::write(&path, format!("{head}{heading}{rest}")).unwrap();
        return;
    }
    assert!(
        found == rest,
        "{page} is out of date; run: UPDATE_RULES=1 cargo test --all-features --test no_root conformance::"
    );
}

#[test]
fn the_page_of_the_conformance_rules_is_current() {
    compare("conformance.md", "## Rules\n\n", &rules_page());
}

#[test]
fn the_checklist_of_backup_clients_is_current() {
    compare("client-checklist.md", "## Scenarios\n\n", &checklist());
}
