//! Text from clients and users: ids and names, list tokens, sizes, timeouts, sockets, paths, the
//! command line, fault rules. Each is refused, or satisfies its rules.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::{LazyLock, OnceLock};

use crate::fixture::{catalog, volume};
use csi_loopback::backend::{Error, FsType, Volume, ids};
use csi_loopback::grpc::SocketPath;
use csi_loopback::{fuzzing, quantity};

pub fn text(input: &[u8]) {
    command_line(input);
    let Some((number, text)) = input.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    checked_fields(text);
    names(text);
    sizes(text);
    timeouts(text);
    tokens(text, usize::from(*number));
}

/// The rewritten line starts with the mode, which the program's name or a flag selects, followed by
/// `--` if all arguments belong to another program. The flag with the mode is removed; everything
/// else remains in order and unchanged, except that flags of the sidecar may get a second dash. A
/// line with an unknown mode is refused.
fn command_line(input: &[u8]) {
    let line: Vec<OsString> =
        input.split(|byte| *byte == b'\n').map(|part| OsString::from_vec(part.to_vec())).collect();
    let wanted = mode_first(&line);
    let Ok(rewritten) = fuzzing::rewrite(line) else { return assert_eq!(wanted, None) };
    let wanted = wanted.unwrap_or_else(|| panic!("no error: {rewritten:?}"));
    let is_sidecar = wanted.get(1).is_some_and(|mode| mode == "sidecar");
    let is_kept = |(at, (is, was)): (usize, (&OsString, &OsString))| {
        let may_get_dash = is_sidecar && at > 1 && was.as_bytes().starts_with(b"-");
        is == was || may_get_dash && is.as_bytes() == [b"-", was.as_bytes()].concat()
    };
    let kept = rewritten.iter().zip(&wanted).enumerate().all(is_kept);
    // Flags of a command that stand before it.
    let is_moved = |end: usize| {
        let mut before = rewritten.clone();
        before[1..=end].rotate_left(1);
        before == wanted
    };
    if !is_sidecar && (2..rewritten.len()).any(is_moved) {
        return;
    }
    assert!(kept && rewritten.len() == wanted.len(), "{rewritten:?} is not {wanted:?}");
}

/// The line with its mode first, computed in the simplest way; `None` if the mode is unknown.
fn mode_first(line: &[OsString]) -> Option<Vec<OsString>> {
    static MODES: LazyLock<Vec<String>> = LazyLock::new(fuzzing::mode_names);
    let with = |first: &[&OsStr], kept: &[&[OsString]]| {
        let first: Vec<OsString> = first.iter().map(|one| one.to_os_string()).collect();
        Some([&line[..1], &first, &kept.concat()].concat())
    };
    let arguments = &line[1..];
    let program = Path::new(&line[0]).file_name().unwrap_or_default();
    if program == "csi-snapshot-metadata" {
        return with(&["sidecar".as_ref()], &[arguments]);
    }
    if program == "csi-loopback-runc" {
        return with(&["oci-runtime".as_ref(), "--".as_ref()], &[arguments]);
    }
    let is_flag = |argument: &OsString| argument.to_str().is_some_and(|text| text.starts_with('-'));
    if !arguments.first().is_some_and(is_flag) {
        return with(&[], &[arguments]);
    }
    for (at, argument) in arguments.iter().enumerate() {
        let (mode, rest) = match argument.to_str() {
            Some("--") => break,
            Some("--mode") => (arguments.get(at + 1)?.as_os_str(), at + 2),
            Some(text) if text.starts_with("--mode=") => (text["--mode=".len()..].as_ref(), at + 1),
            _ => continue,
        };
        let is_known = MODES.iter().any(|known| mode == known.as_str());
        return is_known.then(|| with(&[mode], &[&arguments[..at], &arguments[rest..]]))?;
    }
    with(&[], &[arguments])
}

fn checked_fields(text: &str) {
    let short = (1..=128).contains(&text.len());
    assert_eq!(fuzzing::id("volume_id", text).is_ok(), short);
    assert_eq!(fuzzing::name(text).is_ok(), short && !text.chars().any(char::is_control));
    if let Ok(path) = fuzzing::path("target_path", text) {
        assert!(path.is_absolute() && text.len() < 4096);
        assert!(!text.contains('\0') && !text.split('/').any(|part| part == ".."));
    }
    if let Ok(socket) = text.parse::<SocketPath>() {
        let path: &Path = socket.as_ref();
        assert!(path.is_absolute() && path.as_os_str().len() <= 107);
        assert_eq!(socket.to_string().parse(), Ok(socket));
    }
    if let Ok(rule) = text.parse::<fuzzing::Rule>() {
        assert!(text.starts_with(rule.kind.name()));
    }
    if let Ok(fs_type) = text.parse::<FsType>() {
        assert!(text.is_empty() || fs_type.name() == text);
    }
}

fn names(name: &str) {
    let slug = ids::slug(name);
    let safe = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    assert!((1..=64).contains(&slug.len()) && slug.bytes().all(safe), "{slug}");
    let id = ids::new_id("0a1b2c", ids::SNAPSHOT_PREFIX, name).unwrap();
    assert_eq!(ids::name_of(&id), Some(slug.as_str()));
    // The id becomes a file name.
    assert!(id.len() <= 128 && !id.contains('/') && id != "." && id != "..");
    if let Some(found) = ids::name_of(name) {
        assert!(!found.is_empty() && name.contains(found));
    }
}

fn sizes(text: &str) {
    let Ok(bytes) = quantity::parse(text) else { return };
    assert_eq!(quantity::parse(&bytes.to_string()), Ok(bytes));
    let shown = quantity::parse(&quantity::format(bytes)).unwrap();
    // Formatting truncates after the second digit and does not round.
    assert!(shown <= bytes + 1 && bytes - shown.min(bytes) <= bytes / 100, "{text}: {shown}");
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    assert!(!digits || text.parse() == Ok(bytes));
}

fn timeouts(text: &str) {
    if let Some(timeout) = fuzzing::parse_timeout(text) {
        assert!(text.len() <= 9 && text.as_bytes()[0].is_ascii_digit());
        assert!(timeout.as_secs() <= 99_999_999 * 3600);
    }
}

/// A page starts after its token, and all pages together are the list.
fn tokens(token: &str, max: usize) {
    static CATALOG: OnceLock<fuzzing::Catalog> = OnceLock::new();
    let open = || catalog(&(0..20).map(|number| volume(number, 0)).collect::<Vec<_>>());
    let reading = CATALOG.get_or_init(open).read().unwrap();
    let page = |after: Option<&str>, max| fuzzing::page(&reading, after, max, |_: &Volume| true);
    let all: Vec<String> = page(None, 0).unwrap().items.into_iter().map(|row| row.id).collect();
    let mut after = fuzzing::token(token).map(str::to_owned);
    let mut wanted = all.clone();
    wanted.retain(|id| after.as_ref().is_none_or(|token| id > token));
    let mut listed = Vec::new();
    loop {
        let page = match page(after.as_deref(), fuzzing::page_size(max)) {
            Ok(page) => page,
            Err(Error::StaleToken(_)) => return assert!(ids::name_of(token).is_none()),
            Err(other) => panic!("{other:?}"),
        };
        assert!(max == 0 || page.items.len() <= max);
        listed.extend(page.items.into_iter().map(|row| row.id));
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    assert_eq!(listed, wanted);
}
