//! Data that crust_ops and runtimes exchange: mountInfo.json, mount options, output of a runtime's
//! program. Each is refused, or satisfies its rules.

use csi_loopback::crust::{MountInfo, Target, check};
use csi_loopback::fuzzing;

pub fn entries(input: &[u8]) {
    mount_info(input);
    stats(input);
    if let Ok(bytes) = fuzzing::resized(input) {
        assert!(bytes >= 0);
    }
    let Ok(text) = std::str::from_utf8(input) else { return };
    target(text);
    options(text);
}

fn mount_info(input: &[u8]) {
    let Ok(info) = MountInfo::parse(input) else { return };
    assert!(info.device.starts_with("/dev/") && !info.device.split('/').any(|part| part == ".."));
    assert!(info.fs_type.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/'));
    assert!(info.options.iter().all(|option| !option.contains(',')));
    info.group().unwrap();
    // The written form parses to the same value.
    assert_eq!(MountInfo::parse(&info.to_json()).unwrap(), info);
}

fn stats(input: &[u8]) {
    let Ok(stats) = fuzzing::runtime_stats(input) else { return };
    assert!(stats.usage.len() <= 2);
    for usage in stats.usage {
        assert!([usage.total, usage.used, usage.available].iter().all(|number| *number >= 0));
        assert!([1, 2].contains(&usage.unit));
    }
    if let Some(condition) = stats.volume_condition {
        assert!(condition.message.len() <= 1024 + '…'.len_utf8());
        assert!(!condition.message.chars().any(char::is_control));
    }
}

fn target(text: &str) {
    let Ok(target) = Target::new("path", text) else { return };
    let path = target.as_path();
    assert!(path.is_absolute() && text.len() < 4096 && !text.contains('\0'));
    assert_eq!(path.to_str(), Some(text));
    assert!(!text.split('/').skip(1).any(|part| ["", ".", ".."].contains(&part)));
}

fn options(text: &str) {
    match check::options("mount_flags", &[text.to_owned()]) {
        Ok(options) => {
            assert!(options.len() <= 64 && options.join(",") == text);
            assert!(
                !options
                    .iter()
                    .any(|option| ["bind", "remount", "password"].contains(&option.as_str()))
            );
        }
        // An error never contains a value. It contains the name, which may repeat the value.
        Err(error) => {
            let value = text
                .split_once('=')
                .filter(|(name, value)| value.len() > 16 && !name.contains(value))
                .map(|(_, value)| value);
            assert!(value.is_none_or(|value| !error.to_string().contains(value)), "{error}");
        }
    }
}
