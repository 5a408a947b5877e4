//! Parses and formats sizes and durations of flags and parameters. A size is a number of bytes, or
//! a number with a Kubernetes suffix, decimal (`k`, `M`, `G`, `T`, `P`) or binary (`Ki`, `Mi`,
//! `Gi`, `Ti`, `Pi`). Sizes are `u64` bytes; a larger number is an error.

use std::ops::RangeInclusive;
use std::time::Duration;

/// Suffixes and factors in bytes. Longer suffixes come first, so that `Ki` is not parsed as `K`.
const UNITS: [(&str, u64); 10] = [
    ("Pi", 1 << 50),
    ("Ti", 1 << 40),
    ("Gi", 1 << 30),
    ("Mi", 1 << 20),
    ("Ki", 1 << 10),
    ("P", 1_000_000_000_000_000),
    ("T", 1_000_000_000_000),
    ("G", 1_000_000_000),
    ("M", 1_000_000),
    ("k", 1_000),
];

/// Maximum digits after the decimal point: enough for any size, and no overflow.
const MAX_FRACTION_DIGITS: usize = 15;

/// Parses a quantity such as `4096`, `1.5Gi` or `500M` to bytes. A fraction of a byte rounds up, as
/// in Kubernetes. The error is suitable for a command line or field message.
pub fn parse(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!(
            "{text:?} is not a size; use bytes, or a number with the suffix k, M, G, T, P, Ki, Mi, Gi, Ti or Pi, such as 10Gi"
        )
    };
    let (number, factor) = UNITS
        .iter()
        .find_map(|(suffix, factor)| text.strip_suffix(suffix).map(|number| (number, *factor)))
        .unwrap_or((text, 1));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if !is_digits(whole) || !is_digits(fraction) || fraction.len() > MAX_FRACTION_DIGITS {
        return Err(wrong());
    }
    let too_large = || format!("the size {text:?} is too large");
    let whole: u128 = whole.parse().map_err(|_| too_large())?;
    let scale = 10_u128.pow(fraction.len() as u32);
    let fraction: u128 = fraction.parse().map_err(|_| wrong())?;
    let part = (fraction * u128::from(factor)).div_ceil(scale);
    whole
        .checked_mul(u128::from(factor))
        .and_then(|bytes| bytes.checked_add(part))
        .and_then(|bytes| u64::try_from(bytes).ok())
        .ok_or_else(too_large)
}

/// A duration as users write it: whole days as days, where humantime would make months of them.
pub fn duration_text(time: Duration) -> String {
    const DAY: u64 = 86_400;
    match time.as_secs() {
        DAY => "1 day".to_owned(),
        seconds if seconds > 0 && seconds.is_multiple_of(DAY) && time.subsec_nanos() == 0 => {
            format!("{} days", seconds / DAY)
        }
        _ => humantime::format_duration(time).to_string(),
    }
}

/// Parses a duration such as 90m within `range`. `expected` describes the range in the error, as in
/// "a time from 1s to 1h".
pub fn duration(
    text: &str,
    range: RangeInclusive<Duration>,
    expected: &str,
) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if range.contains(&time) { Ok(time) } else { Err(format!("{text:?} is not {expected}")) }
}

/// A positive duration of at most a day, for intervals and timeouts.
pub fn nonzero_duration(text: &str) -> Result<Duration, String> {
    let range = Duration::from_millis(1)..=Duration::from_secs(86_400);
    duration(text, range, "a time from 1ms to 1day")
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Formats `bytes` in the largest binary unit that is not above it, truncated (not rounded) to two
/// digits after the decimal point: `4Gi`, `1.5Gi`, `512`.
pub fn format(bytes: u64) -> String {
    let unit = UNITS.iter().find(|(suffix, factor)| suffix.ends_with('i') && bytes >= *factor);
    let Some((suffix, factor)) = unit else { return bytes.to_string() };
    let whole = bytes / factor;
    let hundredths = u128::from(bytes % factor) * 100 / u128::from(*factor);
    match hundredths {
        0 => format!("{whole}{suffix}"),
        n if n % 10 == 0 => format!("{whole}.{}{suffix}", n / 10),
        n => format!("{whole}.{n:02}{suffix}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_bytes_and_every_suffix_are_parsed() {
        let cases = [
            ("0", 0),
            ("4096", 4096),
            ("1k", 1000),
            ("2M", 2_000_000),
            ("1Ki", 1024),
            ("1.5Gi", 3 << 29),
            ("64Ti", 64 << 40),
            ("0.5Ki", 512),
            ("1.0001k", 1001),
            ("15Pi", 15 << 50),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn malformed_sizes_are_refused() {
        for text in ["", "Gi", "-1", "+1", "1 Gi", "1K", "1gi", "1.", ".5Gi", "1e3", "1.1.1", "١"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_size_that_overflows_is_refused() {
        for text in
            ["18446744073709551616", "16384Pi", "99999999999999999999999999999999999999999Pi"]
        {
            assert!(parse(text).unwrap_err().contains("too large"), "{text}");
        }
        assert!(parse("0.9999999999999999999999999999Pi").is_err());
    }

    #[test]
    fn sizes_are_formatted_in_binary_units() {
        let cases = [
            (0, "0"),
            (1023, "1023"),
            (1024, "1Ki"),
            (1536, "1.5Ki"),
            ((1 << 30) - 1, "1023.99Mi"),
            (1 << 30, "1Gi"),
            ((1 << 30) + (11 << 20), "1.01Gi"),
            (64 << 40, "64Ti"),
            (u64::MAX, "16383.99Pi"),
        ];
        for (bytes, text) in cases {
            assert_eq!(format(bytes), text);
        }
    }
}
