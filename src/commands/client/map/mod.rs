//! `snapshot map`: allocated and changed blocks as a picture, in the terminal or as a file. Each
//! snapshot is a row.

pub mod cells;
mod html;
mod svg;

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Serialize;

use super::block_map::{BlockMap, Consumer, Query, Source, Window};
use super::cluster::{self, ClusterArgs};
use super::connection::Connection;
use super::names::Subject;
use super::{Options, Output, base, bounded, format, in_use, names, progress};
use cells::{Cells, Level};
use common::quantity;
use grpc::proto::admin::v1 as admin;
use storage::Extent;

/// Lines of the map of one snapshot.
const LINES: usize = 16;

#[derive(Debug, Args)]
pub struct MapArgs {
    /// Snapshots, oldest first, by name or id; with --namespace, VolumeSnapshots
    #[arg(required_unless_present = "volume", conflicts_with = "volume", value_name = "SNAPSHOT")]
    snapshots: Vec<String>,
    /// The latest snapshots of this volume, by name or id
    #[arg(long, conflicts_with = "namespace")]
    volume: Option<String>,
    /// Number of snapshots with --volume
    #[arg(long, requires = "volume", conflicts_with = "snapshots", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N")]
    last: u16,
    /// Draw allocated blocks in every row instead of changes
    #[arg(long)]
    allocated: bool,
    /// Cells per line
    #[arg(long, conflicts_with = "file", default_value_t = 64, value_parser = clap::value_parser!(u16).range(8..=512), value_name = "N")]
    width: u16,
    /// Write the map to this file: .svg or .html
    #[arg(long, value_parser = picture, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    cluster: ClusterArgs,
}

fn picture(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg" | "html") => Ok(path),
        _ => Err("must end in .svg or .html".to_owned()),
    }
}

/// What a row shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Allocated,
    /// Since the snapshot of the previous row.
    Changed,
}

impl Kind {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allocated => "allocated",
            Self::Changed => "changed",
        }
    }

    pub const fn is_changed(self) -> bool {
        matches!(self, Self::Changed)
    }
}

/// A snapshot in the map.
#[derive(Debug, Clone)]
pub struct Row {
    pub snapshot: String,
    pub kind: Kind,
    pub cells: Cells,
    pub details: Details,
}

/// What the driver knows of a snapshot.
#[derive(Debug, Clone, Default)]
pub struct Details {
    /// The volume's name.
    pub volume: Option<String>,
    /// When it was taken.
    pub created: Option<String>,
    /// When it expires as a base; absent while it exists.
    pub expires: Option<String>,
}

pub async fn run(options: &Options, args: MapArgs) -> Result<ExitCode> {
    let output = options.print.output;
    if args.file.is_some() && output != Output::Table {
        bail!("--output {} has no effect with --file; leave out one of them", output.name());
    }
    let rows = match args.cluster.is_requested() {
        true => through_cluster(options, &args).await?,
        false => bounded(options, async |connection| from_driver(&connection, &args).await).await?,
    };
    match &args.file {
        Some(path) => {
            write(path, &rows)?;
            progress::note(&format!("wrote {}", path.display()));
        }
        None => print(&rows, usize::from(args.width), output)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn write(path: &Path, rows: &[Row]) -> Result<()> {
    let is_html = path.extension().is_some_and(|extension| extension == "html");
    let text = if is_html { html::html(rows) } else { svg::svg(rows) };
    in_use::check_path(path)?;
    let opened = File::options().write(true).create(true).truncate(false).open(path);
    let mut file = opened.with_context(|| format!("open {}", path.display()))?;
    let found = file.metadata()?.file_type();
    if found.is_block_device() {
        bail!("{} is a block device; name a file", path.display());
    }
    if found.is_file() {
        in_use::check_open(path, &file)?;
        file.set_len(0).with_context(|| format!("truncate {}", path.display()))?;
    }
    file.write_all(text.as_bytes()).with_context(|| format!("write {}", path.display()))
}

/// What each row shows: its snapshot, and the base of changes.
fn in_rows<T>(snapshots: &[T], allocated: bool) -> Vec<(Kind, Option<&T>, &T)> {
    let bases = std::iter::once(None).chain(snapshots.iter().map(Some));
    let rows = snapshots.iter().zip(bases);
    let row = |(snapshot, base): (_, Option<_>)| match base.filter(|_| !allocated) {
        Some(base) => (Kind::Changed, Some(base), snapshot),
        None => (Kind::Allocated, None, snapshot),
    };
    rows.map(row).collect()
}

async fn from_driver(connection: &Connection, args: &MapArgs) -> Result<Vec<Row>> {
    let snapshots = match &args.volume {
        Some(volume) => latest(connection, volume, usize::from(args.last)).await?,
        None => {
            let mut snapshots = Vec::with_capacity(args.snapshots.len());
            for reference in &args.snapshots {
                snapshots.push(names::subject(connection, reference).await?);
            }
            snapshots
        }
    };
    let mut rows = Vec::with_capacity(snapshots.len());
    let mut known = match snapshots.last() {
        Some(last) => details(connection, last.id()).await,
        None => HashMap::new(),
    };
    for (kind, base, target) in in_rows(&snapshots, args.allocated) {
        let listing = names::listing(connection, base, target, Window::default()).await?;
        let cells = Collect.consume(listing).await?;
        let details = known.remove(target.id()).unwrap_or_default();
        rows.push(Row { snapshot: names::name_of(target.id()).to_owned(), kind, cells, details });
    }
    Ok(rows)
}

/// What the driver knows of a snapshot and of those before it, by id. Nothing from another driver.
async fn details(connection: &Connection, snapshot_id: &str) -> HashMap<String, Details> {
    let request = admin::ListBasesRequest {
        target_snapshot_id: snapshot_id.to_owned(),
        ..Default::default()
    };
    let bases = base::list_all(connection, request).await.unwrap_or_default();
    let known = |base: admin::Base| {
        let volume = Some(names::name_of(&base.volume_id).to_owned());
        let created = base::whole(base.created_at.as_ref());
        let expires = base::whole(base.expires_at.as_ref());
        (base.snapshot_id, Details { volume, created, expires })
    };
    bases.into_iter().map(known).collect()
}

/// The latest snapshots of a volume, oldest first.
async fn latest(connection: &Connection, volume: &str, count: usize) -> Result<Vec<Subject>> {
    let volume_id = names::volume(connection, volume).await?.volume_id;
    let found = names::snapshots_in_order(connection, &volume_id).await?;
    ensure!(!found.is_empty(), "volume {volume_id} has no snapshots");
    let surplus = found.len().saturating_sub(count);
    Ok(found.iter().skip(surplus).map(Subject::of).collect())
}

async fn through_cluster(options: &Options, args: &MapArgs) -> Result<Vec<Row>> {
    let names = &args.snapshots;
    let mut rows = Vec::with_capacity(names.len());
    for (kind, base, name) in in_rows(names, args.allocated) {
        let (cluster, target) = (args.cluster.clone(), name.clone());
        let query = match base {
            Some(base) => Query::Delta { base: base.clone(), target },
            None => Query::Allocated { snapshot: target },
        };
        let cells = cluster::list(options, cluster, query, Window::default(), Collect).await?;
        rows.push(Row { snapshot: name.clone(), kind, cells, details: Details::default() });
    }
    Ok(rows)
}

/// Counts the blocks of a listing.
struct Collect;

impl Consumer for Collect {
    type Output = Cells;

    async fn consume<S: Source>(self, mut map: BlockMap<S>) -> Result<Cells> {
        let mut cells: Option<Cells> = None;
        loop {
            let extents = map.next().await?;
            let Some(capacity) = map.shape().and_then(|shape| shape.capacity_bytes) else {
                bail!("the capacity of the volume is unknown, so it cannot be drawn");
            };
            let mut counted = cells.take().unwrap_or_else(|| Cells::new(capacity));
            let Some(extents) = extents else { return Ok(counted) };
            let end = extents.last().map_or(0, Extent::end);
            extents.into_iter().for_each(|extent| counted.add(extent));
            progress::report_data(counted.bytes(), end, capacity);
            cells = Some(counted);
        }
    }
}

/// Bytes that all rows are drawn to: the capacity of the largest.
fn scale(rows: &[Row]) -> u64 {
    rows.iter().map(|row| row.cells.capacity()).max().unwrap_or(1)
}

fn print(rows: &[Row], width: usize, output: Output) -> Result<()> {
    let documents: Vec<_> = rows.iter().map(|row| Document::new(row, scale(rows), width)).collect();
    format::print_rows(output, &documents, |_| match rows {
        [one] => grid(one, width),
        rows => lines(rows, width),
    })
}

/// A row as JSON.
#[derive(Debug, Serialize)]
struct Document<'a> {
    snapshot: &'a str,
    kind: &'static str,
    capacity_bytes: u64,
    bytes: u64,
    /// Bytes of the volume in one cell.
    cell_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    volume: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    created: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires: Option<&'a str>,
    /// Listed bytes of each cell; null beyond the end of the volume.
    cells: Vec<Option<u64>>,
}

impl<'a> Document<'a> {
    fn new(row: &'a Row, scale: u64, width: usize) -> Self {
        Self {
            snapshot: &row.snapshot,
            kind: row.kind.name(),
            capacity_bytes: row.cells.capacity(),
            bytes: row.cells.bytes(),
            cell_bytes: scale / width as u64,
            volume: row.details.volume.as_deref(),
            created: row.details.created.as_deref(),
            expires: row.details.expires.as_deref(),
            cells: row.cells.columns(scale, width),
        }
    }
}

/// One snapshot in several lines.
fn grid(row: &Row, width: usize) -> String {
    let capacity = row.cells.capacity();
    let levels = row.cells.levels(capacity, width * LINES);
    let share = format::percent(row.cells.bytes(), capacity);
    let mut text = format!(
        "{} in {}: {share} of {}; one cell is {}\n\n",
        row.kind.name(),
        row.snapshot,
        quantity::format(capacity),
        quantity::format(capacity / (width * LINES) as u64)
    );
    for (index, line) in levels.chunks(width).enumerate() {
        let offset = quantity::format(capacity / LINES as u64 * index as u64);
        let symbols: String = line.iter().map(|level| level.symbol()).collect();
        text.push_str(&format!("{offset:>10}  {symbols}\n"));
    }
    text.push_str(&format!("\n{}", legend()));
    text
}

/// Several snapshots, one per line, to one scale.
fn lines(rows: &[Row], width: usize) -> String {
    let scale = scale(rows);
    let longest = rows.iter().map(|row| row.snapshot.chars().count()).max().unwrap_or(0);
    let mut text = format!(
        "{} in a line; one cell is {}\n\n",
        quantity::format(scale),
        quantity::format(scale / width as u64)
    );
    let (half, rest) = (width / 2, width - width / 2);
    let (middle, end) = (quantity::format(scale / 2), quantity::format(scale));
    let labels = longest + "  allocated  ".len();
    text.push_str(&format!("{:labels$}{:<half$}{middle:<rest$}{end}\n", "", "0"));
    for row in rows {
        let levels = row.cells.levels(scale, width).into_iter();
        let symbols: String = levels.map(Level::symbol).collect();
        let bytes = row.cells.bytes();
        let (share, bytes) =
            (format::percent(bytes, row.cells.capacity()), quantity::format(bytes));
        let (name, kind) = (&row.snapshot, row.kind.name());
        let created = row.details.created.as_deref().unwrap_or_default();
        let line =
            format!("{name:<longest$}  {kind:<9}  {symbols}  {share:<11}  {bytes:>8}  {created}");
        text.push_str(&format!("{}\n", line.trim_end()));
    }
    text.push_str(&format!("\n{}", legend()));
    text
}

fn legend() -> String {
    let entries = Level::LEGEND.iter().map(|(level, text)| format!("{} {text}", level.symbol()));
    entries.collect::<Vec<_>>().join("   ")
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn row(snapshot: &str, changed: bool, extents: &[(u64, u64)]) -> Row {
        let mut cells = Cells::new(1 << 30);
        extents.iter().for_each(|&(offset, length)| cells.add(Extent { offset, length }));
        let kind = if changed { Kind::Changed } else { Kind::Allocated };
        Row { snapshot: snapshot.to_owned(), kind, cells, details: Details::default() }
    }

    #[test]
    fn several_snapshots_are_rows_of_one_scale() {
        let rows = [row("monday", false, &[(0, 1 << 29)]), row("tue", true, &[(1 << 29, 4096)])];
        let expected = "\
1Gi in a line; one cell is 128Mi

                   0   512Mi1Gi
monday  allocated  ████····  50.0 %          512Mi
tue     changed    ····░···  under 0.1 %       4Ki

· none   ░ under 1 %   ▒ under 10 %   ▓ under 50 %   █ 50 % and more";
        assert_eq!(lines(&rows, 8), expected);
    }

    #[test]
    fn one_snapshot_is_a_grid_with_offsets() {
        let text = grid(&row("monday", false, &[(1 << 26, 1 << 26)]), 8);
        let mut lines = text.lines();
        let first = "allocated in monday: 6.2 % of 1Gi; one cell is 8Mi";
        assert_eq!(lines.next(), Some(first));
        assert_eq!(lines.nth(1), Some("         0  ········"));
        assert_eq!(lines.next(), Some("      64Mi  ████████"));
        assert_eq!(text.lines().count(), 2 + LINES + 2);
    }

    #[test]
    fn each_row_but_the_first_shows_changes() {
        let ids = ["a", "b", "c"].map(str::to_owned);
        let kinds =
            |allocated| in_rows(&ids, allocated).iter().map(|one| one.0).collect::<Vec<_>>();
        assert_eq!(kinds(false), [Kind::Allocated, Kind::Changed, Kind::Changed]);
        assert_eq!(kinds(true), [Kind::Allocated; 3]);
    }
}
