//! Metrics of the process, with the names of Prometheus' client libraries, and the version of the
//! program, for the page of each role.

use std::fmt;
use std::fs;

use nix::unistd::{SysconfVar, sysconf};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

/// The metrics, for the start of a scrape.
///
/// # Errors
/// They cannot be encoded.
pub fn scrape() -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Process));
    let mut metrics = String::new();
    text::encode_registry(&mut metrics, &registry)?;
    Ok(metrics)
}

/// Read at each scrape.
#[derive(Debug)]
struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (name, help) = ("csi_loopback_build_info", "Version of the program");
        let mut build = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        ConstGauge::new(1_i64).encode(build.encode_family(&version)?)?;
        let status = Status::read();
        let gauges = [
            ("process_resident_memory_bytes", "Resident memory of the process", status.resident()),
            ("process_virtual_memory_bytes", "Virtual memory of the process", status.field(23)),
            ("process_open_fds", "Open files of the process", open_files()),
            (
                "process_start_time_seconds",
                "Start of the process in seconds since 1970",
                status.start(),
            ),
        ];
        // A value that the system does not have is missing.
        for (name, help, value) in gauges {
            if let Some(value) = value {
                let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
                ConstGauge::new(value).encode(metric)?;
            }
        }
        if let Some(seconds) = status.processor_time() {
            let (name, help) = ("process_cpu_seconds", "Processor time of the process");
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(seconds).encode(metric)?;
        }
        Ok(())
    }
}

/// The fields of proc_pid_stat(5) after the program's name.
struct Status(Vec<f64>);

impl Status {
    fn read() -> Self {
        let text = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        // The name, in parentheses, may contain spaces; a letter for the state follows.
        let fields = text.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().skip(1));
        Self(fields.into_iter().flatten().map(|field| field.parse().unwrap_or(0.0)).collect())
    }

    /// The field with this number in the manual page, which is above 3.
    fn field(&self, number: usize) -> Option<f64> {
        self.0.get(number - 4).copied()
    }

    fn processor_time(&self) -> Option<f64> {
        Some((self.field(14)? + self.field(15)?) / limit(SysconfVar::CLK_TCK)?)
    }

    fn resident(&self) -> Option<f64> {
        Some(self.field(24)? * limit(SysconfVar::PAGE_SIZE)?)
    }

    fn start(&self) -> Option<f64> {
        let text = fs::read_to_string("/proc/stat").ok()?;
        let boot = text.lines().find_map(|line| line.strip_prefix("btime "))?;
        Some(boot.trim().parse::<f64>().ok()? + self.field(22)? / limit(SysconfVar::CLK_TCK)?)
    }
}

fn open_files() -> Option<f64> {
    Some(fs::read_dir("/proc/self/fd").ok()?.count() as f64)
}

fn limit(variable: SysconfVar) -> Option<f64> {
    sysconf(variable).ok().flatten().map(|value| value as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metrics_of_the_process_have_plausible_values() {
        let text = scrape().unwrap();
        assert!(text.contains("csi_loopback_build_info{version=\"") && !text.contains("# EOF"));
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
            line.unwrap_or_else(|| panic!("{name}: {text}")).parse::<f64>().unwrap()
        };
        assert!(value("process_resident_memory_bytes") > 1e6);
        assert!(value("process_open_fds") >= 3.0 && value("process_cpu_seconds_total") >= 0.0);
        let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        let age = now - value("process_start_time_seconds");
        assert!((-2.0..1e6).contains(&age), "{age}");
    }
}
