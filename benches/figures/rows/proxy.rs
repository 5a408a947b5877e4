//! The cost of calls through the node proxy, alternating with the same calls directly to the
//! driver: a call that the proxy forwards, a call that it inspects, and a long metadata stream. No
//! pod opts in, so the proxy does not need the API server, which is unreachable.

use std::fs;
use std::os::unix::net::UnixStream as Socket;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use csi_loopback::proto::csi::v1 as csi;
use support::process::Process;
use support::requests::{Rpc, create, stats};

use crate::calls::ext4;
use crate::harness::{BINARY, Driver, connect, text};
use crate::kernel::{self, CpuClock};
use crate::records::{self, Pattern};
use crate::report::{Report, Row};
use crate::stats::{Samples, bytes, grouped, millions, time};
use crate::{Options, raw};

const PER_MESSAGE: [i32; 2] = [256, 4096];

/// The address of an unreachable API server.
const KUBECONFIG: &str = r#"{
    "apiVersion": "v1", "kind": "Config", "current-context": "away",
    "clusters": [{"name": "away", "cluster": {"server": "https://127.0.0.1:1"}}],
    "contexts": [{"name": "away", "context": {"cluster": "away", "user": "none"}}],
    "users": [{"name": "none", "user": {}}]
}"#;

/// A node proxy for a driver.
struct Proxy {
    process: Process,
    socket: PathBuf,
}

impl Proxy {
    fn start(driver: &Driver) -> Result<Self> {
        let directory = driver.pool.directory();
        let (socket, kubeconfig) = (directory.join("proxy.sock"), directory.join("kubeconfig"));
        fs::write(&kubeconfig, KUBECONFIG)?;
        let mut command = Command::new(BINARY);
        command
            .args(["--mode", "node-proxy", "--node-name", "bench"])
            .args(["--endpoint", text(&socket), "--driver-endpoint", text(&driver.socket())])
            .args(["--kubeconfig", text(&kubeconfig)])
            .args(["--state-dir", text(&directory.join("proxy"))])
            .env_remove("CSI_ENDPOINT");
        let mut process = Process::spawn("proxy", command, directory);
        process.wait_for("the node proxy is ready", |_| Socket::connect(&socket).ok());
        Ok(Self { process, socket })
    }

    fn pid(&self) -> u32 {
        self.process.pid().as_raw() as u32
    }
}

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let extents: u64 = options.pick(5_000_000, 100_000);
    let (driver, base, target) = records::driver_with_delta(extents)?;
    let volume = driver.create(create("small", 1 << 30, ext4()))?;
    let path = driver.publish_as(&volume, ext4())?;
    let proxy = Proxy::start(&driver)?;
    thread::sleep(Duration::from_millis(options.pick(2000, 200)));
    let idle = kernel::memory(proxy.pid(), "status", "VmRSS")?;
    kernel::reset_peak(proxy.pid())?;
    let rounds = options.pick(3000, 30);
    let forwarded = csi::NodeGetCapabilitiesRequest {};
    unary(report, &driver, &proxy, rounds, "forwarded (NodeGetCapabilities)", &forwarded)?;
    let inspected = stats(&volume, text(&path));
    unary(report, &driver, &proxy, rounds, "inspected (NodeGetVolumeStats)", &inspected)?;
    for max in PER_MESSAGE {
        stream(options, report, &driver, &proxy, (&base, &target, extents, max))?;
    }
    let peak = kernel::memory(proxy.pid(), "status", "VmHWM")?;
    let row = Row::value("proxy", "memory of the node proxy, idle", bytes(idle));
    report.row(row.against(format!("peak in all of these rows: {}", bytes(peak)), None));
    Ok(())
}

/// Alternates the call on both paths, first with a new connection per call, as kubelet does, and
/// then with one connection per path.
fn unary<R: Rpc + Clone>(
    report: &mut Report,
    driver: &Driver,
    proxy: &Proxy,
    rounds: usize,
    what: &str,
    request: &R,
) -> Result<()> {
    for (over, kept) in [("a new connection per call", false), ("one connection", true)] {
        let sockets = [driver.socket(), proxy.socket.clone()];
        let channels = sockets.clone().map(|socket| connect(&driver.runtime, socket));
        let mut times = [Vec::new(), Vec::new()];
        let call = |path: usize| -> Result<Duration> {
            let begun = Instant::now();
            let channel = match kept {
                true => channels[path].clone(),
                false => connect(&driver.runtime, sockets[path].clone()),
            };
            driver.runtime.block_on(request.clone().send(channel))?;
            Ok(begun.elapsed())
        };
        // First calls are slower.
        for path in [0, 1, 0, 1] {
            call(path)?;
        }
        let clock = CpuClock::of(proxy.pid())?;
        for _ in 0..rounds {
            for (path, times) in times.iter_mut().enumerate() {
                times.push(call(path)?);
            }
        }
        let cpu = clock.spent().as_secs_f64() / rounds as f64;
        let [direct, through] = times.map(|times| times.into_iter().collect::<Samples>());
        let p99 = |times: &Samples| time(times.percentile(99));
        let row = Row::samples(
            "proxy",
            format!("through the node proxy, {what}, {over}"),
            &through,
            "seconds",
            time,
        );
        let more = through.median() - direct.median();
        let peer = format!(
            "directly to the driver: {}, p99 {}; difference {}",
            time(direct.median()),
            p99(&direct),
            time(more)
        );
        let mut row = row.against(peer, None);
        row.measured += &format!(", p99 {}", p99(&through));
        row.cpu_seconds = Some(cpu);
        report.row(row);
    }
    Ok(())
}

/// Alternates the same long stream on both paths.
fn stream(
    options: Options,
    report: &mut Report,
    driver: &Driver,
    proxy: &Proxy,
    (base, target, extents, max): (&str, &str, u64, i32),
) -> Result<()> {
    let delta = |socket: &Path| driver.runtime.block_on(raw::get_delta(socket, base, target, max));
    let sockets = [driver.socket(), proxy.socket.clone()];
    for socket in &sockets {
        let messages = delta(socket)?.check(Pattern::new(extents).bytes(), max as usize)?;
        ensure!(messages > 0, "a stream without a message");
    }
    let rounds = options.pick(11, 1);
    let clock = CpuClock::of(proxy.pid())?;
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for (socket, times) in sockets.iter().zip(&mut times) {
            times.push(delta(socket)?.whole.as_secs_f64());
        }
    }
    let cpu = clock.spent().as_secs_f64() / rounds as f64;
    let [direct, through] = times;
    // Per round, because other load on the machine disturbs both paths of a round equally.
    let shares = direct.iter().zip(&through).map(|(direct, through)| direct / through);
    let share = shares.collect::<Samples>().median();
    let rates = |times: Vec<f64>| -> Samples {
        times.into_iter().map(|seconds| extents as f64 / seconds).collect()
    };
    let what = format!(
        "through the node proxy, {} extents, {} per message, frames undecoded",
        grouped(extents as i64),
        grouped(max.into())
    );
    let row = Row::samples("proxy", what, &rates(through), "extents per second", millions);
    let peer = format!("directly to the driver: {}", millions(rates(direct).median()));
    let mut row = row.against(peer, share);
    row.cpu_seconds = Some(cpu);
    report.row(row);
    Ok(())
}
