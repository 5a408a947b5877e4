//! The style guide of CONTRIBUTING.md: links of the documentation, phrases in pages and code, and the
//! names of tests.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use crate::tree::{files, root, tests_in};

/// The phrases of the style guide, each with what to write instead. A phrase must not have a
/// legitimate use in technical English.
const BANNED: &str = include_str!("../data/language.tsv");
const TEST_NAME_LENGTH: usize = 60;

fn pages() -> Vec<PathBuf> {
    let others = [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "hack/README.md",
        "deploy/chart/README.md",
    ];
    files("docs", "md").into_iter().chain(others.map(|name| root().join(name))).collect()
}

/// The files with code: everything but data and generated files.
fn code() -> Vec<PathBuf> {
    let directories = ["src", "tests", "benches", "fuzz", "examples", "deploy", "hack"];
    let kinds = ["rs", "go", "proto", "sh", "yaml", "toml", "mod"];
    let mut all: Vec<PathBuf> =
        ["Cargo.toml", "deny.toml", "build.rs"].map(|name| root().join(name)).into();
    for directory in directories {
        kinds.iter().for_each(|kind| all.extend(files(directory, kind)));
    }
    let is_generated = |path: &Path| {
        ["fuzz/target", "deploy/crds", "deploy/crds-upstream", "src/grpc/generated"]
            .iter()
            .any(|directory| path.starts_with(root().join(directory)))
    };
    all.retain(|path| !is_generated(path));
    all
}

/// The lines of a page outside of code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines().zip(1..).filter_map(move |(line, number)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        (!is_code && !is_fence).then_some((number, line))
    })
}

/// Fails with the problems that `find` sees in files: line numbers and texts.
fn no_file_has(paths: Vec<PathBuf>, find: impl Fn(&Path, &str) -> Vec<(usize, String)>) {
    let mut found = Vec::new();
    for path in paths {
        let text = fs::read_to_string(&path).unwrap();
        let shown = path.strip_prefix(root()).unwrap().display();
        let problems = find(&path, &text).into_iter();
        found.extend(problems.map(|(line, problem)| format!("{shown}:{line}: {problem}")));
    }
    assert!(found.is_empty(), "{} found:\n{}", found.len(), found.join("\n"));
}

/// The anchors that GitHub generates for headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|(_, line)| line.starts_with('#'));
    let anchor = |(_, line): (usize, &str)| {
        let heading = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        heading
            .chars()
            .filter(|letter| letter.is_alphanumeric() || "-_".contains(*letter))
            .collect()
    };
    headings.map(anchor).collect()
}

/// Whether a relative link of a page has an existing file and heading as its target.
fn exists(page: &Path, target: &str) -> bool {
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let other = if path.is_empty() { page.to_owned() } else { page.with_file_name(path) };
    let has_anchor = |text: String| anchors(&text).contains(anchor);
    other.exists() && (anchor.is_empty() || fs::read_to_string(other).is_ok_and(has_anchor))
}

#[test]
fn relative_links_have_an_existing_target() {
    no_file_has(pages(), |page, text| {
        let mut missing = Vec::new();
        for (number, line) in prose(text) {
            let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            let relative = targets.filter(|target| !target.contains("://"));
            let wrong = relative.filter(|target| !exists(page, target));
            missing.extend(wrong.map(|target| (number, target.to_owned())));
        }
        missing
    });
}

/// The words of a text in lower case, each with its line. Underscores separate words; code between
/// backticks is omitted.
fn words(text: &str) -> Vec<(usize, String)> {
    let mut words = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let line = line.split('`').step_by(2).collect::<Vec<_>>().join(" ").replace("\\n", " ");
        let parts = line.split(|letter: char| !letter.is_alphanumeric());
        let parts = parts.filter(|word| !word.is_empty());
        words.extend(parts.map(|word| (number, word.to_lowercase())));
    }
    words
}

#[test]
fn pages_comments_strings_and_names_use_plain_words() {
    let mut phrases: HashMap<&str, Vec<(Vec<&str>, &str)>> = HashMap::new();
    for line in BANNED.lines().skip(1) {
        let (phrase, instead) = line.split_once('\t').unwrap();
        let mut words = phrase.split(' ');
        let first = words.next().unwrap();
        phrases.entry(first).or_default().push((words.collect(), instead));
    }
    no_file_has([pages(), code()].concat(), |_, text| {
        let (words, mut found) = (words(text), Vec::new());
        for (at, (line, first)) in words.iter().enumerate() {
            for (others, instead) in phrases.get(first.as_str()).into_iter().flatten() {
                let next = words[at + 1..].iter().map(|(_, word)| word.as_str());
                if next.take(others.len()).eq(others.iter().copied()) {
                    found.push((*line, format!("{first} {}: {instead}", others.join(" "))));
                }
            }
        }
        found
    });
}

#[test]
fn names_of_tests_are_short() {
    no_file_has(files("src", "rs").into_iter().chain(files("tests", "rs")).collect(), |_, text| {
        let long = tests_in(text).into_iter().filter(|(_, name)| name.len() > TEST_NAME_LENGTH);
        let problem = |name: &str| format!("{} of {TEST_NAME_LENGTH} letters: {name}", name.len());
        long.map(|(line, name)| (line, problem(name))).collect()
    });
}
