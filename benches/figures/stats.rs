//! Samples, and the format of numbers.

use std::time::Duration;

use serde::Serialize;

/// Measurements of one quantity, ascending.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(transparent)]
pub struct Samples(Vec<f64>);

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        Self(values)
    }
}

impl FromIterator<Duration> for Samples {
    fn from_iter<I: IntoIterator<Item = Duration>>(values: I) -> Self {
        values.into_iter().map(|duration| duration.as_secs_f64()).collect()
    }
}

impl Samples {
    /// The median; 0 without samples.
    pub fn median(&self) -> f64 {
        let (half, odd) = (self.0.len() / 2, self.0.len() % 2 == 1);
        match self.0.len() {
            0 => 0.0,
            _ if odd => self.0[half],
            _ => (self.0[half - 1] + self.0[half]) / 2.0,
        }
    }

    pub fn min(&self) -> f64 {
        self.0.first().copied().unwrap_or_default()
    }

    pub fn max(&self) -> f64 {
        self.0.last().copied().unwrap_or_default()
    }

    /// The percentile, nearest rank.
    pub fn percentile(&self, percent: usize) -> f64 {
        let at = (self.0.len() * percent).div_ceil(100).saturating_sub(1);
        self.0.get(at).copied().unwrap_or_default()
    }

    pub fn iter(&self) -> impl Iterator<Item = f64> {
        self.0.iter().copied()
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Half of the interquartile range: the spread of runs without outliers.
    pub fn spread(&self) -> f64 {
        let last = self.0.len().saturating_sub(1);
        match self.0.len() {
            0 => 0.0,
            _ => (self.0[last - last / 4] - self.0[last / 4]) / 2.0,
        }
    }

    /// "median (min … max, N runs)", with numbers formatted by `write`.
    pub fn text(&self, write: impl Fn(f64) -> String) -> String {
        let (median, min, max) = (write(self.median()), write(self.min()), write(self.max()));
        match self.0.len() {
            1 => format!("{median} (1 run)"),
            runs => format!("{median} ({min} … {max}, {runs} runs)"),
        }
    }

    /// Durations, as text.
    pub fn times(&self) -> String {
        self.text(time)
    }
}

/// Three digits and a unit.
pub fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{} s", digits(s)),
        s if s >= 1e-3 => format!("{} ms", digits(s * 1e3)),
        s => format!("{} µs", digits(s * 1e6)),
    }
}

pub fn bytes(bytes: u64) -> String {
    const UNITS: [(u64, &str); 4] =
        [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match UNITS.iter().find(|(size, _)| bytes >= *size) {
        Some((size, unit)) => format!("{} {unit}", digits(bytes as f64 / *size as f64)),
        None => format!("{bytes} B"),
    }
}

/// A rate in millions per second.
pub fn millions(rate: f64) -> String {
    format!("{} M/s", digits(rate / 1e6))
}

/// Three significant digits without trailing zeros.
pub fn digits(number: f64) -> String {
    let text = match number.abs() {
        n if n >= 99.95 => return grouped(number.round() as i64),
        n if n >= 9.995 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    };
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// With commas as thousands separators.
pub fn grouped(number: i64) -> String {
    let plain = number.unsigned_abs().to_string();
    let mut text = String::new();
    for (at, digit) in plain.chars().enumerate() {
        if at > 0 && (plain.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if number < 0 { format!("-{text}") } else { text }
}
