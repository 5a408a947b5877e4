//! A map as SVG, which needs no network and no script.

use std::fmt::Write as _;

use super::Row;
use super::cells::Level;
use crate::client::format;
use common::quantity;

/// Cells of a row, and their size in pixels.
pub const CELLS: usize = 256;
const CELL: usize = 3;
const ROW: usize = 22;
/// Minimum width of the labels, and the width of a letter.
const LABELS: usize = 230;
const LETTER: usize = 8;
const SHARES: usize = 330;
/// Where the legend begins.
const LEGEND: usize = 230;
const TOP: usize = 30;

/// Colors by level, of allocated and of changed blocks; they differ in lightness, too.
const ALLOCATED: [&str; 5] = ["#eef1f4", "#c6dbef", "#85b7dd", "#3f85bd", "#08456f"];
const CHANGED: [&str; 5] = ["#eef1f4", "#fdd0a2", "#fd9d4b", "#d95f0e", "#8c2d04"];

/// The map as an SVG document.
pub fn svg(rows: &[Row]) -> String {
    let scale = super::scale(rows);
    let left = labels(rows);
    let width = left + CELLS * CELL + SHARES;
    let height = TOP + ROW * rows.len() + 56;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    for (index, row) in rows.iter().enumerate() {
        draw(&mut out, row, scale, left, TOP + index * ROW);
    }
    axis(&mut out, scale, left);
    legend(&mut out, TOP + rows.len() * ROW + 24);
    out.push_str("</svg>\n");
    out
}

/// The width of the labels: names are not cut.
fn labels(rows: &[Row]) -> usize {
    let longest = rows.iter().map(|row| label(row).chars().count()).max().unwrap_or(0);
    LABELS.max(longest * LETTER)
}

fn label(row: &Row) -> String {
    format!("{} {}", row.snapshot, row.kind.name())
}

fn draw(out: &mut String, row: &Row, scale: u64, left: usize, top: usize) {
    let label = escape(&label(row));
    let (bytes, capacity) = (row.cells.bytes(), row.cells.capacity());
    let created = row.details.created.as_deref().unwrap_or_default();
    let share = format::percent(bytes, capacity);
    let share = format!("{share}  {}  {created}", quantity::format(bytes));
    let (share, baseline) = (escape(share.trim_end()), top + 14);
    let _ = writeln!(out, "<text x=\"8\" y=\"{baseline}\">{label}</text>");
    let x = left + CELLS * CELL + 8;
    let _ = writeln!(out, "<text x=\"{x}\" y=\"{baseline}\">{share}</text>");
    for run in runs(row, scale) {
        let (x, width) = (left + run.first * CELL, run.cells * CELL);
        let (height, color, title) = (ROW - 4, run.color, run.title);
        let _ = writeln!(
            out,
            "<rect x=\"{x}\" y=\"{top}\" width=\"{width}\" height=\"{height}\" fill=\"{color}\">\
             <title>{title}</title></rect>"
        );
    }
}

/// Neighboring cells of one level.
pub struct Run {
    pub first: usize,
    pub cells: usize,
    pub color: &'static str,
    /// What the cells are.
    pub title: String,
}

/// A row of [`CELLS`] cells, without those beyond the end of the volume.
pub fn runs(row: &Row, scale: u64) -> Vec<Run> {
    let levels = row.cells.levels(scale, CELLS);
    let (mut runs, mut first) = (Vec::new(), 0);
    for run in levels.chunk_by(|a, b| a == b) {
        let place = Level::LEGEND.iter().position(|(level, _)| Some(level) == run.first());
        if let Some((color, meaning)) = place.and_then(|at| colors(row.kind.is_changed()).nth(at)) {
            let cell = |index: usize| quantity::format(scale / CELLS as u64 * index as u64);
            let title = format!("{} to {}: {meaning}", cell(first), cell(first + run.len()));
            runs.push(Run { first, cells: run.len(), color, title });
        }
        first += run.len();
    }
    runs
}

/// The colors of a legend, with their meaning.
pub fn colors(changed: bool) -> impl Iterator<Item = (&'static str, &'static str)> {
    let colors = if changed { CHANGED } else { ALLOCATED };
    colors.into_iter().zip(Level::LEGEND.map(|(_, meaning)| meaning))
}

fn axis(out: &mut String, scale: u64, left: usize) {
    for quarter in 0..=4_usize {
        let x = left + CELLS * CELL / 4 * quarter;
        let text = quantity::format(scale / 4 * quarter as u64);
        let _ = writeln!(
            out,
            "<text x=\"{x}\" y=\"18\" text-anchor=\"middle\" fill=\"#555\">{text}</text>"
        );
    }
}

fn legend(out: &mut String, top: usize) {
    for (index, (_, meaning)) in Level::LEGEND.iter().enumerate() {
        let x = LEGEND + index * 140;
        let baseline = top + 11;
        for (offset, colors) in [(0, ALLOCATED), (14, CHANGED)] {
            if let Some(color) = colors.get(index) {
                let x = x + offset;
                let _ = writeln!(
                    out,
                    "<rect x=\"{x}\" y=\"{top}\" width=\"12\" height=\"12\" fill=\"{color}\"/>"
                );
            }
        }
        let x = x + 32;
        let _ = writeln!(out, "<text x=\"{x}\" y=\"{baseline}\">{meaning}</text>");
    }
    let baseline = top + 11;
    let _ = writeln!(out, "<text x=\"8\" y=\"{baseline}\">allocated, changed</text>");
}

pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::*;

    #[test]
    fn a_drawing_names_each_snapshot_and_escapes_it() {
        let rows = [row("mon<day", false, &[(0, 1 << 29)]), row("tuesday", true, &[(4096, 4096)])];
        let text = svg(&rows);
        assert!(text.contains("mon&lt;day allocated") && !text.contains("mon<day"), "{text}");
        assert!(text.contains("tuesday changed") && text.contains("50.0 %  512Mi"), "{text}");
        assert!(text.contains(CHANGED[1]) && text.contains(ALLOCATED[4]), "{text}");
    }

    #[test]
    fn a_label_has_room_for_the_name_of_a_snapshot_in_a_cluster() {
        let name = "snapshot-0b6e6a2c-95a7-4b0c-a4bb-0f8b1d1f2c3d";
        let text = svg(&[row(name, true, &[])]);
        let strip = text.lines().find(|line| line.contains("<rect x=\"4")).expect(&text);
        let room = (name.len() + 8) * LETTER;
        assert!(strip.starts_with(&format!("<rect x=\"{room}\"")), "{strip}");
    }

    #[test]
    fn a_drawing_is_small_whatever_the_volume_is() {
        let extents: Vec<_> = (0..10_000).map(|index| (index * 8192, 4096)).collect();
        assert!(svg(&[row("a", false, &extents)]).len() < 64 << 10);
    }
}
