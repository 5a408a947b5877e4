//! What a call costs that goes through the node proxy, beside the same call straight to the driver, in turn: one that the proxy passes on
//! unseen, one that it looks at, and a long metadata stream. No pod opts in, and the API server is away: nobody asks it.

use std::fs;
use std::os::unix::net::UnixStream as Socket;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use csi_loopback::proto::csi::v1 as csi;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::calls::{Capability, Rpc};
use crate::harness::{BINARY, Driver, PATIENCE, connect, text};
use crate::kernel::{self, CpuClock};
use crate::records::{self, Pattern};
use crate::report::{Report, Row};
use crate::stats::{Samples, bytes, grouped, millions, time};
use crate::{Options, raw};

const PER_MESSAGE: [i32; 2] = [256, 4096];

/// Nobody serves there.
const KUBECONFIG: &str = r#"{
    "apiVersion": "v1", "kind": "Config", "current-context": "away",
    "clusters": [{"name": "away", "cluster": {"server": "https://127.0.0.1:1"}}],
    "contexts": [{"name": "away", "context": {"cluster": "away", "user": "nobody"}}],
    "users": [{"name": "nobody", "user": {}}]
}"#;

/// The proxy before a driver; it ends when this is dropped.
struct Proxy {
    child: Child,
    socket: PathBuf,
}

impl Proxy {
    fn start(driver: &Driver) -> Result<Self> {
        let directory = driver.pool.directory();
        let (socket, kubeconfig) = (directory.join("proxy.sock"), directory.join("kubeconfig"));
        fs::write(&kubeconfig, KUBECONFIG)?;
        let log = fs::File::create(directory.join("proxy.log"))?;
        let child = Command::new(BINARY)
            .args(["--mode", "node-proxy", "--node-name", "bench"])
            .args(["--endpoint", text(&socket), "--driver-endpoint", text(&driver.socket())])
            .args(["--kubeconfig", text(&kubeconfig)])
            .args(["--state-dir", text(&directory.join("proxy"))])
            .env_remove("CSI_ENDPOINT")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        let mut proxy = Self { child, socket };
        let until = Instant::now() + PATIENCE;
        while Socket::connect(&proxy.socket).is_err() {
            if proxy.child.try_wait()?.is_some() || Instant::now() > until {
                bail!("the proxy does not serve");
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(proxy)
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.pid() as i32), Signal::SIGTERM);
        if let Err(error) = self.child.wait() {
            eprintln!("stopping the proxy: {error}");
        }
    }
}

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let extents: u64 = options.pick(5_000_000, 100_000);
    let (driver, base, target) = records::driver_with_delta(extents)?;
    let volume = driver.volume("small", 1 << 30, Capability::Ext4)?;
    let path = driver.publish(&volume, Capability::Ext4)?;
    let proxy = Proxy::start(&driver)?;
    thread::sleep(Duration::from_millis(options.pick(2000, 200)));
    let idle = kernel::memory(proxy.pid(), "status", "VmRSS")?;
    kernel::reset_peak(proxy.pid())?;
    let rounds = options.pick(3000, 30);
    let passed_on = csi::NodeGetCapabilitiesRequest {};
    unary(report, &driver, &proxy, rounds, "passed on (NodeGetCapabilities)", &passed_on)?;
    let looked_at = csi::NodeGetVolumeStatsRequest {
        volume_id: volume,
        volume_path: text(&path).to_owned(),
        ..Default::default()
    };
    unary(report, &driver, &proxy, rounds, "looked at (NodeGetVolumeStats)", &looked_at)?;
    for max in PER_MESSAGE {
        stream(options, report, &driver, &proxy, (&base, &target, extents, max))?;
    }
    let peak = kernel::memory(proxy.pid(), "status", "VmHWM")?;
    let row = Row::said("proxy", "memory of the node proxy, idle", bytes(idle));
    report.row(row.against(format!("the most in all of these rows: {}", bytes(peak)), None));
    Ok(())
}

/// A call by each way in turn, each over a connection of its own as kubelet makes one, and then all over one that is there.
fn unary<R: Rpc + Clone>(
    report: &mut Report,
    driver: &Driver,
    proxy: &Proxy,
    rounds: usize,
    what: &str,
    request: &R,
) -> Result<()> {
    for (over, kept) in [("a connection each, as kubelet", false), ("one connection", true)] {
        let ways = [driver.socket(), proxy.socket.clone()];
        let channels = ways.clone().map(|way| connect(&driver.runtime, way));
        let mut times = [Vec::new(), Vec::new()];
        let call = |way: usize| -> Result<Duration> {
            let begun = Instant::now();
            let channel = match kept {
                true => channels[way].clone(),
                false => connect(&driver.runtime, ways[way].clone()),
            };
            driver.runtime.block_on(request.clone().send(channel))?;
            Ok(begun.elapsed())
        };
        // What is slow the first time is not measured.
        for way in [0, 1, 0, 1] {
            call(way)?;
        }
        let clock = CpuClock::of(proxy.pid())?;
        let before = clock.now();
        for _ in 0..rounds {
            for (way, times) in times.iter_mut().enumerate() {
                times.push(call(way)?);
            }
        }
        let cpu = (clock.now() - before).as_secs_f64() / rounds as f64;
        let [straight, through] = times.map(|times| times.into_iter().collect::<Samples>());
        let p99 = |of: &Samples| time(of.percentile(99));
        let row = Row::samples(
            "proxy",
            format!("through the node proxy, a call that is {what}, {over}"),
            &through,
            "seconds",
            time,
        );
        let more = through.median() - straight.median();
        let peer = format!(
            "straight to the driver: {}, p99 {}; so {} more",
            time(straight.median()),
            p99(&straight),
            time(more)
        );
        let mut row = row.against(peer, None);
        row.measured += &format!(", p99 {}", p99(&through));
        row.cpu_seconds = Some(cpu);
        report.row(row);
    }
    Ok(())
}

/// The same long answer by each way in turn.
fn stream(
    options: Options,
    report: &mut Report,
    driver: &Driver,
    proxy: &Proxy,
    (base, target, extents, max): (&str, &str, u64, i32),
) -> Result<()> {
    let take = |socket: &Path| driver.runtime.block_on(raw::take(socket, base, target, max));
    let ways = [driver.socket(), proxy.socket.clone()];
    for way in &ways {
        let messages = take(way)?.check(Pattern::new(extents).bytes(), max as usize)?;
        ensure!(messages > 0, "an answer without a message");
    }
    let rounds = options.pick(11, 1);
    let clock = CpuClock::of(proxy.pid())?;
    let before = clock.now();
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for (way, times) in ways.iter().zip(&mut times) {
            times.push(take(way)?.whole.as_secs_f64());
        }
    }
    let cpu = (clock.now() - before).as_secs_f64() / rounds as f64;
    let [straight, through] = times;
    // Of each round, in which whoever else uses the machine disturbs both ways alike.
    let shares = straight.iter().zip(&through).map(|(straight, through)| straight / through);
    let share = shares.collect::<Samples>().median();
    let rates = |times: Vec<f64>| -> Samples {
        times.into_iter().map(|seconds| extents as f64 / seconds).collect()
    };
    let what = format!(
        "through the node proxy, {} extents, {} a message, frames undecoded",
        grouped(extents as i64),
        grouped(max.into())
    );
    let row = Row::samples("proxy", what, &rates(through), "extents per second", millions);
    let peer = format!("straight to the driver: {}", millions(rates(straight).median()));
    let mut row = row.against(peer, share);
    row.cpu_seconds = Some(cpu);
    report.row(row);
    Ok(())
}
