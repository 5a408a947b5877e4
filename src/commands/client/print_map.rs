//! `snapshot allocated` and `snapshot delta`: extents printed as they arrive, so that ten million
//! take no more memory than ten, and totals at the end.
//!
//! A broken stream prints no totals: the table ends after its rows, the JSON document remains open,
//! and NDJSON has no last line with totals. No reader can take them for complete.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;
use tokio::sync::mpsc;

use super::block_map::{BlockMap, Consumer, Query, Shape, Source};
use super::map::cells::Cells;
use super::{Output, format, progress};
use storage::Extent;
use telemetry::task;

/// Rows of a table without `--limit-rows`.
const DEFAULT_ROWS: u64 = 20;

/// Messages to buffer while others are printed.
const MESSAGES: usize = 4;

/// Cells of the strip below a table.
const STRIP: usize = 64;

impl Consumer for Printer {
    type Output = ();

    async fn consume<S: Source>(self, mut map: BlockMap<S>) -> Result<()> {
        let (sender, receiver) = mpsc::channel(MESSAGES);
        // On its own thread: a reader that does not read must not delay the handling of time limits
        // and signals.
        let printing =
            task::blocking(move || print(self, receiver, io::BufWriter::new(io::stdout().lock())));
        let sent = send(&mut map, sender).await;
        printing.await.context("printing panicked")??;
        sent
    }
}

/// A part of a listing on its way to the printer.
enum Part {
    Extents {
        shape: Shape,
        extents: Vec<Extent>,
        at: Instant,
    },
    /// Explicit, because a channel that closes means a broken listing.
    End {
        shape: Option<Shape>,
        at: Instant,
    },
}

/// Sends the listing to the printer. A printer that has ended reports its own error.
async fn send<S: Source>(map: &mut BlockMap<S>, sender: mpsc::Sender<Part>) -> Result<()> {
    loop {
        let extents = map.next().await?;
        let at = Instant::now();
        let part = match (extents, map.shape()) {
            (Some(extents), Some(shape)) => Part::Extents { shape, extents, at },
            (_, shape) => Part::End { shape, at },
        };
        let last = matches!(part, Part::End { .. });
        if sender.send(part).await.is_err() || last {
            return Ok(());
        }
    }
}

/// Prints the parts.
fn print(
    mut printer: Printer,
    mut parts: mpsc::Receiver<Part>,
    mut out: impl Write,
) -> io::Result<()> {
    let start = printer.start;
    let mut begun = None;
    while let Some(part) = parts.blocking_recv() {
        match part {
            Part::Extents { shape, extents, at } => {
                if begun.is_none() {
                    begun = Some((shape, at - start));
                    printer.begin(&mut out, shape)?;
                }
                if let (Some(last), Some(capacity)) = (extents.last(), shape.capacity_bytes) {
                    progress::report(last.end(), capacity);
                }
                // The output may go to the terminal that shows the progress.
                progress::suspend(|| {
                    extents.into_iter().try_for_each(|extent| printer.row(&mut out, extent))
                })?;
            }
            Part::End { shape, at } => {
                // Of a listing without messages.
                let empty = shape.filter(|_| begun.is_none());
                if let Some(shape) = empty {
                    begun = Some((shape, at - start));
                    printer.begin(&mut out, shape)?;
                }
                if let Some((shape, first)) = begun {
                    let times = Times { first, whole: start.elapsed() };
                    progress::suspend(|| {
                        printer.totals(&mut out, shape, times)?;
                        out.flush()
                    })?;
                }
                break;
            }
        }
    }
    progress::suspend(|| out.flush())
}

/// Response times of the driver.
#[derive(Debug, Clone, Copy)]
struct Times {
    /// To the first message.
    first: Duration,
    /// To the end, printing included.
    whole: Duration,
}

/// Prints a listing.
pub struct Printer {
    start: Instant,
    output: Output,
    /// The kind of the extents: `allocated` or `changed`.
    kind: &'static str,
    /// The snapshots, as JSON members.
    subject: String,
    /// Maximum number of rows to print.
    limit: u64,
    /// Width of an offset in characters.
    width: usize,
    extents: u64,
    bytes: u64,
    /// Counts for the strip, if the capacity is known.
    cells: Option<Cells>,
}

impl Printer {
    /// `namespace` is set if the snapshots are named by VolumeSnapshots. `limit_rows`: extents to
    /// print, 0 for all.
    pub fn new(
        output: Output,
        query: &Query,
        namespace: Option<&str>,
        limit_rows: Option<u64>,
    ) -> Self {
        let default = if output == Output::Table { DEFAULT_ROWS } else { 0 };
        let limit = match limit_rows.unwrap_or(default) {
            0 => u64::MAX,
            limit => limit,
        };
        let (kind, snapshots) = match query {
            Query::Allocated { snapshot } => ("allocated", vec![("snapshot", snapshot)]),
            Query::Delta { base, target } => {
                ("changed", vec![("base_snapshot", base), ("target_snapshot", target)])
            }
        };
        let id = if namespace.is_some() { "" } else { "_id" };
        let snapshots =
            snapshots.iter().map(|(role, which)| format!("\"{role}{id}\":{}", json!(which)));
        let namespace =
            namespace.iter().map(|namespace| format!("\"namespace\":{}", json!(namespace)));
        let subject = namespace.chain(snapshots).collect::<Vec<_>>().join(",");
        let (start, width, extents, bytes, cells) = (Instant::now(), 0, 0, 0, None);
        Self { start, output, kind, subject, limit, width, extents, bytes, cells }
    }

    /// Writes what precedes the first extent.
    fn begin(&mut self, out: &mut impl Write, shape: Shape) -> io::Result<()> {
        match self.output {
            Output::Table => {
                self.cells = shape.capacity_bytes.map(Cells::new);
                let last = shape.capacity_bytes.unwrap_or(u64::MAX);
                self.width = last.to_string().len().max("OFFSET".len());
                writeln!(out, "{:>1$}  {2:>1$}", "OFFSET", self.width, "LENGTH")
            }
            Output::Json => write!(out, "{{{},\"extents\":[", self.subject),
            Output::Ndjson => Ok(()),
        }
    }

    fn row(&mut self, out: &mut impl Write, extent: Extent) -> io::Result<()> {
        let Extent { offset, length } = extent;
        let first = self.extents == 0;
        let shown = self.extents < self.limit;
        self.extents += 1;
        self.bytes += length;
        if let Some(cells) = &mut self.cells {
            cells.add(extent);
        }
        if !shown {
            return Ok(());
        }
        match self.output {
            Output::Table => writeln!(out, "{offset:>0$}  {length:>0$}", self.width),
            Output::Json => {
                let comma = if first { "" } else { "," };
                write!(out, "{comma}\n{{\"offset\":{offset},\"length\":{length}}}")
            }
            Output::Ndjson => writeln!(out, "{{\"offset\":{offset},\"length\":{length}}}"),
        }
    }

    /// Writes the totals of a complete listing.
    fn totals(&self, out: &mut impl Write, shape: Shape, times: Times) -> io::Result<()> {
        match self.output {
            Output::Table => self.facts(out, shape, times),
            Output::Json => writeln!(out, "],\n{}}}", self.members(shape, times)),
            Output::Ndjson => writeln!(out, "{{{},{}}}", self.subject, self.members(shape, times)),
        }
    }

    fn left_out(&self) -> u64 {
        self.extents.saturating_sub(self.limit)
    }

    fn facts(&self, out: &mut impl Write, shape: Shape, times: Times) -> io::Result<()> {
        if self.left_out() > 0 {
            let count = format::grouped(self.left_out());
            writeln!(out, "… and {count} more (--limit-rows 0 prints all)")?;
        }
        let bytes = format::bytes(self.bytes);
        let (capacity, listed) = match shape.capacity_bytes {
            Some(all) => {
                let share = format::percent(self.bytes, all);
                (format::bytes(all), format!("{bytes}, {share}"))
            }
            None => ("unknown".to_owned(), bytes),
        };
        let (first, whole) = (format::took(times.first), format::took(times.whole));
        let mut facts = vec![
            ("capacity", capacity),
            (self.kind, listed),
            ("extents", format::grouped(self.extents)),
            ("type", shape.block_metadata_type.as_str_name().to_owned()),
            ("answered", format!("first message after {first}, all after {whole}")),
        ];
        facts.extend(self.cells.as_ref().map(|cells| ("map", format!("[{}]", cells.strip(STRIP)))));
        writeln!(out, "\n{}", format::facts(&facts))
    }

    /// The totals as members of a JSON object.
    fn members(&self, shape: Shape, times: Times) -> String {
        let Shape { block_metadata_type, capacity_bytes } = shape;
        format!(
            "\"extents_left_out\":{},\"extent_count\":{},\"{}_bytes\":{},\
             \"volume_capacity_bytes\":{},\"block_metadata_type\":\"{}\",\
             \"first_message_seconds\":{:.6},\"seconds\":{:.6}",
            self.left_out(),
            self.extents,
            self.kind,
            self.bytes,
            json!(capacity_bytes),
            block_metadata_type.as_str_name(),
            times.first.as_secs_f64(),
            times.whole.as_secs_f64()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpc::proto::csi::v1::BlockMetadataType;

    const SHAPE: Shape = Shape {
        block_metadata_type: BlockMetadataType::VariableLength,
        capacity_bytes: Some(1 << 30),
    };
    const TIMES: Times =
        Times { first: Duration::from_micros(900), whole: Duration::from_micros(1500) };

    fn delta() -> Query {
        Query::Delta { base: "a".to_owned(), target: "b\"".to_owned() }
    }

    #[test]
    fn only_an_explicit_end_is_followed_by_totals() {
        let printed = |output, is_explicit| {
            let (sender, receiver) = mpsc::channel(2);
            let start = Instant::now();
            let extents = vec![Extent { offset: 0, length: 4096 }];
            sender.try_send(Part::Extents { shape: SHAPE, extents, at: start }).ok().unwrap();
            if is_explicit {
                sender.try_send(Part::End { shape: Some(SHAPE), at: start }).ok().unwrap();
            }
            drop(sender);
            let mut out = Vec::new();
            print(Printer::new(output, &delta(), None, None), receiver, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        for is_explicit in [false, true] {
            let json = printed(Output::Json, is_explicit);
            assert!(!json.is_empty());
            assert_eq!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), is_explicit);
            let table = printed(Output::Table, is_explicit);
            assert_eq!(table.contains("capacity"), is_explicit, "{table}");
            let lines = printed(Output::Ndjson, is_explicit);
            assert_eq!(lines.contains("extent_count"), is_explicit, "{lines}");
        }
    }

    /// `count` extents of 4096 bytes printed.
    fn printed(output: Output, limit_rows: Option<u64>, count: u64) -> String {
        let mut report = Printer::new(output, &delta(), None, limit_rows);
        let mut out = Vec::new();
        report.begin(&mut out, SHAPE).unwrap();
        for index in 0..count {
            report.row(&mut out, Extent { offset: index * 8192, length: 4096 }).unwrap();
        }
        report.totals(&mut out, SHAPE, TIMES).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_table_shows_rows_and_totals() {
        let expected = "\x20   OFFSET      LENGTH
         0        4096
      8192        4096

capacity  1Gi (1,073,741,824 bytes)
changed   8Ki (8,192 bytes), under 0.1 %
extents   2
type      VARIABLE_LENGTH
answered  first message after 900 µs, all after 1.5 ms
map       [░·······························································]
";
        assert_eq!(printed(Output::Table, None, 2), expected);
    }

    #[test]
    fn a_table_reports_how_many_rows_it_left_out() {
        let shown = printed(Output::Table, None, 1023);
        assert!(shown.contains("\n… and 1,003 more (--limit-rows 0 prints all)\n"), "{shown}");
        assert!(shown.contains("extents   1,023\n"), "{shown}");
        assert_eq!(printed(Output::Table, Some(0), 1023).lines().count(), 1 + 1023 + 7);
    }

    #[test]
    fn json_is_one_document_with_every_extent() {
        for count in [0, 1, 30] {
            let value: serde_json::Value =
                serde_json::from_str(&printed(Output::Json, None, count)).unwrap();
            assert_eq!(value["extents"].as_array().unwrap().len() as u64, count);
            assert_eq!(value["extent_count"], count);
            assert_eq!(value["changed_bytes"], count * 4096);
            assert_eq!(value["target_snapshot_id"], "b\"");
            assert_eq!(value["first_message_seconds"], 0.0009);
        }
    }

    #[test]
    fn ndjson_has_an_extent_per_line_and_totals_last() {
        let text = printed(Output::Ndjson, None, 3);
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((lines.len(), &lines[1]["offset"]), (4, &8192.into()));
        assert_eq!(lines[3]["extent_count"], 3);
        assert_eq!(lines[3]["base_snapshot_id"], "a");
    }

    #[test]
    fn an_unknown_capacity_is_reported_as_unknown() {
        let shape = Shape { capacity_bytes: None, ..SHAPE };
        let whole = |output| {
            let mut report = Printer::new(output, &delta(), None, None);
            let mut out = Vec::new();
            report.begin(&mut out, shape).unwrap();
            report.row(&mut out, Extent { offset: u64::MAX - 4096, length: 4096 }).unwrap();
            report.totals(&mut out, shape, TIMES).unwrap();
            String::from_utf8(out).unwrap()
        };
        let table = whole(Output::Table);
        assert!(table.contains("capacity  unknown\nchanged   4Ki (4,096 bytes)\n"), "{table}");
        let json: serde_json::Value = serde_json::from_str(&whole(Output::Json)).unwrap();
        assert_eq!(json["volume_capacity_bytes"], serde_json::Value::Null);
    }

    #[test]
    fn json_distinguishes_names_from_ids() {
        let subject = |namespace| Printer::new(Output::Json, &delta(), namespace, None).subject;
        assert_eq!(subject(None), r#""base_snapshot_id":"a","target_snapshot_id":"b\"""#);
        let named = r#""namespace":"n","base_snapshot":"a","target_snapshot":"b\"""#;
        assert_eq!(subject(Some("n")), named);
    }
}
