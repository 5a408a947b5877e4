//! `snapshot allocated` and `snapshot delta`: extents printed as they come, so that an answer of
//! ten million takes no more memory than one of ten, and totals at the end.
//!
//! A stream that breaks prints no totals: the table stops after its rows and the JSON document stays
//! open, so that no reader takes either for whole.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;
use tokio::sync::mpsc;

use super::block_map::{BlockMap, Query, Shape, Source};
use super::{Output, format};
use crate::backend::Extent;

/// Rows of a table, unless `--limit-rows` says otherwise.
const DEFAULT_ROWS: u64 = 20;

/// Messages of an answer to hold while others are being printed.
const MESSAGES: usize = 4;

/// Asks and prints. `namespace`: of the snapshots, where they go by name. `limit_rows`: extents to print, 0
/// for all.
pub async fn run<S: Source>(
    query: Query,
    namespace: Option<&str>,
    output: Output,
    limit_rows: Option<u64>,
    open: impl AsyncFnOnce(Query) -> Result<BlockMap<S>>,
) -> Result<()> {
    let start = Instant::now();
    let report = Report::new(output, &query, namespace, limit_rows);
    let mut map = open(query).await?;
    let (sender, receiver) = mpsc::channel(MESSAGES);
    // On a thread of its own: whoever does not read what is printed keeps nobody from minding time and signals.
    let printing = tokio::task::spawn_blocking(move || {
        print(report, receiver, io::BufWriter::new(io::stdout().lock()), start)
    });
    let sent = send(&mut map, sender).await;
    printing.await.context("the printing panicked")??;
    sent
}

/// A part of an answer on its way to the printer.
enum Part {
    Extents {
        shape: Shape,
        extents: Vec<Extent>,
        at: Instant,
    },
    /// Said, not implied: a channel that just closes is an answer that broke.
    End,
}

/// Passes the answer on. A printer that is gone has an error of its own.
async fn send<S: Source>(map: &mut BlockMap<S>, sender: mpsc::Sender<Part>) -> Result<()> {
    loop {
        let extents = map.next().await?;
        let at = Instant::now();
        let part = match (extents, map.shape()) {
            (Some(extents), Some(shape)) => Part::Extents { shape, extents, at },
            _ => Part::End,
        };
        let last = matches!(part, Part::End);
        if sender.send(part).await.is_err() || last {
            return Ok(());
        }
    }
}

/// Prints what comes.
fn print(
    mut report: Report,
    mut parts: mpsc::Receiver<Part>,
    mut out: impl Write,
    start: Instant,
) -> io::Result<()> {
    let mut begun = None;
    while let Some(part) = parts.blocking_recv() {
        match part {
            Part::Extents { shape, extents, at } => {
                if begun.is_none() {
                    begun = Some((shape, at - start));
                    report.begin(&mut out, shape)?;
                }
                for extent in extents {
                    report.row(&mut out, extent)?;
                }
            }
            Part::End => {
                if let Some((shape, first)) = begun {
                    report.totals(&mut out, shape, Times { first, whole: start.elapsed() })?;
                }
                break;
            }
        }
    }
    out.flush()
}

/// How long the driver took.
#[derive(Debug, Clone, Copy)]
struct Times {
    /// To the first message.
    first: Duration,
    /// To the last one, printing included.
    whole: Duration,
}

/// An answer being written down.
struct Report {
    output: Output,
    /// What its bytes are: `allocated` or `changed`.
    what: &'static str,
    /// The snapshots asked about, as JSON members.
    subject: String,
    /// Rows to print, at most.
    limit: u64,
    /// Characters that an offset may take.
    width: usize,
    extents: u64,
    bytes: u64,
}

impl Report {
    fn new(
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
        let (what, snapshots) = match query {
            Query::Allocated { snapshot } => ("allocated", vec![("snapshot", snapshot)]),
            Query::Delta { base, target } => {
                ("changed", vec![("base_snapshot", base), ("target_snapshot", target)])
            }
        };
        let id = if namespace.is_some() { "" } else { "_id" };
        let snapshots =
            snapshots.iter().map(|(what, which)| format!("\"{what}{id}\":{}", json!(which)));
        let namespace =
            namespace.iter().map(|namespace| format!("\"namespace\":{}", json!(namespace)));
        let subject = namespace.chain(snapshots).collect::<Vec<_>>().join(",");
        Self { output, what, subject, limit, width: 0, extents: 0, bytes: 0 }
    }

    /// Writes what stands before the first extent.
    fn begin(&mut self, out: &mut impl Write, shape: Shape) -> io::Result<()> {
        match self.output {
            Output::Table => {
                let last = shape.capacity_bytes.unwrap_or(u64::MAX);
                self.width = last.to_string().len().max("OFFSET".len());
                writeln!(out, "{:>1$}  {2:>1$}", "OFFSET", self.width, "LENGTH")
            }
            Output::Json => write!(out, "{{{},\"extents\":[", self.subject),
        }
    }

    fn row(&mut self, out: &mut impl Write, extent: Extent) -> io::Result<()> {
        let Extent { offset, length } = extent;
        let first = self.extents == 0;
        let shown = self.extents < self.limit;
        self.extents += 1;
        self.bytes += length;
        if !shown {
            return Ok(());
        }
        match self.output {
            Output::Table => writeln!(out, "{offset:>0$}  {length:>0$}", self.width),
            Output::Json => {
                let comma = if first { "" } else { "," };
                write!(out, "{comma}\n{{\"offset\":{offset},\"length\":{length}}}")
            }
        }
    }

    /// Writes the totals of an answer that came whole.
    fn totals(&self, out: &mut impl Write, shape: Shape, times: Times) -> io::Result<()> {
        let Shape { block_metadata_type, capacity_bytes } = shape;
        let style = block_metadata_type.as_str_name();
        let left_out = self.extents.saturating_sub(self.limit);
        match self.output {
            Output::Table => {
                if left_out > 0 {
                    let count = format::grouped(left_out);
                    writeln!(out, "… and {count} more (--limit-rows 0 prints all)")?;
                }
                let bytes = format::bytes(self.bytes);
                let (capacity, listed) = match capacity_bytes {
                    Some(all) => {
                        let share = format::percent(self.bytes, all);
                        (format::bytes(all), format!("{bytes}, {share}"))
                    }
                    None => ("not told".to_owned(), bytes),
                };
                let (first, whole) = (format::took(times.first), format::took(times.whole));
                let facts = format::facts(&[
                    ("capacity", capacity),
                    (self.what, listed),
                    ("extents", format::grouped(self.extents)),
                    ("type", style.to_owned()),
                    ("answered", format!("first message after {first}, all after {whole}")),
                ]);
                writeln!(out, "\n{facts}")
            }
            Output::Json => writeln!(
                out,
                "],\n\"extents_left_out\":{left_out},\"extent_count\":{},\"{}_bytes\":{},\
                 \"volume_capacity_bytes\":{},\"block_metadata_type\":\"{style}\",\
                 \"first_message_seconds\":{:.6},\"seconds\":{:.6}}}",
                self.extents,
                self.what,
                self.bytes,
                json!(capacity_bytes),
                times.first.as_secs_f64(),
                times.whole.as_secs_f64()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::csi::v1::BlockMetadataType;

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
    fn only_an_end_that_was_said_is_followed_by_totals() {
        for said in [false, true] {
            let (sender, receiver) = mpsc::channel(2);
            let start = Instant::now();
            let extents = vec![Extent { offset: 0, length: 4096 }];
            sender.try_send(Part::Extents { shape: SHAPE, extents, at: start }).ok().unwrap();
            if said {
                sender.try_send(Part::End).ok().unwrap();
            }
            drop(sender);
            let mut out = Vec::new();
            let report = Report::new(Output::Json, &delta(), None, None);
            print(report, receiver, &mut out, start).unwrap();
            assert!(!out.is_empty());
            assert_eq!(serde_json::from_slice::<serde_json::Value>(&out).is_ok(), said);
        }
    }

    /// `count` extents of 4096 bytes printed; unless `whole`, the stream broke after them.
    fn printed(output: Output, limit_rows: Option<u64>, count: u64, whole: bool) -> String {
        let mut report = Report::new(output, &delta(), None, limit_rows);
        let mut out = Vec::new();
        report.begin(&mut out, SHAPE).unwrap();
        for index in 0..count {
            report.row(&mut out, Extent { offset: index * 8192, length: 4096 }).unwrap();
        }
        if whole {
            report.totals(&mut out, SHAPE, TIMES).unwrap();
        }
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
";
        assert_eq!(printed(Output::Table, None, 2, true), expected);
    }

    #[test]
    fn a_table_says_how_many_rows_it_left_out() {
        let shown = printed(Output::Table, None, 1023, true);
        assert!(shown.contains("\n… and 1,003 more (--limit-rows 0 prints all)\n"), "{shown}");
        assert!(shown.contains("extents   1,023\n"), "{shown}");
        assert_eq!(printed(Output::Table, Some(0), 1023, true).lines().count(), 1 + 1023 + 6);
    }

    #[test]
    fn json_is_one_document_with_every_extent() {
        for count in [0, 1, 30] {
            let value: serde_json::Value =
                serde_json::from_str(&printed(Output::Json, None, count, true)).unwrap();
            assert_eq!(value["extents"].as_array().unwrap().len() as u64, count);
            assert_eq!(value["extent_count"], count);
            assert_eq!(value["changed_bytes"], count * 4096);
            assert_eq!(value["target_snapshot_id"], "b\"");
            assert_eq!(value["first_message_seconds"], 0.0009);
        }
    }

    #[test]
    fn a_capacity_that_is_not_told_is_said_to_be_so() {
        let shape = Shape { capacity_bytes: None, ..SHAPE };
        let whole = |output| {
            let mut report = Report::new(output, &delta(), None, None);
            let mut out = Vec::new();
            report.begin(&mut out, shape).unwrap();
            report.row(&mut out, Extent { offset: u64::MAX - 4096, length: 4096 }).unwrap();
            report.totals(&mut out, shape, TIMES).unwrap();
            String::from_utf8(out).unwrap()
        };
        let table = whole(Output::Table);
        assert!(table.contains("capacity  not told\nchanged   4Ki (4,096 bytes)\n"), "{table}");
        let json: serde_json::Value = serde_json::from_str(&whole(Output::Json)).unwrap();
        assert_eq!(json["volume_capacity_bytes"], serde_json::Value::Null);
    }

    #[test]
    fn json_tells_names_from_ids() {
        let subject = |namespace| Report::new(Output::Json, &delta(), namespace, None).subject;
        assert_eq!(subject(None), r#""base_snapshot_id":"a","target_snapshot_id":"b\"""#);
        let named = r#""namespace":"n","base_snapshot":"a","target_snapshot":"b\"""#;
        assert_eq!(subject(Some("n")), named);
    }

    #[test]
    fn an_answer_cut_short_never_looks_complete() {
        let table = printed(Output::Table, None, 3, false);
        assert!(!table.contains("capacity") && !table.contains("extents"), "{table}");
        let json = printed(Output::Json, None, 3, false);
        assert!(serde_json::from_str::<serde_json::Value>(&json).is_err(), "{json}");
    }
}
