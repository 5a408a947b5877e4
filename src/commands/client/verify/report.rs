//! The result of `snapshot verify` as it is printed.

use std::time::Duration;

use serde::Serialize;

use super::Verified;
use crate::client::compare::Sample;
use crate::client::format;
use common::quantity;
use storage::BLOCK_SIZE;

/// The result as it is printed.
#[derive(Debug, Serialize)]
pub struct Report {
    #[serde(skip_serializing_if = "Option::is_none")]
    base_snapshot_id: Option<String>,
    target_snapshot_id: String,
    proven: bool,
    /// `None` for all bytes.
    sample_percent: Option<f64>,
    compared_bytes: u64,
    reported_blocks: u64,
    differing_blocks: u64,
    missed_blocks: u64,
    first_missed_offsets: Vec<u64>,
    block_bytes: u64,
    seconds: f64,
}

impl Report {
    pub fn new(verified: &Verified, sample: Sample, time: Duration) -> Self {
        let Verified { subject, comparison, cleaned: _ } = verified;
        Self {
            base_snapshot_id: subject.base.clone(),
            target_snapshot_id: subject.target.clone(),
            proven: comparison.proven(),
            sample_percent: sample.share.map(|share| f64::from(share) / 100.0),
            compared_bytes: comparison.bytes,
            reported_blocks: comparison.reported,
            differing_blocks: comparison.differing,
            missed_blocks: comparison.missed,
            first_missed_offsets: comparison.missed_at.clone(),
            block_bytes: BLOCK_SIZE,
            seconds: time.as_secs_f64(),
        }
    }

    pub fn text(&self) -> String {
        let blocks = |count: u64| {
            format!(
                "{} blocks of 4 KiB ({})",
                format::grouped(count),
                quantity::format(count * BLOCK_SIZE)
            )
        };
        let is_delta = self.base_snapshot_id.is_some();
        let (differing, verb) =
            if is_delta { ("differing", "differ") } else { ("nonzero", "hold data") };
        let precision = match self.reported_blocks {
            0 => "no blocks were reported".to_owned(),
            all => {
                let share = format::percent(self.differing_blocks, all);
                format!("{share} of the reported blocks {verb}")
            }
        };
        let result = match (self.proven, self.sample_percent, is_delta) {
            (false, _, true) => {
                format!("WRONG: {} differ outside the delta", blocks(self.missed_blocks))
            }
            (false, _, false) => {
                format!("WRONG: {} outside the listing hold data", blocks(self.missed_blocks))
            }
            (true, Some(percent), _) => {
                format!("no error found in the sample of {percent} %, which is no proof")
            }
            (true, None, true) => {
                "proven: the base plus the delta is the target, byte for byte".to_owned()
            }
            (true, None, false) => "proven: all bytes outside the listing are zero".to_owned(),
        };
        let mut text = format::facts(&[
            ("compared", format::bytes(self.compared_bytes)),
            ("reported", blocks(self.reported_blocks)),
            (differing, blocks(self.differing_blocks)),
            ("precision", precision),
            ("time", format::took(Duration::from_secs_f64(self.seconds.max(0.0)))),
            ("result", result),
        ]);
        if !self.proven {
            let offsets: Vec<_> = self.first_missed_offsets.iter().map(u64::to_string).collect();
            text.push_str(&format!("\n\nfirst missed blocks, at byte: {}", offsets.join(", ")));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::super::Subject;
    use super::*;
    use crate::client::compare::Comparison;

    fn report(comparison: Comparison, base: Option<&str>, share: Option<u16>) -> String {
        let subject = Subject { base: base.map(str::to_owned), target: "t".to_owned() };
        let verified = Verified { subject, comparison, cleaned: Ok(()) };
        Report::new(&verified, Sample { share, seed: 0 }, Duration::from_millis(1500)).text()
    }

    #[test]
    fn the_result_is_proven_only_if_nothing_was_missed() {
        let mut comparison =
            Comparison { bytes: 1 << 30, reported: 1000, differing: 998, ..Comparison::default() };
        let expected = "\
compared   1Gi (1,073,741,824 bytes)
reported   1,000 blocks of 4 KiB (3.9Mi)
differing  998 blocks of 4 KiB (3.89Mi)
precision  99.8 % of the reported blocks differ
time       1.500 s
result     proven: the base plus the delta is the target, byte for byte";
        assert_eq!(report(comparison.clone(), Some("b"), None), expected);
        let sampled = report(comparison.clone(), Some("b"), Some(500));
        assert!(!sampled.contains("proven") && sampled.contains("sample of 5 %"), "{sampled}");
        assert!(report(comparison.clone(), None, None).contains("proven: all bytes outside"));

        comparison.missed = 2;
        comparison.missed_at = vec![4096, 12288];
        for base in [Some("b"), None] {
            let text = report(comparison.clone(), base, None);
            assert!(!text.contains("proven") && text.ends_with("at byte: 4096, 12288"), "{text}");
        }
    }
}
