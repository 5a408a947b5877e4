//! Parses the standard output of a runtime's program. The output is untrusted: unknown keys are
//! ignored, and invalid values are errors.

use serde::Deserialize;
use serde_json::Value;

use api::volume_usage::Unit;
use common::text::truncate;
use grpc::proto::crust as api;

/// One entry per unit.
const MAX_USAGE: usize = 2;
/// Maximum bytes of a condition's message.
const MAX_CONDITION: usize = 1024;

#[derive(Debug, Deserialize)]
struct Stats {
    // Go programs write empty lists as null, or omit them.
    usage: Option<Vec<Usage>>,
    volume_condition: Option<Condition>,
}

#[derive(Debug, Deserialize)]
struct Usage {
    unit: Value,
    // Go programs also omit zeros: btrfs counts no inodes.
    #[serde(default)]
    available: Value,
    #[serde(default)]
    total: Value,
    #[serde(default)]
    used: Value,
}

#[derive(Debug, Deserialize)]
struct Condition {
    #[serde(default)]
    abnormal: bool,
    #[serde(default)]
    message: String,
}

#[derive(Debug, Deserialize)]
struct Resized {
    #[serde(default)]
    capacity_bytes: Value,
}

/// Parses the output of `crust stats`.
pub fn stats(output: &[u8]) -> Result<api::RuntimeGetVolumeStatsResponse, String> {
    let read: Stats = object(output)?;
    let usage = read.usage.unwrap_or_default();
    if usage.len() > MAX_USAGE {
        return Err(format!("usage has more than {MAX_USAGE} entries"));
    }
    let usage = usage.iter().map(one_usage).collect::<Result<Vec<_>, _>>()?;
    if let [first, second] = usage.as_slice()
        && first.unit == second.unit
    {
        return Err("usage has two entries with the same unit".into());
    }
    let volume_condition = read.volume_condition.map(|condition| api::VolumeCondition {
        abnormal: condition.abnormal,
        message: printable(&condition.message, MAX_CONDITION),
    });
    Ok(api::RuntimeGetVolumeStatsResponse { usage, volume_condition })
}

fn one_usage(usage: &Usage) -> Result<api::VolumeUsage, String> {
    Ok(api::VolumeUsage {
        available: number("usage.available", &usage.available)?,
        total: number("usage.total", &usage.total)?,
        used: number("usage.used", &usage.used)?,
        unit: unit(&usage.unit)?.into(),
    })
}

/// Parses the output of `crust resize`: the capacity in bytes, or 0 if it is missing.
pub fn resized(output: &[u8]) -> Result<i64, String> {
    let read: Resized = object(output)?;
    number("capacity_bytes", &read.capacity_bytes)
}

fn object<T: for<'a> Deserialize<'a>>(output: &[u8]) -> Result<T, String> {
    // serde would also accept a list for a struct.
    if output.trim_ascii_start().first() != Some(&b'{') {
        return Err("the output is not a JSON object".into());
    }
    serde_json::from_slice(output).map_err(|error| match error.classify() {
        serde_json::error::Category::Data => {
            format!("a key has a value of the wrong type (line {})", error.line())
        }
        _ => format!("the output is not JSON (line {}, column {})", error.line(), error.column()),
    })
}

/// Parses a unit: the proposal's name, or Kata's number.
fn unit(value: &Value) -> Result<Unit, String> {
    let named = match value {
        Value::String(name) => Unit::from_str_name(name),
        Value::Number(number) => {
            number.as_i64().and_then(|number| i32::try_from(number).ok()?.try_into().ok())
        }
        _ => None,
    };
    named
        .filter(|unit| *unit != Unit::Unknown)
        .ok_or_else(|| "usage.unit is neither BYTES (1) nor INODES (2)".into())
}

/// Parses a number from 0 to 2^63-1. Protobuf's JSON mapping writes 64-bit numbers as strings.
fn number(field: &str, value: &Value) -> Result<i64, String> {
    let number = match value {
        Value::Null => Some(0),
        Value::Number(number) => number.as_i64(),
        Value::String(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            digits.parse().ok()
        }
        _ => None,
    };
    number
        .filter(|number| *number >= 0)
        .ok_or_else(|| format!("{field} is not a whole number from 0 to 2^63-1"))
}

/// Truncates a text and replaces control characters, so that it is one line and safe for a
/// terminal.
pub fn printable(text: &str, max: usize) -> String {
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    truncate(line.trim(), max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_formats_of_proposal_and_kata_are_equal() {
        let proposal = br#"{"usage":[{"unit":"BYTES","total":10,"used":3,"available":7},{"unit":"INODES","total":2}],
            "volume_condition":{"abnormal":false,"message":"fine"},"more":[1]}"#;
        let kata = br#"{"usage":[{"available":7,"total":10,"used":3,"unit":1},{"total":2,"unit":2}],"volume_condition":{"message":"fine"}}"#;
        let protobuf = br#"{"usage":[{"available":"7","total":"10","used":"3","unit":"BYTES"},{"total":"2","unit":"INODES"}],
            "volume_condition":{"message":"fine"}}"#;
        let read = stats(proposal).unwrap();
        assert_eq!(read.usage[0].total, 10);
        assert_eq!(read.usage[1].unit(), Unit::Inodes);
        assert_eq!(stats(kata).unwrap(), read);
        assert_eq!(stats(protobuf).unwrap(), read);
        assert_eq!(stats(br#"{"usage":null}"#).unwrap(), Default::default());
        assert_eq!(resized(br#"{"capacity_bytes":4096}"#), Ok(4096));
        assert_eq!(resized(b"{}\n"), Ok(0));
    }

    #[test]
    fn invalid_program_output_is_refused() {
        for bad in [
            "",
            "[]",
            "null",
            "x",
            "{",
            r#"{"usage":{}}"#,
            r#"{"usage":[1]}"#,
            r#"[[],null]"#,
            r#"{"usage":[{"total":1}]}"#,
            r#"{"usage":[{"unit":0,"total":1}]}"#,
            r#"{"usage":[{"unit":"bytes","total":1}]}"#,
            r#"{"usage":[{"unit":1,"total":-1}]}"#,
            r#"{"usage":[{"unit":1,"total":1.5}]}"#,
            r#"{"usage":[{"unit":1,"total":9223372036854775808}]}"#,
            r#"{"usage":[{"unit":1,"total":"+1"}]}"#,
            r#"{"usage":[{"unit":1,"total":1},{"unit":"BYTES","total":1}]}"#,
            r#"{"usage":[{"unit":1},{"unit":2},{"unit":1}]}"#,
            r#"{"volume_condition":{"abnormal":"yes"}}"#,
            r#"{"usage":[]} trailing"#,
        ] {
            assert!(stats(bad.as_bytes()).is_err(), "{bad}");
        }
        // Ignored values may be nested to any depth; parsed values may not.
        let (open, close) = ("[".repeat(20_000), "]".repeat(20_000));
        stats(format!("{{\"more\":{open}{close}}}").as_bytes()).unwrap();
        assert!(stats(format!("{{\"usage\":[{{\"unit\":{open}{close}}}]}}").as_bytes()).is_err());
        for bad in [
            "",
            "7",
            r#"{"capacity_bytes":-1}"#,
            r#"{"capacity_bytes":1e30}"#,
            r#"{"capacity_bytes":[]}"#,
        ] {
            assert!(resized(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_condition_message_is_one_short_line() {
        let response =
            stats(br#"{"volume_condition":{"abnormal":true,"message":"a\nb\u001b[31m"}}"#).unwrap();
        assert_eq!(response.volume_condition.unwrap().message, "a b [31m");
        assert!(printable(&"x".repeat(5000), MAX_CONDITION).len() < MAX_CONDITION + 4);
    }
}
