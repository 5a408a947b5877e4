//! The style guide of CONTRIBUTING.md: line width, links, length and words of the documentation,
//! the words of comments, strings and identifiers in the code, and the names of tests.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use crate::source::{Kind, Piece, pieces, words};
use crate::tree::{files, root};

/// Maximum width of a line of prose.
const COLUMNS: usize = 100;
/// Maximum number of words in docs/.
const DOCS_WORDS: usize = 35_000;
const README_LINES: usize = 120;

/// The phrases of the style guide, each with what to write instead. A phrase must not have a
/// legitimate use in technical English.
const BANNED: &str = include_str!("../data/language.tsv");
const TEST_NAME_LENGTH: usize = 60;

/// Phrases by their first word, each with its other words and what to write instead.
type Phrases = HashMap<&'static str, Vec<(Vec<&'static str>, &'static str)>>;

fn banned() -> &'static Phrases {
    static PHRASES: LazyLock<Phrases> = LazyLock::new(|| {
        let mut phrases = Phrases::new();
        for line in BANNED.lines().skip(1) {
            let (phrase, instead) = line.split_once('\t').unwrap();
            let mut words = phrase.split(' ');
            let first = words.next().unwrap();
            phrases.entry(first).or_default().push((words.collect(), instead));
        }
        phrases
    });
    &PHRASES
}

/// Each banned phrase in a sequence of words, with the line of its first word.
fn banned_in(words: &[(usize, String)]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, (line, first)) in words.iter().enumerate() {
        for (others, instead) in banned().get(first.as_str()).into_iter().flatten() {
            let next = words[at + 1..].iter().map(|(_, word)| word.as_str());
            if next.take(others.len()).eq(others.iter().copied()) {
                let phrase = [&[first.as_str()], others.as_slice()].concat().join(" ");
                found.push((*line, format!("{phrase:?}: {instead}")));
            }
        }
    }
    found
}

struct Page {
    path: PathBuf,
    text: String,
}

impl Page {
    fn read(path: PathBuf) -> Self {
        let text = fs::read_to_string(&path).unwrap();
        Self { path, text }
    }

    /// The lines outside of code blocks, with their numbers.
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let mut is_code = false;
        self.text.lines().zip(1..).filter_map(move |(line, number)| {
            let is_fence = line.trim_start().starts_with("```");
            is_code ^= is_fence;
            // Code blocks are indented by four; nested list items too.
            let is_block =
                line.starts_with("    ") && !line.trim_start().starts_with(['-', '|', '*']);
            (!is_code && !is_fence && !is_block).then_some((number, line))
        })
    }

    /// The anchors that GitHub generates for headings.
    fn anchors(&self) -> BTreeSet<String> {
        let headings = self.lines().filter_map(|(_, line)| {
            let heading = line.trim_start_matches('#');
            (heading.len() < line.len()).then(|| heading.trim().to_lowercase())
        });
        let kept = |letter: &char| letter.is_alphanumeric() || matches!(letter, '-' | '_' | ' ');
        let anchor = |heading: String| {
            heading
                .chars()
                .filter(kept)
                .map(|letter| if letter == ' ' { '-' } else { letter })
                .collect()
        };
        headings.map(anchor).collect()
    }

    /// Whether a relative link of the page has an existing file and heading as its target.
    fn is_target(&self, target: &str) -> bool {
        let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
        let other = match path {
            "" => self.path.clone(),
            path => self.path.parent().unwrap().join(path),
        };
        other.exists() && (anchor.is_empty() || Page::read(other).anchors().contains(anchor))
    }

    fn at(&self, number: usize) -> String {
        format!("{}:{number}", self.path.strip_prefix(root()).unwrap().display())
    }
}

fn docs() -> Vec<Page> {
    files("docs", "md").into_iter().map(Page::read).collect()
}

fn all() -> Vec<Page> {
    let others = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "hack/README.md"];
    docs().into_iter().chain(others.map(|name| Page::read(root().join(name)))).collect()
}

/// Fails if `problems` finds any in a line of a page.
fn no_line_has(problems: impl Fn(&Page, &str) -> Vec<String>) {
    let mut found = Vec::new();
    for page in all() {
        for (number, line) in page.lines() {
            let problems = problems(&page, line).into_iter();
            found.extend(problems.map(|problem| format!("{}: {problem}", page.at(number))));
        }
    }
    assert!(found.is_empty(), "{} found:\n{}", found.len(), found.join("\n"));
}

#[test]
fn prose_is_wrapped_at_100_columns() {
    no_line_has(|_, line| {
        let columns = line.chars().count();
        // Tables and long addresses cannot be wrapped.
        let may_be_long = line.trim_start().starts_with('|') || line.contains("https://");
        let is_too_long = columns > COLUMNS && !may_be_long;
        is_too_long.then(|| format!("{columns} columns")).into_iter().collect()
    });
}

#[test]
fn relative_links_have_an_existing_target() {
    no_line_has(|page, line| {
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let relative = targets.filter(|target| !target.contains("://"));
        relative.filter(|target| !page.is_target(target)).map(str::to_owned).collect()
    });
}

#[test]
fn the_pages_use_plain_words() {
    let mut found = Vec::new();
    for page in all() {
        // One piece, so that a phrase can span lines.
        let lines = page.lines().map(|(number, text)| (number, text.to_owned()));
        let words: Vec<_> = lines
            .flat_map(|(line, text)| words(&Piece { kind: Kind::Comment, line, text }))
            .collect();
        let banned = banned_in(&words).into_iter();
        found.extend(banned.map(|(number, problem)| format!("{}: {problem}", page.at(number))));
    }
    assert!(found.is_empty(), "{} found:\n{}", found.len(), found.join("\n"));
}

/// The files with code: everything but data, generated files and this test.
fn code() -> Vec<PathBuf> {
    const DIRECTORIES: [&str; 8] =
        ["src", "tests", "benches", "fuzz", "examples", "csi-spec", "deploy", "hack"];
    const EXTENSIONS: [&str; 7] = ["rs", "go", "proto", "sh", "yaml", "toml", "mod"];
    let is_generated = |path: &PathBuf| {
        let path = path.strip_prefix(root()).unwrap();
        path.starts_with("fuzz/target") || path.starts_with("deploy/crds")
    };
    let mut all =
        vec![root().join("Cargo.toml"), root().join("deny.toml"), root().join("build.rs")];
    for directory in DIRECTORIES {
        for extension in EXTENSIONS {
            all.extend(files(directory, extension));
        }
    }
    all.retain(|path| !is_generated(path));
    all
}

fn at(path: &std::path::Path, line: usize) -> String {
    format!("{}:{line}", path.strip_prefix(root()).unwrap().display())
}

#[test]
fn comments_strings_and_names_use_plain_words() {
    let mut found = Vec::new();
    for path in code() {
        let text = fs::read_to_string(&path).unwrap();
        for piece in pieces(&path, &text) {
            let banned = banned_in(&words(&piece)).into_iter();
            found.extend(banned.map(|(line, problem)| format!("{}: {problem}", at(&path, line))));
        }
    }
    // The sample of the splitter is not prose.
    found.retain(|place| !place.starts_with("tests/no_root/source.rs"));
    assert!(found.is_empty(), "{} found:\n{}", found.len(), found.join("\n"));
}

#[test]
fn names_of_tests_are_short() {
    let mut found = Vec::new();
    for path in code() {
        let text = fs::read_to_string(&path).unwrap();
        let mut is_test = false;
        for (line, number) in text.lines().zip(1..) {
            let line = line.trim();
            is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
            let Some((_, rest)) = line.split_once("fn ").filter(|_| !line.starts_with("//")) else {
                continue;
            };
            let name = rest.split(['(', '<']).next().unwrap();
            if is_test && name.len() > TEST_NAME_LENGTH {
                found.push(format!("{}: {} characters: {name}", at(&path, number), name.len()));
            }
            is_test = false;
        }
    }
    assert!(
        found.is_empty(),
        "{} names with more than {TEST_NAME_LENGTH} characters:\n{}",
        found.len(),
        found.join("\n")
    );
}

#[test]
fn the_pages_are_short() {
    let words: usize = docs().iter().map(|page| page.text.split_whitespace().count()).sum();
    assert!(words <= DOCS_WORDS, "docs/ has {words} words, maximum {DOCS_WORDS}");
    let lines = Page::read(root().join("README.md")).text.lines().count();
    assert!(lines <= README_LINES, "README.md has {lines} lines, maximum {README_LINES}");
}
