//! The result table, as Markdown and JSON.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::Result;
use serde::Serialize;

use crate::harness::Cost;
use crate::stats::{Samples, bytes, digits, time};

/// A line of the table.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The argument that selects the row.
    pub name: &'static str,
    pub what: String,
    pub measured: String,
    /// The values of `measured`, in `unit`.
    pub samples: Samples,
    pub unit: &'static str,
    /// Processor time of the driver, or the sidecar in its rows, per run in seconds.
    pub cpu_seconds: Option<f64>,
    /// Peak memory of the same process in bytes.
    pub peak_bytes: Option<u64>,
    /// The peer and its result.
    pub peer: Option<String>,
    /// How many times better than the peer; for fio, the fraction of the peer.
    pub ratio: Option<f64>,
    pub target: Option<&'static str>,
    /// None if it could not be measured.
    pub reached: Option<bool>,
}

impl Row {
    /// A row of times, with the driver's resource use.
    pub fn times(name: &'static str, what: impl Into<String>, cost: &Cost) -> Self {
        let mut row = Self::samples(name, what, &cost.times, "seconds", time);
        (row.cpu_seconds, row.peak_bytes) = (Some(cost.cpu), Some(cost.peak));
        row
    }

    pub fn samples(
        name: &'static str,
        what: impl Into<String>,
        samples: &Samples,
        unit: &'static str,
        write: impl Fn(f64) -> String,
    ) -> Self {
        Self {
            measured: samples.text(write),
            samples: samples.clone(),
            unit,
            ..Self::value(name, what, "")
        }
    }

    /// A row with a single value instead of samples.
    pub fn value(name: &'static str, what: impl Into<String>, measured: impl Into<String>) -> Self {
        Self {
            name,
            what: what.into(),
            measured: measured.into(),
            samples: Samples::default(),
            unit: "",
            cpu_seconds: None,
            peak_bytes: None,
            peer: None,
            ratio: None,
            target: None,
            reached: None,
        }
    }

    pub fn spent(mut self, cpu_seconds: f64, peak_bytes: u64) -> Self {
        self.cpu_seconds = Some(cpu_seconds);
        self.peak(peak_bytes)
    }

    pub fn peak(mut self, bytes: u64) -> Self {
        self.peak_bytes = Some(bytes);
        self
    }

    pub fn against(mut self, peer: impl Into<String>, ratio: impl Into<Option<f64>>) -> Self {
        self.peer = Some(peer.into());
        self.ratio = ratio.into();
        self
    }

    pub fn must(mut self, target: &'static str, reached: impl Into<Option<bool>>) -> Self {
        self.target = Some(target);
        self.reached = reached.into();
        self
    }

    fn cells(&self) -> [String; 8] {
        let ratio = |ratio: f64| match ratio {
            near if near < 2.0 => format!("{near:.3}"),
            far => format!("{}×", digits(far)),
        };
        let dash = || "–".to_owned();
        let reached = match (self.target, self.reached) {
            (None, _) => dash(),
            (_, Some(true)) => "yes".to_owned(),
            (_, Some(false)) => "no".to_owned(),
            (_, None) => "not measured".to_owned(),
        };
        [
            self.what.clone(),
            self.measured.clone(),
            self.cpu_seconds.map_or_else(dash, time),
            self.peak_bytes.map_or_else(dash, bytes),
            self.peer.clone().unwrap_or_else(dash),
            self.ratio.map_or_else(dash, ratio),
            self.target.map_or_else(dash, str::to_owned),
            reached,
        ]
    }
}

const HEADS: [&str; 8] = [
    "what",
    "measured: median (min … max, runs)",
    "CPU",
    "peak memory",
    "peer, same run",
    "ratio",
    "target",
    "reached",
];

/// The points of a line in a chart.
#[derive(Debug, Clone, Serialize)]
pub struct Series {
    /// The chart; its lines have the same axes.
    pub chart: &'static str,
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

#[derive(Debug, Default, Serialize)]
pub struct Report {
    pub machine: String,
    /// Tiny sizes, for a smoke test; the figures are not meaningful.
    pub quick: bool,
    pub rows: Vec<Row>,
    pub series: Vec<Series>,
    pub notes: Vec<String>,
}

impl Report {
    pub fn row(&mut self, row: Row) {
        let [what, measured, cpu, _, peer, ratio, _, reached] = row.cells();
        println!(
            "  {what}: {measured}; CPU {cpu}; peer: {peer}; ratio {ratio}; reached: {reached}"
        );
        self.rows.push(row);
    }

    pub fn note(&mut self, note: impl Into<String>) {
        let note = note.into();
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    pub fn line(&mut self, chart: &'static str, name: impl Into<String>, points: Vec<(f64, f64)>) {
        self.series.push(Series { chart, name: name.into(), points });
    }

    /// The table as Markdown.
    pub fn table(&self) -> String {
        let rows: Vec<[String; 8]> = self.rows.iter().map(Row::cells).collect();
        let mut widths = HEADS.map(|head| head.chars().count());
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut table = String::new();
        let mut line = |cells: &[String; 8]| {
            for (cell, width) in cells.iter().zip(widths) {
                let _ = write!(table, "| {cell}{} ", " ".repeat(width - cell.chars().count()));
            }
            table.push_str("|\n");
        };
        line(&HEADS.map(str::to_owned));
        line(&widths.map(|width| "-".repeat(width)));
        rows.iter().for_each(line);
        table.push('\n');
        if self.quick {
            table.push_str(
                "QUICK: tiny sizes, perhaps a debug build. These figures are not meaningful.\n\n",
            );
        }
        let _ = writeln!(table, "Measured on: {}.", self.machine);
        for note in &self.notes {
            let _ = writeln!(table, "- {note}");
        }
        table
    }

    /// Writes table.md and figures.json.
    pub fn write(&self, directory: &Path) -> Result<()> {
        fs::create_dir_all(directory)?;
        fs::write(directory.join("table.md"), self.table())?;
        fs::write(directory.join("figures.json"), serde_json::to_vec_pretty(self)?)?;
        Ok(())
    }
}

/// One line about the machine.
pub fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let after = |text: &str, key: &str| {
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default().to_owned();
        line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let memory = after(&read("/proc/meminfo"), "MemTotal");
    let memory = memory.trim_end_matches(" kB").parse::<u64>().unwrap_or_default() << 10;
    format!(
        "{cores} cores ({}), {} of memory, Linux {}, load {} at the start; csi-loopback {}",
        after(&read("/proc/cpuinfo"), "model name"),
        bytes(memory),
        read("/proc/sys/kernel/osrelease").trim(),
        read("/proc/loadavg").split(' ').next().unwrap_or_default(),
        env!("CARGO_PKG_VERSION"),
    )
}
