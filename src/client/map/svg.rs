//! A map as SVG, and as an HTML page around it. Both files need no network and no script.

use std::fmt::Write as _;

use super::Row;
use super::cells::Level;
use crate::client::format;
use crate::quantity;

/// Cells of a row, and their size in pixels.
const CELLS: usize = 256;
const CELL: usize = 3;
const ROW: usize = 22;
const LABELS: usize = 230;
const SHARES: usize = 90;
const TOP: usize = 30;

/// Colors by level, of allocated and of changed blocks; they differ in lightness, too.
const ALLOCATED: [&str; 5] = ["#eef1f4", "#c6dbef", "#85b7dd", "#3f85bd", "#08456f"];
const CHANGED: [&str; 5] = ["#eef1f4", "#fdd0a2", "#fd9d4b", "#d95f0e", "#8c2d04"];

/// The map as an SVG document.
pub fn svg(rows: &[Row]) -> String {
    let scale = super::scale(rows);
    let width = LABELS + CELLS * CELL + SHARES;
    let height = TOP + ROW * rows.len() + 56;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    for (index, row) in rows.iter().enumerate() {
        draw(&mut out, row, scale, TOP + index * ROW);
    }
    axis(&mut out, scale);
    legend(&mut out, TOP + rows.len() * ROW + 24);
    out.push_str("</svg>\n");
    out
}

fn draw(out: &mut String, row: &Row, scale: u64, top: usize) {
    let label = escape(&format!("{} {}", row.snapshot, row.kind.name()));
    let share = format::percent(row.cells.bytes(), row.cells.capacity());
    let colors = if row.kind.is_changed() { CHANGED } else { ALLOCATED };
    let baseline = top + 14;
    push(out, format_args!("<text x=\"8\" y=\"{baseline}\">{label}</text>\n"));
    let x = LABELS + CELLS * CELL + 8;
    push(out, format_args!("<text x=\"{x}\" y=\"{baseline}\">{share}</text>\n"));
    let levels = row.cells.levels(scale, CELLS);
    let mut first = 0;
    for run in levels.chunk_by(|a, b| a == b) {
        let place = Level::LEGEND.iter().position(|(level, _)| Some(level) == run.first());
        if let Some((color, (_, meaning))) =
            place.and_then(|place| Some((colors.get(place)?, Level::LEGEND.get(place)?)))
        {
            let cell = |index: usize| quantity::format(scale / CELLS as u64 * index as u64);
            let (from, to) = (cell(first), cell(first + run.len()));
            let (x, width) = (LABELS + first * CELL, run.len() * CELL);
            let height = ROW - 4;
            push(
                out,
                format_args!(
                    "<rect x=\"{x}\" y=\"{top}\" width=\"{width}\" height=\"{height}\" fill=\"{color}\">\
                     <title>{from} to {to}: {meaning}</title></rect>\n"
                ),
            );
        }
        first += run.len();
    }
}

fn axis(out: &mut String, scale: u64) {
    for quarter in 0..=4_usize {
        let x = LABELS + CELLS * CELL / 4 * quarter;
        let text = quantity::format(scale / 4 * quarter as u64);
        push(
            out,
            format_args!(
                "<text x=\"{x}\" y=\"18\" text-anchor=\"middle\" fill=\"#555\">{text}</text>\n"
            ),
        );
    }
}

fn legend(out: &mut String, top: usize) {
    for (index, (_, meaning)) in Level::LEGEND.iter().enumerate() {
        let x = LABELS + index * 140;
        let baseline = top + 11;
        for (offset, colors) in [(0, ALLOCATED), (14, CHANGED)] {
            if let Some(color) = colors.get(index) {
                let x = x + offset;
                push(
                    out,
                    format_args!(
                        "<rect x=\"{x}\" y=\"{top}\" width=\"12\" height=\"12\" fill=\"{color}\"/>\n"
                    ),
                );
            }
        }
        let x = x + 32;
        push(out, format_args!("<text x=\"{x}\" y=\"{baseline}\">{meaning}</text>\n"));
    }
    let baseline = top + 11;
    push(out, format_args!("<text x=\"8\" y=\"{baseline}\">allocated, changed</text>\n"));
}

/// The map as an HTML page with the numbers as a table.
pub fn html(rows: &[Row]) -> String {
    let mut out = String::from(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>Snapshot map</title>\n\
         <style>body{font-family:sans-serif}td,th{padding:0 1em 0 0;text-align:left}svg{max-width:100%;height:auto}</style>\n\
         <h1>Snapshot map</h1>\n",
    );
    out.push_str(&svg(rows));
    out.push_str("<table>\n<tr><th>Snapshot<th>Blocks<th>Bytes<th>Share<th>Capacity\n");
    for row in rows {
        let (name, kind) = (escape(&row.snapshot), row.kind.name());
        let (bytes, capacity) = (row.cells.bytes(), row.cells.capacity());
        let share = format::percent(bytes, capacity);
        let (bytes, capacity) = (format::grouped(bytes), quantity::format(capacity));
        push(
            &mut out,
            format_args!("<tr><td>{name}<td>{kind}<td>{bytes}<td>{share}<td>{capacity}\n"),
        );
    }
    out.push_str("</table>\n</html>\n");
    out
}

fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a String does not fail.
    let _ = out.write_fmt(text);
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::*;

    #[test]
    fn a_drawing_names_each_snapshot_and_escapes_it() {
        let rows = [row("mon<day", false, &[(0, 1 << 29)]), row("tuesday", true, &[(4096, 4096)])];
        for text in [svg(&rows), html(&rows)] {
            assert!(text.contains("mon&lt;day allocated") && !text.contains("mon<day"), "{text}");
            assert!(text.contains("tuesday changed") && text.contains("50.0 %"), "{text}");
            assert!(text.contains(CHANGED[1]) && text.contains(ALLOCATED[4]), "{text}");
        }
        assert!(html(&rows).contains("<td>4,096<td>"));
    }

    #[test]
    fn a_drawing_is_small_whatever_the_volume_is() {
        let extents: Vec<_> = (0..10_000).map(|index| (index * 8192, 4096)).collect();
        assert!(svg(&[row("a", false, &extents)]).len() < 64 << 10);
    }
}
