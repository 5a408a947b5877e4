//! Numbers, times, tables and JSON as commands print them.

use std::io::{self, Write};
use std::time::Duration;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use console::Term;
use prost_types::Timestamp;
use serde::Serialize;

use super::{Output, progress};
use common::quantity;

/// A number of bytes, rounded and exact: `1Gi (1,073,741,824 bytes)`.
pub fn bytes(bytes: u64) -> String {
    format!("{} ({} bytes)", quantity::format(bytes), grouped(bytes))
}

/// A number with its digits in groups of three: `1,073,741,824`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A share of the whole: `3.4 %`. Only a share of zero prints as 0 %, and only the whole as 100 %.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 || part == 0 {
        return "0 %".to_owned();
    }
    if part == whole {
        return "100 %".to_owned();
    }
    #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
    let share = part as f64 / whole as f64 * 100.0;
    match share {
        small if small < 0.1 => "under 0.1 %".to_owned(),
        large if part < whole && large > 99.9 => "over 99.9 %".to_owned(),
        share => format!("{share:.1} %"),
    }
}

/// A duration: `1.234 s`, `12.3 ms`, `45 µs`.
pub fn took(time: Duration) -> String {
    let micros = time.as_micros();
    match micros {
        0..1_000 => format!("{micros} µs"),
        1_000..1_000_000 => format!("{:.1} ms", time.as_secs_f64() * 1000.0),
        _ => format!("{:.3} s", time.as_secs_f64()),
    }
}

/// A point in time in UTC (RFC 3339); `None` outside the years 1970 to 9999.
pub fn time(timestamp: Option<&Timestamp>) -> Option<String> {
    /// The first second of the year 10000.
    const END: u64 = 253_402_300_800;
    let timestamp = timestamp?;
    let seconds = u64::try_from(timestamp.seconds).ok().filter(|seconds| *seconds < END)?;
    let nanos = u32::try_from(timestamp.nanos).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    let time = std::time::UNIX_EPOCH + Duration::new(seconds, nanos);
    Some(humantime::format_rfc3339_millis(time).to_string())
}

/// Text without control characters, which could take over a terminal; lines stay lines.
pub fn printable(text: &str) -> String {
    text.split('\n').map(cell).collect::<Vec<_>>().join("\n")
}

/// The same without line breaks, as in a cell of a table.
pub fn cell(text: &str) -> String {
    let escaped = |letter: char| match letter {
        letter if letter.is_control() => letter.escape_default().to_string(),
        letter => letter.to_string(),
    };
    text.chars().map(escaped).collect()
}

/// Rows under a header, without borders; columns of the headers in `right` are right-aligned.
pub fn table<const N: usize>(header: [&str; N], right: &[&str], rows: &[[String; N]]) -> String {
    let mut table = Table::new();
    let rows = rows.iter().map(|row| row.iter().map(|text| cell(text)).collect::<Vec<_>>());
    table.load_style(presets::NOTHING).set_header(header).add_rows(rows);
    if let Some(width) = terminal_width() {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    for (column, title) in table.column_iter_mut().zip(header) {
        column.set_padding((0, 2));
        if right.contains(&title) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

/// Columns of the terminal that standard output goes to.
fn terminal_width() -> Option<u16> {
    Term::stdout().size_checked().map(|(_, columns)| columns).filter(|columns| *columns > 0)
}

/// Names and values in two columns.
pub fn facts(rows: &[(&str, String)]) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .add_rows(rows.iter().map(|(name, value)| [(*name).to_owned(), printable(value)]));
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

/// Prints one or several lines to standard output.
pub fn print(text: &str) -> io::Result<()> {
    progress::suspend(|| {
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.write_all(b"\n")?;
        out.flush()
    })
}

/// Prints one result: as a JSON document, or as the text of `shown`.
pub fn print_one<T: Serialize>(
    output: Output,
    value: &T,
    shown: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    Ok(print(&match output {
        Output::Json => escaped(&serde_json::to_string_pretty(value)?),
        Output::Ndjson => escaped(&serde_json::to_string(value)?),
        Output::Table => shown(value),
    })?)
}

/// Prints a list: as a JSON array, as one JSON document per row, or as the table that `shown` makes
/// of it.
pub fn print_rows<T: Serialize>(
    output: Output,
    rows: &[T],
    shown: impl FnOnce(&[T]) -> String,
) -> anyhow::Result<()> {
    match output {
        Output::Json => Ok(print(&escaped(&serde_json::to_string_pretty(rows)?))?),
        Output::Ndjson => {
            rows.iter().try_for_each(|row| Ok(print(&escaped(&serde_json::to_string(row)?))?))
        }
        Output::Table => Ok(print(&shown(rows))?),
    }
}

/// JSON in which the control characters that serde_json leaves alone are escaped as well.
fn escaped(json: &str) -> String {
    let shown = |letter: char| match letter {
        '\u{7f}'..='\u{9f}' => format!("\\u{:04x}", u32::from(letter)),
        letter => letter.to_string(),
    };
    json.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_control_character_reaches_a_terminal() {
        let hostile = "a\u{1b}[2J\u{9b}b\nc";
        let rows = [[hostile.to_owned()]];
        assert_eq!(table(["X"], &[], &rows), "X\na\\u{1b}[2J\\u{9b}b\\nc");
        assert_eq!(facts(&[("x", hostile.to_owned())]).matches('\u{1b}').count(), 0);
        let json = escaped(&serde_json::to_string(hostile).unwrap());
        assert!(!json.chars().any(char::is_control), "{json}");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), hostile);
    }

    #[test]
    fn bytes_print_rounded_and_exact() {
        assert_eq!(bytes(1 << 30), "1Gi (1,073,741,824 bytes)");
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1000), "1,000");
    }

    #[test]
    fn only_nothing_and_everything_print_as_0_and_100() {
        assert_eq!(percent(0, 0), "0 %");
        assert_eq!(percent(0, 7), "0 %");
        assert_eq!(percent(1, 1 << 40), "under 0.1 %");
        assert_eq!(percent(1, 3), "33.3 %");
        assert_eq!(percent((1 << 40) - 1, 1 << 40), "over 99.9 %");
        assert_eq!(percent(3, 3), "100 %");
    }

    #[test]
    fn times_keep_three_or_four_digits() {
        assert_eq!(took(Duration::from_micros(45)), "45 µs");
        assert_eq!(took(Duration::from_micros(12_345)), "12.3 ms");
        assert_eq!(took(Duration::from_millis(1234)), "1.234 s");
    }

    #[test]
    fn a_time_is_utc_and_an_invalid_one_is_none() {
        let stamp = |seconds, nanos| Timestamp { seconds, nanos };
        let moment = stamp(1_763_673_303, 250_000_000);
        assert_eq!(time(Some(&moment)).as_deref(), Some("2025-11-20T21:15:03.250Z"));
        assert_eq!(time(None), None);
        for odd in [stamp(-1, 0), stamp(i64::MAX, 0), stamp(0, -1), stamp(0, i32::MAX)] {
            assert_eq!(time(Some(&odd)), None);
        }
    }

    #[test]
    fn a_table_is_aligned_and_has_no_trailing_space() {
        let rows = [["a".to_owned(), "1".to_owned()], ["long".to_owned(), "1000".to_owned()]];
        let shown = table(["NAME", "SIZE"], &["SIZE"], &rows);
        assert_eq!(shown, "NAME  SIZE\na        1\nlong  1000");
        assert_eq!(facts(&[("a", "1".to_owned()), ("bcd", "2".to_owned())]), "a    1\nbcd  2");
    }
}
