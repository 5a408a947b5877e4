//! A map as an HTML report: one file that needs no network and no script, and fits a phone.

use std::fmt::Write as _;

use super::Row;
use super::svg::{CELLS, colors, escape, runs};
use crate::client::format;
use common::quantity;

const HEAD: &str = "<!DOCTYPE html>
<html lang=\"en\">
<meta charset=\"utf-8\">
<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">
<title>Snapshot map</title>
<style>
:root{color-scheme:light dark}
body{font-family:sans-serif;line-height:1.4;max-width:60rem;margin:1rem auto;padding:0 1rem}
h2{font-size:1rem;margin:1.2rem 0 0;overflow-wrap:anywhere}
p{margin:.2rem 0}
.strip{width:100%;height:1.6rem;display:block;border:1px solid #8888}
.axis{display:flex;justify-content:space-between;font-size:.8rem}
.legend span{white-space:nowrap;margin-right:1rem}
i{display:inline-block;width:.9rem;height:.9rem;vertical-align:-.1rem;margin-right:.2rem}
</style>
<h1>Snapshot map</h1>
";

/// The report.
pub fn html(rows: &[Row]) -> String {
    let scale = super::scale(rows);
    let mut out = HEAD.to_owned();
    summary(&mut out, rows, scale);
    legend(&mut out);
    for row in rows {
        section(&mut out, row, scale);
    }
    let places = [0, 1, 2, 3, 4].map(|quarter| quantity::format(scale / 4 * quarter));
    let places = places.map(|place| format!("<span>{place}</span>")).concat();
    out.push_str(&format!("<div class=\"axis\">{places}</div>\n</html>\n"));
    out
}

fn summary(out: &mut String, rows: &[Row], scale: u64) {
    let volume = rows.iter().find_map(|row| row.details.volume.as_deref());
    let volume = volume.map(|name| format!("Volume {}, ", escape(name))).unwrap_or_default();
    let chain: Vec<_> = rows.iter().map(|row| escape(&row.snapshot)).collect();
    let (size, chain) = (format::bytes(scale), chain.join(" → "));
    let _ = write!(out, "<p>{volume}{size}</p>\n<p>Chain: {chain}</p>\n");
}

fn legend(out: &mut String) {
    for (name, changed) in [("allocated", false), ("changed", true)] {
        let _ = write!(out, "<p class=\"legend\">{name}: ");
        for (color, meaning) in colors(changed) {
            let _ = write!(out, "<span><i style=\"background:{color}\"></i>{meaning}</span>");
        }
        out.push_str("</p>\n");
    }
}

fn section(out: &mut String, row: &Row, scale: u64) {
    let name = escape(&row.snapshot);
    let (bytes, capacity) = (row.cells.bytes(), row.cells.capacity());
    let (share, bytes) = (format::percent(bytes, capacity), format::bytes(bytes));
    let kind = row.kind.name();
    let _ = write!(out, "<h2>{name}</h2>\n<p>{kind}: {bytes}, {share}</p>\n");
    let times = [("taken", &row.details.created), ("base until", &row.details.expires)];
    let times = times.iter().filter_map(|(what, time)| Some(format!("{what} {}", time.as_ref()?)));
    let times: Vec<_> = times.collect();
    if !times.is_empty() {
        let _ = writeln!(out, "<p>{}</p>", escape(&times.join(", ")));
    }
    let _ = writeln!(
        out,
        "<svg class=\"strip\" viewBox=\"0 0 {CELLS} 1\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{name} {kind}\">"
    );
    for run in runs(row, scale) {
        let _ = writeln!(
            out,
            "<rect x=\"{}\" width=\"{}\" height=\"1\" fill=\"{}\"><title>{}</title></rect>",
            run.first, run.cells, run.color, run.title
        );
    }
    out.push_str("</svg>\n");
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::*;

    #[test]
    fn a_report_is_complete_and_needs_no_network() {
        let mut rows = [row("mon<day", false, &[(0, 1 << 29)]), row("tue", true, &[(4096, 4096)])];
        rows[0].details.volume = Some("data".to_owned());
        rows[0].details.created = Some("2026-11-26T10:00:00Z".to_owned());
        rows[1].details.expires = Some("2027-02-24T10:00:00Z".to_owned());
        let text = html(&rows);
        for part in [
            "width=device-width",
            "Volume data, 1Gi (1,073,741,824 bytes)",
            "mon&lt;day → tue",
            "allocated: 512Mi (536,870,912 bytes), 50.0 %",
            "taken 2026-11-26T10:00:00Z",
            "base until 2027-02-24T10:00:00Z",
            "50 % and more",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("mon<day") && !text.contains("http") && !text.contains("<script"));
    }
}
