//! Validates the values of an entry, when it is written and when it is read.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};

use super::{Problem, Result, Target};

const MAX_FS_TYPE: usize = 32;
const MAX_OPTIONS: usize = 64;
/// Maximum bytes of one option.
const MAX_OPTION: usize = 256;
/// Maximum bytes of an option's key in an error.
const MAX_KEY: usize = 64;

/// Options that request another kind of mount, mount something else as well, or run a program: from
/// mount(8), and options of ext4, xfs and btrfs that name a device.
const OTHER_MOUNTS: [&str; 26] = [
    "bind",
    "rbind",
    "remount",
    "move",
    "loop",
    "offset",
    "sizelimit",
    "encryption",
    "shared",
    "rshared",
    "private",
    "rprivate",
    "slave",
    "rslave",
    "unbindable",
    "runbindable",
    "helper",
    "uhelper",
    "device",
    "logdev",
    "rtdev",
    "journal_dev",
    "journal_path",
    "lowerdir",
    "upperdir",
    "workdir",
];
/// Parts of option keys that hold a secret or name its owner: mount.cifs(8), nfs(5), mount.ceph(8),
/// sshfs(1).
const SECRET_WORDS: [&str; 6] = ["pass", "secret", "cred", "token", "key", "identity"];
/// The same for whole keys only: ext4 has `user_xattr`.
const SECRET_KEYS: [&str; 8] =
    ["user", "username", "login", "pw", "pwd", "pin", "auth", "authorization"];

/// Validates a filesystem type for mount(2) and for a file name.
pub fn fs_type(field: &'static str, text: &str) -> Result<()> {
    if text.is_empty() {
        return Err(Problem::invalid(field, "is required"));
    }
    let safe = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'.');
    let starts = text.as_bytes().first().is_some_and(u8::is_ascii_lowercase);
    if !starts || text.len() > MAX_FS_TYPE || !text.bytes().all(safe) {
        return Err(Problem::invalid(
            field,
            format!(
                "must be a lowercase letter and at most {} more of a-z, 0-9, _, - and .",
                MAX_FS_TYPE - 1
            ),
        ));
    }
    Ok(())
}

/// Validates mount options and splits them at commas.
pub fn options(field: &'static str, given: &[String]) -> Result<Vec<String>> {
    let mut options = Vec::new();
    for option in given.iter().flat_map(|given| given.split(',')) {
        if options.len() == MAX_OPTIONS {
            return Err(Problem::invalid(field, format!("has more than {MAX_OPTIONS} options")));
        }
        check_option(field, options.len() + 1, option)?;
        options.push(option.to_owned());
    }
    Ok(options)
}

/// Errors never contain a value: it may be the secret that must not be in an option.
fn check_option(field: &'static str, number: usize, option: &str) -> Result<()> {
    let refused = |reason: &str| Err(Problem::invalid(field, format!("option {number} {reason}")));
    if option.is_empty() || option.len() > MAX_OPTION {
        return refused(&format!("must have 1 to {MAX_OPTION} bytes"));
    }
    if !option.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\'' | b'\\'))
    {
        return refused(
            "has a character other than printable ASCII without spaces, quotes and backslashes",
        );
    }
    let (key, has_value) = option.split_once('=').map_or((option, false), |(key, _)| (key, true));
    let lower = key.to_ascii_lowercase();
    // Without a value, the "key" itself may be the secret.
    let name = match has_value {
        true => common::text::truncate(key, MAX_KEY),
        false => format!("{number}"),
    };
    let refused = |reason: &str| Err(Problem::invalid(field, format!("option {name} {reason}")));
    let plain = lower.strip_prefix("no").unwrap_or(&lower);
    if OTHER_MOUNTS.contains(&lower.as_str())
        || ["make-", "x-", "_netdev", "comment"].iter().any(|start| lower.starts_with(start))
    {
        return refused(&format!(
            "({}) is not allowed: the device must be mounted by itself",
            OTHER_MOUNTS.iter().find(|word| **word == lower).unwrap_or(&"an option of mount(8)")
        ));
    }
    let is_secret =
        SECRET_WORDS.iter().any(|word| plain.contains(word)) || SECRET_KEYS.contains(&plain);
    if is_secret {
        return refused("may contain a secret, and options are written to disk");
    }
    Ok(())
}

/// Validates the form of a device path: absolute, normalized, below /dev.
pub fn device_path(field: &'static str, text: &str) -> Result<PathBuf> {
    let path = Target::new(field, text)?.into_path();
    let below = path.strip_prefix("/dev").is_ok_and(|rest| {
        rest.components().next().is_some_and(|first| matches!(first, Component::Normal(_)))
    });
    if !below || path.as_os_str().as_bytes().iter().any(u8::is_ascii_control) {
        return Err(Problem::invalid(field, "must be a path below /dev"));
    }
    Ok(path)
}

/// Returns the path, with links resolved, of the block device at a path below /dev.
pub fn block_device(field: &'static str, text: &str) -> Result<PathBuf> {
    let path = device_path(field, text)?;
    let missing = |error| Problem::invalid(field, format!("cannot be found: {error}"));
    let device = fs::canonicalize(&path).map_err(missing)?;
    let found = fs::symlink_metadata(&device).map_err(missing)?;
    if !found.file_type().is_block_device() || !device.starts_with(Path::new("/dev")) {
        return Err(Problem::invalid(field, "is not a block device below /dev"));
    }
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(option: &str) -> String {
        options("mount_flags", &[option.to_owned()]).expect_err(option).to_string()
    }

    #[test]
    fn filesystem_options_are_accepted_and_split() {
        let given = [
            "noatime,nodiratime",
            "ro",
            "user_xattr",
            "data=ordered",
            "errors=remount-ro",
            "logbufs=8",
            "compress=zstd:3",
            "user_subvol_rm_allowed",
            "usrjquota=aquota.user",
            "nouuid",
            "barrier=0",
            "nobarrier",
            "context=system_u:object_r:container_file_t:s0",
        ];
        let given: Vec<String> = given.map(str::to_owned).to_vec();
        let taken = options("mount_flags", &given).unwrap();
        assert_eq!(taken.len(), given.len() + 1);
        assert_eq!(taken[..2], ["noatime", "nodiratime"]);
        assert!(options("mount_flags", &[]).unwrap().is_empty());
    }

    #[test]
    fn options_for_other_mounts_are_refused() {
        for option in OTHER_MOUNTS.iter().chain(&[
            "BIND",
            "ro,bind",
            "make-shared",
            "x-mount.mkdir",
            "X-mount.subdir=a",
            "journal_path=/dev/sda",
            "device=/dev/sda",
            "helper=x",
            "loop=/dev/loop0",
        ]) {
            assert!(refusal(option).contains("mounted by itself"), "{option}");
        }
    }

    #[test]
    fn secret_options_are_refused_by_key_and_never_logged() {
        for key in [
            "password",
            "password2",
            "pass",
            "PASSWD",
            "passphrase",
            "credentials",
            "cred",
            "secret",
            "secretfile",
            "token",
            "key",
            "keyring",
            "keyfile",
            "user",
            "username",
            "passwd_file",
            "auth_key",
            "identityfile",
            "pw",
        ] {
            let message = refusal(&format!("{key}=hunter2"));
            assert!(
                message.contains(key) && message.contains("secret") && !message.contains("hunter2"),
                "{message}"
            );
        }
        // The secret may also come without a key, or in an invalid form.
        for value in
            ["hunter2password", "password hunter2", "hunter2=\u{7}", "hunter2\"", "hunter2\n"]
        {
            let message = refusal(value);
            assert!(!message.contains("hunter2"), "{message}");
        }
    }

    #[test]
    fn options_are_bounded_in_number_length_and_alphabet() {
        for option in ["", "a,,b", "a b", "a\nb", "a\0", "é", &"x".repeat(257)] {
            refusal(option);
        }
        let many: Vec<String> = (0..65).map(|number| format!("o{number}")).collect();
        assert!(options("mount_flags", &many).is_err());
        assert!(options("mount_flags", &[many.join(",")]).is_err());
        assert_eq!(options("mount_flags", &many[..64]).unwrap().len(), 64);
    }

    #[test]
    fn filesystem_types_have_a_safe_alphabet() {
        for good in ["ext4", "xfs", "btrfs", "fuse.x-y_z"] {
            fs_type("fs_type", good).unwrap();
        }
        for bad in
            ["", "../ext4", "ext4 ", "Ext4", "ext4,bind", "4ext", "-t", "e\0", &"e".repeat(33)]
        {
            assert!(fs_type("fs_type", bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_device_must_be_a_block_device_below_dev() {
        for bad in [
            "",
            "dev/loop0",
            "/dev",
            "/dev/",
            "/dev/../etc/passwd",
            "/etc/passwd",
            "/device/x",
            "/dev//loop0",
            "/dev/./loop0",
            "/dev/a\nb",
        ] {
            assert!(device_path("device", bad).is_err(), "{bad:?}");
        }
        assert_eq!(device_path("device", "/dev/mapper/x").unwrap(), Path::new("/dev/mapper/x"));
        for no_block_device in ["/dev/null", "/dev/shm", "/dev/none-of-this-name"] {
            assert!(block_device("device", no_block_device).is_err(), "{no_block_device}");
        }
    }
}
