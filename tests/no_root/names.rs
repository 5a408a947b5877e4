//! Names that users depend on: modes, commands, their flags, environment variables and values, and
//! metrics. Each list is committed in tests/data, so that a renamed or removed name is noticed in
//! review.

use std::collections::BTreeSet;
use std::fs;

use clap::CommandFactory;
use csi_loopback::cli::Cli;

use crate::source::{Kind, Piece, pieces};
use crate::tree::{files, root};

/// Compares a list with its committed file, or writes the file if UPDATE_NAMES is set.
fn compare(file: &str, names: &BTreeSet<String>) {
    let path = root().join("tests/data").join(file);
    if std::env::var_os("UPDATE_NAMES").is_some() {
        let text: String = names.iter().map(|name| format!("{name}\n")).collect();
        fs::write(&path, text).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap();
    let committed: BTreeSet<String> = committed.lines().map(str::to_owned).collect();
    let missing: Vec<_> = committed.difference(names).collect();
    let new: Vec<_> = names.difference(&committed).collect();
    assert!(
        missing.is_empty() && new.is_empty(),
        "tests/data/{file} differs from the code; missing: {missing:#?}, new: {new:#?}. If users may see this change, \
         describe it in CHANGELOG.md and run: UPDATE_NAMES=1 cargo test --all-features --test no_root names::"
    );
}

#[test]
fn modes_commands_and_flags_keep_their_names() {
    let mut command = Cli::command();
    command.build();
    let mut names = BTreeSet::new();
    for sub in command.get_subcommands() {
        add(sub, "", &mut names);
    }
    compare("flags.txt", &names);
}

fn add(command: &clap::Command, parent: &str, names: &mut BTreeSet<String>) {
    let name = format!("{parent}{}", command.get_name());
    names.insert(name.clone());
    names.extend(command.get_all_aliases().map(|alias| format!("{parent}{alias}")));
    for argument in command.get_arguments() {
        // Help and version belong to clap; fail points are not part of a release.
        if ["help", "version", "fail_points"].contains(&argument.get_id().as_str()) {
            continue;
        }
        let values: Vec<String> = argument
            .get_possible_values()
            .iter()
            .map(|value| value.get_name().to_owned())
            .collect();
        let values = match values.is_empty() || !argument.get_action().takes_values() {
            true => String::new(),
            false => format!(" {}", values.join("|")),
        };
        let variable = argument.get_env().map(|name| format!(" ${}", name.to_string_lossy()));
        let variable = variable.unwrap_or_default();
        let longs = argument.get_long_and_visible_aliases().unwrap_or_default();
        for long in &longs {
            names.insert(format!("{name} --{long}{values}{variable}"));
        }
        if let Some(short) = argument.get_short() {
            names.insert(format!("{name} -{short}"));
        }
        if longs.is_empty() && argument.get_short().is_none() {
            let id = argument.get_id().as_str().to_uppercase();
            names.insert(format!("{name} <{id}>{values}{variable}"));
        }
    }
    for sub in command.get_subcommands() {
        add(sub, &format!("{name} "), names);
    }
}

/// The list has one line per metric: the module of src/ that registers it, and its name as
/// registered, to which the registry adds a prefix and `_total`.
#[test]
fn metrics_keep_their_names() {
    let mut names = BTreeSet::new();
    for path in files("src", "rs") {
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap();
        if !code.contains("prometheus_client") || path.ends_with("tests.rs") {
            continue;
        }
        let module = path.strip_prefix(root().join("src")).unwrap();
        let module = module.iter().next().unwrap().to_str().unwrap();
        let pieces = pieces(&path, code);
        let found = pieces.iter().enumerate().filter_map(|(at, piece)| {
            let is_name = |letter: char| letter.is_ascii_lowercase() || letter == '_';
            let is_snake = !piece.text.is_empty() && piece.text.chars().all(is_name);
            let is_metric = piece.kind == Kind::Text && is_snake && is_metric(&pieces, at);
            is_metric.then(|| format!("{module} {}{}", prefix(&pieces, at), piece.text))
        });
        names.extend(found);
    }
    assert!(names.len() > 40, "{} metrics found: {names:#?}", names.len());
    compare("metrics.txt", &names);
}

/// Whether the text is the prefix of a registry or the name of a metric, which its help text
/// follows.
fn is_metric(pieces: &[Piece], at: usize) -> bool {
    let text = |at: usize| pieces.get(at).map_or("", |piece| piece.text.as_str());
    let help = pieces.get(at + 2);
    let is_help = help.is_some_and(|help| match help.kind {
        Kind::Text => help.text.contains(' '),
        _ => help.text == "help",
    });
    let is_variable = at > 1 && text(at - 2) == "name" && text(at - 1) == "=";
    !prefix(pieces, at).is_empty() || (text(at + 1) == "," && is_help) || is_variable
}

/// A mark for the prefix of a registry.
fn prefix(pieces: &[Piece], at: usize) -> &'static str {
    let is_prefix = at > 1 && pieces[at - 2].text.ends_with("with_prefix");
    if is_prefix { "prefix " } else { "" }
}
