//! The pages for people: short lines, links that lead somewhere, plain words, and no more words than they need. CONTRIBUTING.md has
//! the style guide.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use crate::tree::{files, root};

/// Columns of a line of prose.
const COLUMNS: usize = 100;
/// Words of all pages below docs/.
const DOCS_WORDS: usize = 26_800;
const README_LINES: usize = 120;

/// What the style guide replaces.
const BANNED: [&str; 26] = [
    "told",
    "tells",
    "whoever",
    "nobody",
    "anew",
    "by then",
    "sees to it",
    "see to it",
    "lets go of",
    "let go of",
    "looked at",
    "is good for",
    "leading no more",
    "in doubt",
    "out of the way",
    "left behind",
    "taken away",
    "takes away",
    "to be had",
    "goes on",
    "went on",
    "turned away",
    "is cut",
    "are cut",
    "was cut",
    "were cut",
];

struct Page {
    path: PathBuf,
    text: String,
}

impl Page {
    fn read(path: PathBuf) -> Self {
        let text = fs::read_to_string(&path).unwrap();
        Self { path, text }
    }

    /// The lines outside of code blocks, each with its number.
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let mut is_code = false;
        self.text.lines().zip(1..).filter_map(move |(line, number)| {
            let is_fence = line.trim_start().starts_with("```");
            is_code ^= is_fence;
            // A block is indented by four; so is what belongs to an item of a list.
            let is_block =
                line.starts_with("    ") && !line.trim_start().starts_with(['-', '|', '*']);
            (!is_code && !is_fence && !is_block).then_some((number, line))
        })
    }

    /// The anchors that GitHub makes of the headings.
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

    /// Whether a relative link of the page leads to a file, and to a heading of it.
    fn leads(&self, target: &str) -> bool {
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

/// The line without what stands between backticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

/// That `problems` finds none in any line of any page.
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
        // A table has no line breaks, and an address that is longer than a line none either.
        let may_be_long = line.trim_start().starts_with('|') || line.contains("https://");
        let is_too_long = columns > COLUMNS && !may_be_long;
        is_too_long.then(|| format!("{columns} columns")).into_iter().collect()
    });
}

#[test]
fn relative_links_lead_to_a_file_and_a_heading() {
    no_line_has(|page, line| {
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let relative = targets.filter(|target| !target.contains("://"));
        relative.filter(|target| !page.leads(target)).map(str::to_owned).collect()
    });
}

#[test]
fn the_pages_use_plain_words() {
    no_line_has(|_, line| {
        let letters = without_code(&line.to_lowercase());
        let words = letters.split(|letter: char| !letter.is_alphanumeric());
        let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
        let words = format!(" {} ", words.join(" "));
        let banned = BANNED.iter().filter(|phrase| words.contains(&format!(" {phrase} ")));
        banned.map(|phrase| (*phrase).to_owned()).collect()
    });
}

#[test]
fn the_pages_are_short() {
    let words: usize = docs().iter().map(|page| page.text.split_whitespace().count()).sum();
    assert!(words <= DOCS_WORDS, "docs/ has {words} words, {DOCS_WORDS} at most");
    let lines = Page::read(root().join("README.md")).text.lines().count();
    assert!(lines <= README_LINES, "README.md has {lines} lines, {README_LINES} at most");
}
