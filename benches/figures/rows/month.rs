//! A month of hourly snapshots of a volume with random writes: the growth of CreateSnapshot and of
//! the number of extents.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use support::random::Random;
use support::requests::delete_snapshot;

use crate::harness::{Driver, Layout};
use crate::kernel;
use crate::report::{Report, Row};
use crate::stats::{Samples, bytes, grouped, time};
use crate::subject::BLOCK_SIZES;
use crate::{Options, writer};

/// Number of kept snapshots: one day.
const KEPT: usize = 24;

/// On blocks of 4 KiB, CreateSnapshot takes seconds, so that the rounds end after this time.
const ENOUGH_SMALL: Duration = Duration::from_secs(300);

/// Blocks of 4 KiB written between two snapshots.
const WRITTEN: usize = 500;

/// The driver clones no snapshots with fewer extents.
const CLONED_EXTENTS: u32 = 128;

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let size: u64 = options.pick(2 << 30, 64 << 20);
    let small = month(options, size, BLOCK_SIZES[0], ENOUGH_SMALL)?;
    let large = month(options, size, BLOCK_SIZES[1], Duration::MAX)?;
    let (tenth, last) = (small.around(10), small.around(small.times.len()));
    let ratio = last.median() / tenth.median();
    let what = format!(
        "CreateSnapshot {} of a {} volume with {} random 4 KiB writes between two",
        small.times.len(),
        bytes(size),
        grouped(WRITTEN as i64)
    );
    let row = Row::samples("month", what, &last, "seconds", time);
    let row = row.against(
        format!(
            "snapshot 10: {}; {}; on blocks of 64 KiB snapshot 10: {}, snapshot {}: {}; {}",
            tenth.times(),
            small.extents(),
            large.around(10).times(),
            large.times.len(),
            large.around(large.times.len()).times(),
            large.extents()
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

/// Waits until the driver has cloned a snapshot of a full volume for the next one, for which an hour
/// is enough.
fn wait_for_clone(snapshot: &Path) -> Result<()> {
    if kernel::extents(&File::open(snapshot)?)? < CLONED_EXTENTS {
        return Ok(());
    }
    let mut clone = snapshot.to_owned();
    clone.as_mut_os_string().push(".next");
    let begun = Instant::now();
    while !clone.metadata().is_ok_and(|clone| clone.blocks() * 512 >= clone.len()) {
        ensure!(begun.elapsed() < Duration::from_secs(600), "no clone of {}", snapshot.display());
        sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn month(options: Options, size: u64, block_size: u64, longest: Duration) -> Result<Month> {
    let rounds = options.pick(720, 12);
    let driver =
        Driver::start_on(Layout { bytes: 8 * size + (1 << 30), block_size, is_allocated: true })?;
    let volume = driver.volume("month", size)?;
    let device = driver.publish(&volume)?;
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
        let blocks = Random::new(round).distinct(options.pick(WRITTEN, 100), size / 4096);
        writer::change(&device, &blocks, round)?;
        let begun = Instant::now();
        let snapshot_id = driver.snapshot(&format!("hour-{round}"), &volume)?;
        month.times.push(begun.elapsed());
        let newest = driver.pool.snapshot(&snapshot_id);
        kept.push_back(snapshot_id);
        month.extents[usize::from(round >= 10)] = kernel::extents(&file)?;
        if kept.len() > KEPT
            && let Some(snapshot_id) = kept.pop_front()
        {
            driver.call(delete_snapshot(&snapshot_id))?;
        }
        // Meanwhile XFS frees the deleted one.
        wait_for_clone(&newest)?;
    }
    Ok(month)
}
