//! CreateSnapshot after random writes, and what it reports as changed: on blocks of 64 KiB, where contents are compared to know
//! changes to 4 KiB, the same without the comparison, and on blocks of 4 KiB.

use std::time::{Duration, Instant};

use anyhow::Result;
use csi_loopback::proto::csi::v1 as csi;

use crate::calls::Capability;
use crate::harness::{Driver, Layout};
use crate::kernel::Random;
use crate::report::{Report, Row};
use crate::stats::{bytes, grouped, time};
use crate::{Options, writer};

/// Parts of the volume that are written before a snapshot: one in so many of its blocks of 4 KiB.
const PARTS: [(u64, &str); 3] = [(1000, "0.1 %"), (100, "1 %"), (10, "10 %")];

/// What a snapshot took after each part, and the bytes that it reports as changed.
type Life = Vec<(Duration, u64)>;

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let size = options.pick(10 << 30, 64 << 20);
    let exact = life(options, size, 64 << 10, "exact")?;
    let coarse = life(options, size, 64 << 10, "block")?;
    let small = life(options, size, 4096, "exact")?;
    for (number, (part, share)) in PARTS.iter().enumerate() {
        let blocks = grouped((size / 4096 / part) as i64);
        let what = format!(
            "CreateSnapshot after random 4 KiB writes to {share} of {} ({blocks} blocks)",
            bytes(size)
        );
        report.row(Row::said("changes", what, tell(exact[number])).against(
            format!(
                "changePrecision block: {}; on blocks of 4 KiB: {}",
                tell(coarse[number]),
                tell(small[number])
            ),
            None,
        ));
    }
    report.note(
        "changes: measured is a pool with blocks of 64 KiB and changes known to 4 KiB. What is reported with changePrecision \
         block is what the snapshot before pins",
    );
    Ok(())
}

fn tell((took, changed): (Duration, u64)) -> String {
    format!("{}, {} changed", time(took.as_secs_f64()), bytes(changed))
}

fn life(options: Options, size: u64, block_size: u64, precision: &str) -> Result<Life> {
    println!("    -- blocks of {}, changePrecision {precision}", bytes(block_size));
    let driver = Driver::start_on(Layout {
        bytes: 2 * size + options.pick(2 << 30, 1 << 30),
        block_size,
        is_allocated: false,
    })?;
    let parameters = [("changePrecision", precision)];
    let volume = driver.volume_with("changes", size, Capability::Block, &parameters)?;
    let device = driver.publish(&volume, Capability::Block)?;
    writer::fill(&device, size)?;
    let mut before = driver.snapshot("base", &volume)?;
    let mut life = Life::new();
    for (part, share) in PARTS {
        let blocks = Random(part).distinct((size / 4096 / part) as usize, size / 4096);
        writer::change(&device, &blocks, part)?;
        let begun = Instant::now();
        let snapshot = driver.snapshot(share, &volume)?;
        let took = begun.elapsed();
        let changed = driver.ask(Some(&before), &snapshot)?.blocks().len() as u64 * 4096;
        life.push((took, changed));
        println!("    {share}: {}", tell((took, changed)));
        driver.call(csi::DeleteSnapshotRequest { snapshot_id: before, ..Default::default() })?;
        before = snapshot;
    }
    Ok(life)
}
