//! A month of hourly snapshots of a volume with random writes: the growth of CreateSnapshot and of
//! the number of extents.

use std::collections::VecDeque;
use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::Result;
use csi_loopback::proto::csi::v1 as csi;

use crate::calls::Capability;
use crate::harness::{Driver, Layout};
use crate::kernel::{self, Random};
use crate::report::{Report, Row};
use crate::stats::{Samples, bytes, grouped, time};
use crate::{Options, writer};

/// Number of kept snapshots: one day.
const KEPT: usize = 24;

/// On blocks of 4 KiB, CreateSnapshot takes seconds, so that the rounds end after this time.
const ENOUGH_SMALL: Duration = Duration::from_secs(300);

/// Blocks of 4 KiB written between two snapshots.
const WRITTEN: usize = 500;

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let size: u64 = options.pick(2 << 30, 64 << 20);
    let large = month(options, size, 64 << 10, Duration::MAX)?;
    let small = month(options, size, 4096, ENOUGH_SMALL)?;
    let (tenth, last) = (large.around(10), large.around(large.times.len()));
    let ratio = last.median() / tenth.median();
    let what = format!(
        "CreateSnapshot {} of a {} volume with {} random 4 KiB writes between two",
        large.times.len(),
        bytes(size),
        grouped(WRITTEN as i64)
    );
    let row = Row::samples("month", what, &last, "seconds", time);
    let row = row.against(
        format!(
            "snapshot 10: {}; {}; on blocks of 4 KiB snapshot 10: {}, snapshot {}: {}; {}",
            tenth.times(),
            large.extents(),
            small.around(10).times(),
            small.times.len(),
            small.around(small.times.len()).times(),
            small.extents()
        ),
        ratio,
    );
    report.row(row.must("at most 3 times snapshot 10", ratio <= 3.0));
    Ok(())
}

struct Month {
    times: Vec<Duration>,
    /// Extents of the volume after the tenth and the last round.
    extents: [u32; 2],
}

impl Month {
    /// The five rounds around a round; the first round is 1.
    fn around(&self, round: usize) -> Samples {
        let end = self.times.len().min(round + 2);
        self.times[end.saturating_sub(5)..end].iter().copied().collect()
    }

    fn extents(&self) -> String {
        let [tenth, last] = self.extents.map(|extents| grouped(extents.into()));
        format!("{tenth} and {last} extents")
    }
}

fn month(options: Options, size: u64, block_size: u64, longest: Duration) -> Result<Month> {
    let rounds = options.pick(720, 12);
    let driver =
        Driver::start_on(Layout { bytes: 8 * size + (1 << 30), block_size, is_allocated: true })?;
    let volume = driver.volume("month", size, Capability::Block)?;
    let device = driver.publish(&volume, Capability::Block)?;
    let file = File::open(driver.pool.volume(&volume))?;
    writer::fill(&device, size)?;
    let mut month = Month { times: Vec::new(), extents: [0; 2] };
    let mut kept = VecDeque::new();
    let begun = Instant::now();
    for round in 0..rounds {
        if begun.elapsed() > longest {
            println!("    blocks of {}: ended after {round} rounds", bytes(block_size));
            break;
        }
        let blocks = Random(round).distinct(options.pick(WRITTEN, 100), size / 4096);
        writer::change(&device, &blocks, round)?;
        let begun = Instant::now();
        kept.push_back(driver.snapshot(&format!("hour-{round}"), &volume)?);
        month.times.push(begun.elapsed());
        month.extents[usize::from(round >= 10)] = kernel::extents(&file)?;
        if kept.len() > KEPT
            && let Some(snapshot_id) = kept.pop_front()
        {
            driver.call(csi::DeleteSnapshotRequest { snapshot_id, ..Default::default() })?;
        }
    }
    Ok(month)
}
