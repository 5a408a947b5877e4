//! CreateSnapshot after random writes, and the reported changes: on pool blocks of 4 KiB; on blocks
//! of 64 KiB, where the driver compares contents to track changes of 4 KiB; and without this
//! comparison.

use std::time::{Duration, Instant};

use anyhow::Result;
use csi_loopback::proto::csi::v1 as csi;
use support::random::Random;
use support::requests::{block, create, delete_snapshot, map};

use crate::harness::{Driver, Layout};
use crate::report::{Report, Row};
use crate::stats::{bytes, grouped, time};
use crate::subject::BLOCK_SIZES;
use crate::{Options, writer};

/// Parts of the volume that are written before a snapshot: one of N blocks of 4 KiB, and its name.
const PARTS: [(u64, &str); 3] = [(1000, "0.1 %"), (100, "1 %"), (10, "10 %")];

/// After each part, the duration of CreateSnapshot and the changed bytes.
type Life = Vec<(Duration, u64)>;

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let size = options.pick(10 << 30, 64 << 20);
    let small = life(options, size, BLOCK_SIZES[0], "exact")?;
    let exact = life(options, size, BLOCK_SIZES[1], "exact")?;
    let coarse = life(options, size, BLOCK_SIZES[1], "block")?;
    for (number, (part, share)) in PARTS.iter().enumerate() {
        let blocks = grouped((size / 4096 / part) as i64);
        let what = format!(
            "CreateSnapshot after random 4 KiB writes to {share} of {} ({blocks} blocks)",
            bytes(size)
        );
        let row = Row::value("changes", what, describe(small[number])).against(
            format!(
                "on blocks of 64 KiB: {}; there with changePrecision block: {}",
                describe(exact[number]),
                describe(coarse[number])
            ),
            None,
        );
        report.row(match *part {
            100 => row.must("at most 3 s", small[number].0 <= Duration::from_secs(3)),
            _ => row,
        });
    }
    report.note(
        "changes: measured is a pool with the default block size. The bytes that changePrecision \
         block reports are also the space that the previous snapshot keeps allocated",
    );
    Ok(())
}

fn describe((took, changed): (Duration, u64)) -> String {
    format!("{}, {} changed", time(took.as_secs_f64()), bytes(changed))
}

fn life(options: Options, size: u64, block_size: u64, precision: &str) -> Result<Life> {
    println!("    -- blocks of {}, changePrecision {precision}", bytes(block_size));
    let driver = Driver::start_on(Layout {
        bytes: 2 * size + options.pick(2 << 30, 1 << 30),
        block_size,
        is_allocated: false,
    })?;
    let volume = driver.create(csi::CreateVolumeRequest {
        parameters: map(&[("changePrecision", precision)]),
        ..create("changes", size, block())
    })?;
    let device = driver.publish(&volume)?;
    writer::fill(&device, size)?;
    let mut before = driver.snapshot("base", &volume)?;
    let mut life = Life::new();
    for (part, share) in PARTS {
        let blocks = Random::new(part).distinct((size / 4096 / part) as usize, size / 4096);
        writer::change(&device, &blocks, part)?;
        let begun = Instant::now();
        let snapshot = driver.snapshot(share, &volume)?;
        let took = begun.elapsed();
        let delta = driver.get_metadata(Some(&before), &snapshot)?;
        let changed = delta.blocks().len() as u64 * 4096;
        life.push((took, changed));
        println!("    {share}: {}", describe((took, changed)));
        driver.call(delete_snapshot(&before))?;
        before = snapshot;
    }
    Ok(life)
}
