//! The cost of calls with many catalog rows of deleted snapshots, and of a delta across a long
//! chain of change records.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use csi_loopback::proto::csi::v1 as csi;
use redb::{Database, TableDefinition};
use serde_json::json;
use support::requests::delete_snapshot;

use crate::Options;
use crate::harness::{Cost, Driver};
use crate::kernel;
use crate::report::{Report, Row};
use crate::stats::{bytes, grouped, time};
use crate::writer;

/// Time limit of a start on the largest catalog.
const PATIENCE: Duration = Duration::from_secs(600);

/// Bytes of each volume.
const SIZE: u64 = 64 << 20;

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let volumes = options.pick(1000, 20);
    let of_each: &[usize] = options.pick(&[22, 220, 2200], &[5]);
    let chain = options.pick(720, 10);
    let mut bench = Bench::new(volumes, chain)?;
    bench.operations(report, 0)?;
    let mut filled = 0;
    for rows in of_each {
        bench.fill(filled..*rows)?;
        filled = *rows;
        bench.starts(report, volumes * rows)?;
        bench.operations(report, volumes * rows)?;
    }
    Ok(())
}

struct Bench {
    driver: Driver,
    volumes: Vec<String>,
    /// The first, deleted snapshot of a chain.
    base: String,
    /// The last snapshot of the chain.
    last: String,
    chain: usize,
    /// Number of used snapshot names.
    taken: usize,
}

impl Bench {
    fn new(volumes: usize, chain: usize) -> Result<Self> {
        let driver = Driver::start(64 << 30)?;
        let volumes = (0..volumes)
            .map(|number| driver.volume(&format!("v{number}"), SIZE))
            .collect::<Result<Vec<_>>>()?;
        let volume = volumes.first().context("no volume")?;
        let file = driver.pool.volume(volume);
        let mut snapshots = Vec::new();
        for number in 0..chain as u64 {
            writer::scatter(&file, &[number % (SIZE / 4096), number * 7 % (SIZE / 4096)])?;
            snapshots.push(driver.snapshot(&format!("chain-{number}"), volume)?);
        }
        let (base, last) = match snapshots.as_slice() {
            [base, .., last] => (base.clone(), last.clone()),
            _ => anyhow::bail!("a chain needs two snapshots"),
        };
        for snapshot_id in &snapshots[..chain - 1] {
            driver.call(delete_snapshot(snapshot_id))?;
        }
        Ok(Self { driver, volumes, base, last, chain, taken: 0 })
    }

    /// Adds rows of deleted snapshots to the catalog, in the key order of each table.
    fn fill(&mut self, rows: std::ops::Range<usize>) -> Result<()> {
        self.driver.stop()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let path = self.driver.pool.data_dir().join("catalog.redb");
        let catalog = Database::builder().set_cache_size(256 << 20).open(&path)?;
        let id = |row, volume| format!("snap-snapshot-{row:08}-{volume:08}-0123456789abcdef");
        let tx = catalog.begin_write()?;
        {
            let retained = TableDefinition::<&str, &[u8]>::new("retained_snapshots");
            let mut table = tx.open_table(retained)?;
            for row in rows.clone() {
                for (number, volume) in self.volumes.iter().enumerate() {
                    let id = id(row, number);
                    let json = json!({
                        "id": id, "name": format!("snapshot-{row:08}-{number:08}"), "volume_id": volume,
                        "phase": { "deleted": { "at": now } }, "capacity_bytes": SIZE,
                        "created_at": [now, 0], "sequence": 1_000_000 + row, "group_id": null,
                        "predecessor": { "none": "first" }, "record_generation": 0, "has_data": false,
                        "format": null, "crash_consistent": false, "baseline_until": null,
                    });
                    table.insert(id.as_str(), json.to_string().as_bytes())?;
                }
            }
        }
        {
            let by_volume = TableDefinition::<(&str, u64, &str), ()>::new("snapshots_by_volume");
            let mut by_volume = tx.open_table(by_volume)?;
            for (number, volume) in self.volumes.iter().enumerate() {
                for row in rows.clone() {
                    by_volume
                        .insert((volume.as_str(), 1_000_000 + row as u64, &*id(row, number)), ())?;
                }
            }
            let by_age = TableDefinition::<(u64, &str), ()>::new("snapshots_by_age");
            let mut by_age = tx.open_table(by_age)?;
            for row in rows {
                for number in 0..self.volumes.len() {
                    by_age.insert((now, &*id(row, number)), ())?;
                }
            }
        }
        tx.commit()?;
        drop(catalog);
        // The driver uses direct I/O and leaves no pages of the catalog in the page cache.
        kernel::uncache(&path)
    }

    fn starts(&mut self, report: &mut Report, rows: usize) -> Result<()> {
        for what in ["after a stop", "after a kill"] {
            if what == "after a kill" {
                self.driver.kill()?;
            } else {
                self.driver.stop()?;
            }
            let begun = Instant::now();
            self.driver.start_within(PATIENCE)?;
            let took = begun.elapsed().as_secs_f64();
            let peak = kernel::memory(self.driver.pid(), "status", "VmHWM")?;
            let size = self.driver.pool.data_dir().join("catalog.redb").metadata()?.len();
            let what = format!("start, {} retained rows, {what}", grouped(rows as i64));
            let measured =
                format!("{}, peak {}, catalog of {}", time(took), bytes(peak), bytes(size));
            report.row(Row::value("catalog", what, measured).peak(peak));
        }
        Ok(())
    }

    fn operations(&mut self, report: &mut Report, rows: usize) -> Result<()> {
        let with = format!("{} retained rows", grouped(rows as i64));
        let runs = 20;
        let volume = self.volumes.last().context("no volume")?.clone();
        let first = self.taken;
        self.taken += runs + 1;
        let create = self.timed(runs, |driver, run| {
            driver.snapshot(&format!("timed-{}", first + run), &volume).map(drop)
        })?;
        let list = self.timed(runs, |driver, _| {
            let request = csi::ListSnapshotsRequest {
                source_volume_id: volume.clone(),
                ..Default::default()
            };
            ensure!(!driver.call(request)?.entries.is_empty(), "the list has no snapshot");
            Ok(())
        })?;
        let volumes = self
            .timed(runs, |driver, _| driver.call(csi::ListVolumesRequest::default()).map(drop))?;
        let delta = self.timed(runs, |driver, _| {
            let delta = driver.get_metadata(Some(&self.base), &self.last)?;
            ensure!(!delta.extents.is_empty(), "the delta is empty");
            Ok(())
        })?;
        let page = self.volumes.len();
        for (what, cost) in [
            ("CreateSnapshot".to_owned(), create),
            ("ListSnapshots of a volume".to_owned(), list),
            (format!("ListVolumes, a page of {page} volumes"), volumes),
            (format!("delta across a chain of {}", self.chain), delta),
        ] {
            report.row(Row::times("catalog", format!("{what}, {with}"), &cost));
        }
        Ok(())
    }

    fn timed(
        &self,
        runs: usize,
        mut call: impl FnMut(&Driver, usize) -> Result<()>,
    ) -> Result<Cost> {
        self.driver.measure(1, runs, |run| {
            let begun = Instant::now();
            call(&self.driver, run)?;
            Ok(begun.elapsed())
        })
    }
}
