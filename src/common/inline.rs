//! The attributes of inline ephemeral volumes (KEP-596), `volumes[].csi.volumeAttributes` of a pod.
//! The driver and the admission webhooks both parse them here, so that the driver accepts what a
//! webhook admits.
//!
//! Values come from the pod's author and may be secrets: no error repeats a value, except a size.

use std::collections::BTreeMap;
use std::fmt;

use crate::quantity;
use crate::text::truncate;

/// Size of the volume, a Kubernetes quantity.
pub const SIZE: &str = "size";
/// Whether only the driver writes to the volume: `true` or `false`.
pub const READ_ONLY_CONTENT: &str = "readOnlyContent";
/// `content/NAME`: a file with this name and the value as content.
pub const CONTENT: &str = "content/";
/// Where the data is stored: empty for the pool, `Memory` as in emptyDir.
pub const MEDIUM: &str = "medium";
/// Sector size of the volume's device in bytes: `512` or `4096`.
pub const SECTOR_SIZE: &str = "sectorSize";

/// Maximum bytes of a file name, as in a Secret or ConfigMap.
const MAX_FILE_NAME: usize = 253;
/// Maximum number of files of a volume, and maximum bytes of their names and content: more than a
/// Secret and a pod can contain together.
pub const MAX_FILES: usize = 1024;
pub const MAX_CONTENT_BYTES: usize = 3 << 20;
/// Maximum bytes of a key in an error.
const MAX_SHOWN: usize = 128;

/// Where the data of an inline volume is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Medium {
    #[default]
    Pool,
    Memory,
}

/// The validated attributes of a volume.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Attributes {
    /// In bytes; `None` if no size is set.
    pub size: Option<u64>,
    pub medium: Medium,
    /// In bytes; `None` if not set.
    pub sector_size: Option<u32>,
    /// Content by file name.
    pub content: BTreeMap<String, String>,
    read_only_content: Option<bool>,
}

impl fmt::Debug for Attributes {
    /// Omits the content of the files.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attributes")
            .field("size", &self.size)
            .field("medium", &self.medium)
            .field("sector_size", &self.sector_size)
            .field("content", &self.content.keys())
            .field("read_only_content", &self.read_only_content)
            .finish()
    }
}

/// An invalid attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub attribute: String,
    pub reason: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.attribute, self.reason)
    }
}

fn problem(attribute: &str, reason: impl Into<String>) -> Problem {
    Problem { attribute: truncate(attribute, MAX_SHOWN), reason: reason.into() }
}

impl Attributes {
    /// Parses all attributes. The caller must omit the keys that Kubernetes adds.
    pub fn parse<'a>(
        attributes: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, Problem> {
        let mut parsed = Self::default();
        // In order, so that the error is deterministic.
        let ordered: BTreeMap<&str, &str> = attributes.into_iter().collect();
        for (key, value) in ordered {
            match key {
                SIZE => parsed.size = Some(size(value)?),
                READ_ONLY_CONTENT => parsed.read_only_content = Some(boolean(key, value)?),
                MEDIUM => parsed.medium = medium(value)?,
                SECTOR_SIZE => parsed.sector_size = Some(sector_size(value)?),
                _ => match key.strip_prefix(CONTENT) {
                    Some(name) => {
                        check_file_name(name).map_err(|reason| problem(key, reason))?;
                        parsed.content.insert(name.to_owned(), value.to_owned());
                    }
                    None => return Err(unknown(key)),
                },
            }
        }
        parsed.check_total()
    }

    fn check_total(self) -> Result<Self, Problem> {
        let names = self.content.iter().map(|(name, value)| (name.as_str(), value.len()));
        check_content_limits(names).map_err(|reason| problem(CONTENT, reason))?;
        Ok(self)
    }

    /// Checks that a container runtime can mount the volume. It cannot mount content that the
    /// driver writes, a secret, or a volume without a device.
    pub fn check_deferred(&self, has_secret: bool) -> Result<(), &'static str> {
        if has_secret {
            return Err(
                "cannot be combined with a secret (nodePublishSecretRef), which is not passed to a container runtime; use two volumes",
            );
        }
        if !self.content.is_empty() || self.read_only_content.is_some() {
            return Err(
                "cannot be combined with content/… or readOnlyContent, which the driver writes; use two volumes",
            );
        }
        if self.medium == Medium::Memory {
            return Err(
                "cannot be combined with medium: Memory, which has no device for a container runtime; omit the medium",
            );
        }
        Ok(())
    }

    /// Whether only the driver writes to the volume and keeps its content current (KEP-596,
    /// "Read-only volumes"). This is the default with content or a secret; `readOnlyContent`
    /// overrides it.
    pub fn is_read_only_content(&self, has_secret: bool) -> bool {
        let has_content = has_secret || !self.content.is_empty();
        self.read_only_content.unwrap_or(has_content)
    }

    /// The same for a volume that is published `readonly` or not. A read-only volume without
    /// `readOnlyContent` is a content volume too: its secret may be empty, emptied while the pod
    /// runs, or created later, and kubelet's requests do not distinguish this from a volume without
    /// a secret.
    pub fn is_published_as_content(&self, has_secret: bool, readonly: bool) -> bool {
        let is_unset = self.read_only_content.is_none();
        self.is_read_only_content(has_secret) || (readonly && is_unset)
    }

    /// Whether the volume is in memory. Content of attributes or a secret always is, whatever the
    /// medium. So is a volume with `readOnlyContent`, because its secret may appear and disappear
    /// while the pod runs.
    pub fn is_in_memory(&self, has_secret: bool, is_content: bool) -> bool {
        self.medium == Medium::Memory
            || is_content
            || has_secret
            || !self.content.is_empty()
            || self.read_only_content.is_some()
    }
}

fn size(value: &str) -> Result<u64, Problem> {
    let bytes = quantity::parse(value).map_err(|reason| problem(SIZE, truncate(&reason, 256)))?;
    if bytes == 0 { Err(problem(SIZE, "is 0")) } else { Ok(bytes) }
}

fn boolean(key: &str, value: &str) -> Result<bool, Problem> {
    match value {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(problem(key, "is neither true nor false")),
    }
}

fn medium(value: &str) -> Result<Medium, Problem> {
    match value {
        "" => Ok(Medium::Pool),
        "Memory" => Ok(Medium::Memory),
        _ => Err(problem(MEDIUM, "is neither Memory nor empty")),
    }
}

fn sector_size(value: &str) -> Result<u32, Problem> {
    match value {
        "512" => Ok(512),
        "4096" => Ok(4096),
        _ => Err(problem(SECTOR_SIZE, "is neither 512 nor 4096")),
    }
}

fn unknown(key: &str) -> Problem {
    let known = format!("{SIZE}, {READ_ONLY_CONTENT}, {CONTENT}NAME, {MEDIUM} and {SECTOR_SIZE}");
    problem(key, format!("is not an attribute of an inline volume; use {known}"))
}

/// Checks the name of a file: a valid key of a Secret or ConfigMap that does not collide with the
/// names used to replace content.
pub fn check_file_name(name: &str) -> Result<(), String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if name.is_empty() || name.len() > MAX_FILE_NAME || !name.bytes().all(fits) {
        return Err(format!(
            "a file name is 1 to {MAX_FILE_NAME} letters, digits, '-', '_' or '.'"
        ));
    }
    if name == "." || name.starts_with("..") {
        return Err("a file name must not be \".\" or begin with \"..\"".to_owned());
    }
    Ok(())
}

/// Checks number and total size of the files of a volume, given as names and sizes in bytes.
pub fn check_content_limits<'a>(
    files: impl Iterator<Item = (&'a str, usize)>,
) -> Result<(), String> {
    let (count, bytes) = files.fold((0, 0_usize), |(count, bytes), (name, size)| {
        (count + 1, bytes.saturating_add(name.len()).saturating_add(size))
    });
    if count > MAX_FILES || bytes > MAX_CONTENT_BYTES {
        return Err(format!(
            "{count} files with {bytes} bytes exceed the maximum of {MAX_FILES} files and {MAX_CONTENT_BYTES} bytes"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(attributes: &[(&str, &str)]) -> Result<Attributes, Problem> {
        Attributes::parse(attributes.iter().copied())
    }

    fn wrong(attributes: &[(&str, &str)]) -> Problem {
        parse(attributes).expect_err(&format!("{attributes:?}"))
    }

    #[test]
    fn every_attribute_is_parsed() {
        let attributes = parse(&[
            ("size", "1.5Gi"),
            ("medium", "Memory"),
            ("content/app.conf", "a=b"),
            ("content/.hidden", ""),
            ("readOnlyContent", "false"),
            ("sectorSize", "512"),
        ]);
        let attributes = attributes.unwrap();
        assert_eq!(attributes.sector_size, Some(512));
        assert_eq!((attributes.size, attributes.medium), (Some(3 << 29), Medium::Memory));
        assert_eq!(attributes.content["app.conf"], "a=b");
        assert!(attributes.content.contains_key(".hidden"));
        assert!(!attributes.is_read_only_content(true));
        assert_eq!(parse(&[("medium", "")]).unwrap(), Attributes::default());
    }

    #[test]
    fn content_and_secrets_are_read_only_by_default() {
        let of = |attributes: &[(&str, &str)], secret| {
            parse(attributes).unwrap().is_read_only_content(secret)
        };
        assert!(!of(&[], false));
        assert!(of(&[], true));
        assert!(of(&[("content/a", "")], false));
        assert!(of(&[("readOnlyContent", "true")], false));
        assert!(!of(&[("content/a", ""), ("readOnlyContent", "false")], true));
    }

    #[test]
    fn content_and_secrets_are_always_in_memory() {
        let of = |attributes: &[(&str, &str)], secret| {
            let attributes = parse(attributes).unwrap();
            attributes.is_in_memory(secret, attributes.is_read_only_content(secret))
        };
        assert!(!of(&[], false) && !of(&[("size", "1Gi"), ("medium", "")], false));
        assert!(of(&[("medium", "Memory")], false));
        assert!(of(&[("content/a", ""), ("medium", "")], false) && of(&[], true));
        for value in ["true", "false"] {
            // The result does not depend on whether the secret exists now.
            assert!(
                of(&[("readOnlyContent", value)], true) && of(&[("readOnlyContent", value)], false)
            );
        }
    }

    #[test]
    fn an_unknown_attribute_is_refused_by_name() {
        for key in ["Size", "", "content", "contents/a", "secret", "size ", "fromSnapshot"] {
            assert_eq!(wrong(&[(key, "x")]).attribute, key);
        }
        assert!(wrong(&[(&"k".repeat(5000), "")]).to_string().len() < 500);
    }

    #[test]
    fn invalid_values_are_refused_and_not_repeated() {
        for (key, value) in [
            ("size", "0"),
            ("size", "much"),
            ("readOnlyContent", "yes"),
            ("medium", "memory"),
            ("sectorSize", "1Ki"),
        ] {
            assert_eq!(wrong(&[(key, value)]).attribute, key);
        }
        assert!(!wrong(&[("readOnlyContent", "hunter2")]).to_string().contains("hunter2"));
        let shown = format!("{:?}", parse(&[("content/password", "hunter2")]).unwrap());
        assert!(shown.contains("password") && !shown.contains("hunter2"), "{shown}");
    }

    #[test]
    fn a_file_name_is_never_a_path() {
        for name in ["", ".", "..", "...", "..data", "a/b", "/a", "a\0", "ä", "a b"] {
            let key = format!("content/{name}");
            assert_eq!(wrong(&[(&key, "x")]).attribute, key);
        }
        assert!(check_file_name(&"n".repeat(253)).is_ok());
        assert!(check_file_name(&"n".repeat(254)).is_err());
    }

    #[test]
    fn content_is_limited_in_files_and_bytes() {
        let large = "x".repeat(MAX_CONTENT_BYTES);
        assert_eq!(wrong(&[("content/a", &large)]).attribute, "content/");
        let many = (0..=MAX_FILES).map(|number| (format!("content/{number}"), ""));
        let many: Vec<_> = many.collect();
        let many = many.iter().map(|(key, value)| (key.as_str(), *value));
        assert_eq!(Attributes::parse(many).unwrap_err().attribute, "content/");
    }

    #[test]
    fn the_kind_of_volume_does_not_depend_on_its_secret() {
        let attributes = parse(&[("size", "32Mi")]).unwrap();
        let kinds = [(true, true), (false, true), (false, false)];
        let kinds =
            kinds.map(|(secret, readonly)| attributes.is_published_as_content(secret, readonly));
        assert_eq!(kinds, [true, true, false]);
        let explicit = parse(&[("readOnlyContent", "false")]).unwrap();
        assert!(!explicit.is_published_as_content(true, true));
    }

    #[test]
    fn content_secrets_and_memory_volumes_cannot_be_deferred() {
        let sized = parse(&[("size", "1Gi")]).unwrap();
        assert!(sized.check_deferred(false).is_ok());
        assert!(sized.check_deferred(true).unwrap_err().contains("nodePublishSecretRef"));
        for (key, value) in [("content/a", "x"), ("readOnlyContent", "true"), ("medium", "Memory")]
        {
            assert!(parse(&[(key, value)]).unwrap().check_deferred(false).is_err(), "{key}");
        }
    }
}
