//! Names that users depend on: modes, commands, their flags, environment variables and values, and
//! metrics. Each list is committed in tests/data, so that a renamed or removed name is noticed in
//! review.

use std::collections::BTreeSet;
use std::fs;

use clap::CommandFactory;
use csi_loopback::cli::Cli;

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
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
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
    // The commands of clap's own `help` are copies.
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        add(sub, &format!("{name} "), names);
    }
}

/// The list has one line per metric: the member or role that registers it, and its name as
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
        let mut directories = path.strip_prefix(root().join("src")).unwrap().iter();
        let module = directories.next().and_then(|member| match member.to_str()? {
            "cbt" | "deferral" => directories.next()?.to_str(),
            member => Some(member),
        });
        let module = module.unwrap();
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        names.extend(metrics(&lines.collect::<String>()).map(|name| format!("{module} {name}")));
    }
    assert!(names.len() > 40, "{} metrics found: {names:#?}", names.len());
    compare("metrics.txt", &names);
}

/// The prefixes of registries, and the names of metrics: strings that a help text follows.
fn metrics(code: &str) -> impl Iterator<Item = String> {
    let code = code.replace("\\\"", "").replace("'\"'", "");
    // Every second part is a string.
    let parts: Vec<String> = code.split('"').map(|part| part.trim().to_owned()).collect();
    let at = move |index: usize| parts.get(index).cloned().unwrap_or_default();
    let is_part = |letter: char| letter.is_ascii_lowercase() || letter == '_';
    (1..code.split('"').count()).step_by(2).filter_map(move |index| {
        let (before, name, after) = (at(index - 1), at(index), at(index + 1));
        let is_prefix = before.ends_with("with_prefix(");
        let help = after.strip_prefix(',').map(str::trim_start);
        let has_help = help.is_some_and(|help| match help {
            "" => at(index + 2).contains(' '),
            variable => variable.starts_with("help"),
        });
        let is_metric = is_prefix || has_help || before.ends_with("name =");
        let is_name = !name.is_empty() && name.chars().all(is_part);
        (is_name && is_metric).then(|| if is_prefix { format!("prefix {name}") } else { name })
    })
}
