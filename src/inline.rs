//! Inline ephemeral volumes (KEP-596) as a pod declares them: the attributes of `volumes[].csi.volumeAttributes`, which the
//! driver obeys and the admission webhooks judge. Both read them here, so that what one lets pass the other takes.
//!
//! Values are what whoever wrote the pod sent, and may be secrets: no error repeats one, except that of a size.

use std::collections::BTreeMap;
use std::fmt;

use crate::grpc::cut;
use crate::quantity;

/// Size of the volume, a Kubernetes quantity.
pub const SIZE: &str = "size";
/// Whether the volume is written by the driver alone: `true` or `false`.
pub const READ_ONLY_CONTENT: &str = "readOnlyContent";
/// `content/NAME`: a file of that name with the value in it.
pub const CONTENT: &str = "content/";
/// Where the blocks are: empty for the pool, `Memory` as in emptyDir.
pub const MEDIUM: &str = "medium";
/// What earlier versions had as an attribute and as a parameter of a StorageClass: it left the volume to a container runtime
/// (KEP-2857).
pub const REMOVED_DEFER_FS_MOUNT: &str = "deferFSMount";
/// What replaces it, for an error that names the key.
pub const DEFER_BY_ANNOTATION: &str = "was removed: leave it out, and name the volume in the pod's annotation \
    cbt.storage.k8s.io/defer-fs-mount (docs/reference/runtime-assisted-mount.md)";

/// Longest name of a file, as in a Secret or ConfigMap.
const MAX_FILE_NAME: usize = 253;
/// Most files of a volume, and most bytes of all of them: more than a Secret and a pod hold together.
pub const MAX_FILES: usize = 1024;
pub const MAX_CONTENT_BYTES: usize = 3 << 20;
/// Bytes of a key that an error repeats.
const MAX_SHOWN: usize = 128;

/// Where the blocks of an inline volume are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Medium {
    #[default]
    Pool,
    Memory,
}

/// The attributes of one volume, checked.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Attributes {
    /// In bytes; `None` when none is asked for.
    pub size: Option<u64>,
    pub medium: Medium,
    /// By file name.
    pub content: BTreeMap<String, String>,
    read_only_content: Option<bool>,
}

impl fmt::Debug for Attributes {
    /// Without what is in the files.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attributes")
            .field("size", &self.size)
            .field("medium", &self.medium)
            .field("content", &self.content.keys())
            .field("read_only_content", &self.read_only_content)
            .finish()
    }
}

/// What is wrong with an attribute.
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
    Problem { attribute: cut(attribute, MAX_SHOWN), reason: reason.into() }
}

impl Attributes {
    /// Reads all attributes, in whatever order. Keys that Kubernetes adds are to be left out by the caller.
    pub fn read<'a>(
        attributes: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, Problem> {
        let mut read = Self::default();
        // In order, so that the answer is the same each time.
        let ordered: BTreeMap<&str, &str> = attributes.into_iter().collect();
        for (key, value) in ordered {
            match key {
                SIZE => read.size = Some(size(value)?),
                READ_ONLY_CONTENT => read.read_only_content = Some(boolean(key, value)?),
                MEDIUM => read.medium = medium(value)?,
                _ => match key.strip_prefix(CONTENT) {
                    Some(name) => {
                        check_file_name(name).map_err(|reason| problem(key, reason))?;
                        read.content.insert(name.to_owned(), value.to_owned());
                    }
                    None => return Err(unknown(key)),
                },
            }
        }
        read.check_together()
    }

    fn check_together(self) -> Result<Self, Problem> {
        let names = self.content.iter().map(|(name, value)| (name.as_str(), value.len()));
        check_amount(names).map_err(|reason| problem(CONTENT, reason))?;
        Ok(self)
    }

    /// That a container runtime can mount the volume. It cannot mount what the driver writes, a secret, or a volume without a
    /// device.
    pub fn check_deferred(&self, has_secret: bool) -> Result<(), &'static str> {
        if has_secret {
            return Err(
                "does not go with a secret (nodePublishSecretRef), which is not handed to a container runtime; use two volumes",
            );
        }
        if !self.content.is_empty() || self.read_only_content.is_some() {
            return Err(
                "goes with neither content/… nor readOnlyContent, which the driver writes; use two volumes",
            );
        }
        if self.medium == Medium::Memory {
            return Err(
                "does not go with medium: Memory, which has no device that a runtime could mount; leave the medium out",
            );
        }
        Ok(())
    }

    /// Whether the volume is one that only the driver writes to, with content that it keeps as it should be
    /// (KEP-596, "Read-only volumes"). So it is where there is content or a secret, unless `readOnlyContent` says otherwise.
    pub fn is_read_only_content(&self, has_secret: bool) -> bool {
        let has_content = has_secret || !self.content.is_empty();
        self.read_only_content.unwrap_or(has_content)
    }

    /// The same of a volume that is published, `readonly` or not: one that nobody may write to, and of which nothing else
    /// is said, is a volume of content too. Its secret is empty, has been emptied while the pod runs, or comes later:
    /// kubelet's requests do not tell these from a volume with no secret.
    pub fn is_published_as_content(&self, has_secret: bool, readonly: bool) -> bool {
        let unsaid = self.read_only_content.is_none();
        self.is_read_only_content(has_secret) || (readonly && unsaid)
    }

    /// Whether the volume is in memory. What comes from attributes or a secret always is, whatever the medium; and so is a volume
    /// that says anything of that, for its secret may come and go while the pod runs.
    pub fn is_in_memory(&self, has_secret: bool, is_content: bool) -> bool {
        self.medium == Medium::Memory
            || is_content
            || has_secret
            || !self.content.is_empty()
            || self.read_only_content.is_some()
    }
}

fn size(value: &str) -> Result<u64, Problem> {
    let bytes = quantity::parse(value).map_err(|reason| problem(SIZE, cut(&reason, 256)))?;
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

fn unknown(key: &str) -> Problem {
    if key == REMOVED_DEFER_FS_MOUNT {
        return problem(key, DEFER_BY_ANNOTATION);
    }
    let known = format!("{SIZE}, {READ_ONLY_CONTENT}, {CONTENT}NAME and {MEDIUM}");
    problem(key, format!("is no attribute of an inline volume; there are {known}"))
}

/// The name of a file: as the key of a Secret or ConfigMap, and none that the swap of contents needs.
pub fn check_file_name(name: &str) -> Result<(), String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if name.is_empty() || name.len() > MAX_FILE_NAME || !name.bytes().all(fits) {
        return Err(format!(
            "the name of a file is 1 to {MAX_FILE_NAME} letters, digits, '-', '_' or '.'"
        ));
    }
    if name == "." || name.starts_with("..") {
        return Err("the name of a file is not \".\" and does not begin with \"..\"".to_owned());
    }
    Ok(())
}

/// That so many files, of names and sizes in bytes, are not too much for one volume.
pub fn check_amount<'a>(files: impl Iterator<Item = (&'a str, usize)>) -> Result<(), String> {
    let (count, bytes) = files.fold((0, 0_usize), |(count, bytes), (name, size)| {
        (count + 1, bytes.saturating_add(name.len()).saturating_add(size))
    });
    if count > MAX_FILES || bytes > MAX_CONTENT_BYTES {
        return Err(format!(
            "{count} files of {bytes} bytes are more than the {MAX_FILES} of {MAX_CONTENT_BYTES} bytes that a volume takes"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(attributes: &[(&str, &str)]) -> Result<Attributes, Problem> {
        Attributes::read(attributes.iter().copied())
    }

    fn wrong(attributes: &[(&str, &str)]) -> Problem {
        read(attributes).expect_err(&format!("{attributes:?}"))
    }

    #[test]
    fn every_attribute_is_read() {
        let attributes = read(&[
            ("size", "1.5Gi"),
            ("medium", "Memory"),
            ("content/app.conf", "a=b"),
            ("content/.hidden", ""),
            ("readOnlyContent", "false"),
        ]);
        let attributes = attributes.unwrap();
        assert_eq!((attributes.size, attributes.medium), (Some(3 << 29), Medium::Memory));
        assert_eq!(attributes.content["app.conf"], "a=b");
        assert!(attributes.content.contains_key(".hidden"));
        assert!(!attributes.is_read_only_content(true));
        assert_eq!(read(&[("medium", "")]).unwrap(), Attributes::default());
    }

    #[test]
    fn content_and_secrets_are_for_the_driver_to_write_unless_the_pod_says_otherwise() {
        let of = |attributes: &[(&str, &str)], secret| {
            read(attributes).unwrap().is_read_only_content(secret)
        };
        assert!(!of(&[], false));
        assert!(of(&[], true));
        assert!(of(&[("content/a", "")], false));
        assert!(of(&[("readOnlyContent", "true")], false));
        assert!(!of(&[("content/a", ""), ("readOnlyContent", "false")], true));
    }

    #[test]
    fn what_comes_from_attributes_or_a_secret_is_in_memory_whatever_the_medium() {
        let of = |attributes: &[(&str, &str)], secret| {
            let attributes = read(attributes).unwrap();
            attributes.is_in_memory(secret, attributes.is_read_only_content(secret))
        };
        assert!(!of(&[], false) && !of(&[("size", "1Gi"), ("medium", "")], false));
        assert!(of(&[("medium", "Memory")], false));
        assert!(of(&[("content/a", ""), ("medium", "")], false) && of(&[], true));
        for said in ["true", "false"] {
            // The same volume, whether or not its secret is there now.
            assert!(
                of(&[("readOnlyContent", said)], true) && of(&[("readOnlyContent", said)], false)
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
    fn values_that_mean_nothing_are_refused_and_not_repeated() {
        for (key, value) in
            [("size", "0"), ("size", "much"), ("readOnlyContent", "yes"), ("medium", "memory")]
        {
            assert_eq!(wrong(&[(key, value)]).attribute, key);
        }
        assert!(!wrong(&[("readOnlyContent", "hunter2")]).to_string().contains("hunter2"));
        let shown = format!("{:?}", read(&[("content/password", "hunter2")]).unwrap());
        assert!(shown.contains("password") && !shown.contains("hunter2"), "{shown}");
    }

    #[test]
    fn a_file_name_is_never_a_way_to_somewhere_else() {
        for name in ["", ".", "..", "...", "..data", "a/b", "/a", "a\0", "ä", "a b"] {
            let key = format!("content/{name}");
            assert_eq!(wrong(&[(&key, "x")]).attribute, key);
        }
        assert!(check_file_name(&"n".repeat(253)).is_ok());
        assert!(check_file_name(&"n".repeat(254)).is_err());
    }

    #[test]
    fn a_volume_takes_so_much_and_no_more() {
        let large = "x".repeat(MAX_CONTENT_BYTES);
        assert_eq!(wrong(&[("content/a", &large)]).attribute, "content/");
        let many = (0..=MAX_FILES).map(|number| (format!("content/{number}"), ""));
        let many: Vec<_> = many.collect();
        let many = many.iter().map(|(key, value)| (key.as_str(), *value));
        assert_eq!(Attributes::read(many).unwrap_err().attribute, "content/");
    }

    #[test]
    fn a_secret_that_comes_and_goes_does_not_make_another_volume_of_it() {
        let attributes = read(&[("size", "32Mi")]).unwrap();
        let kinds = [(true, true), (false, true), (false, false)];
        let kinds =
            kinds.map(|(secret, readonly)| attributes.is_published_as_content(secret, readonly));
        assert_eq!(kinds, [true, true, false]);
        let said = read(&[("readOnlyContent", "false")]).unwrap();
        assert!(!said.is_published_as_content(true, true));
    }

    #[test]
    fn a_runtime_mounts_no_content_no_secret_and_nothing_in_memory() {
        let sized = read(&[("size", "1Gi")]).unwrap();
        assert!(sized.check_deferred(false).is_ok());
        assert!(sized.check_deferred(true).unwrap_err().contains("nodePublishSecretRef"));
        for (key, value) in [("content/a", "x"), ("readOnlyContent", "true"), ("medium", "Memory")]
        {
            assert!(read(&[(key, value)]).unwrap().check_deferred(false).is_err(), "{key}");
        }
    }

    #[test]
    fn the_removed_attribute_is_refused_with_the_annotation_that_replaces_it() {
        for value in ["true", "false"] {
            let problem = wrong(&[("deferFSMount", value)]);
            assert_eq!(problem.attribute, "deferFSMount");
            assert!(problem.reason.contains("cbt.storage.k8s.io/defer-fs-mount"), "{problem}");
        }
    }
}
