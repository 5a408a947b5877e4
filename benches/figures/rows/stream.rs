//! A stream of 10 million extents, to a client that reads frames and to a client that decodes
//! messages, compared with a plain copy of the same bytes.

use anyhow::{Result, ensure};

use crate::harness::Cost;
use crate::records::{self, Pattern};
use crate::report::{Report, Row};
use crate::stats::{Samples, bytes, grouped, millions};
use crate::{Options, calls, peers, raw};

/// Requested extents per message; 0 is the driver's default.
const PER_MESSAGE: [i32; 3] = [0, 256, 4096];

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let extents: u64 = options.pick(10_000_000, 200_000);
    let runs = options.pick(7, 2);
    let (driver, base, target) = records::driver_with_delta(extents)?;
    let socket = driver.socket();
    report.note(
        "stream, memory: the product's record writer has replaced the change record of a real snapshot of a \
         sparse volume, because writing this number of extents to a disk takes too long",
    );
    for max in PER_MESSAGE {
        let mut copies = Vec::new();
        let mut volume = 0;
        let cost = driver.measure(1, runs, |_| {
            let received = driver.runtime.block_on(raw::get_delta(&socket, &base, &target, max))?;
            received.check(Pattern::new(extents).bytes(), max as usize)?;
            let joined = received.joined();
            volume = joined.len() as u64;
            copies.push(peers::through_a_socket(&joined)?);
            Ok(received.whole)
        })?;
        let copies: Samples = copies.into_iter().collect();
        let share = copies.median() / cost.times.median();
        let row = rate(extents, max, "frames undecoded", &cost).against(
            format!(
                "plain socket copy of the same {}: {}",
                bytes(volume),
                millions(extents as f64 / copies.median())
            ),
            share,
        );
        let fast = extents as f64 / cost.times.median() >= 20e6;
        report.row(if max == 0 { row.must("20 M extents/s", fast) } else { row });
    }
    for max in PER_MESSAGE {
        let cost = driver.measure(1, options.pick(5, 1), |_| {
            let call = calls::get_metadata(driver.channel()?, Some(&base), &target, max);
            let delta = driver.runtime.block_on(call)?;
            ensure!(delta.extents.len() as u64 == extents, "extents are missing");
            Ok(delta.whole)
        })?;
        report.row(rate(extents, max, "client decodes (tonic, prost)", &cost));
    }
    Ok(())
}

/// A row of extents per second.
fn rate(extents: u64, max: i32, how: &str, cost: &Cost) -> Row {
    let messages = match max {
        0 => "default messages".to_owned(),
        max => format!("{} per message", grouped(max.into())),
    };
    let what = format!("stream of {} extents, {messages}, {how}", grouped(extents as i64));
    let rates: Samples = cost.times.iter().map(|seconds| extents as f64 / seconds).collect();
    Row::samples("stream", what, &rates, "extents per second", millions).spent(cost.cpu, cost.peak)
}
