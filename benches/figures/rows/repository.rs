//! Repositories with many backups: 500 in a bucket whose answers take 50 ms, and a prune of 10,000
//! packs in a directory.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use sha2::{Digest, Sha256};

use super::backup::{command, spend};
use crate::harness::{Driver, PATIENCE, text};
use crate::report::{Report, Row};
use crate::stats::time;
use crate::{Options, writer};

const LATENCY: Duration = Duration::from_millis(50);
const BUCKET: &str = "s3://bucket/backups";

/// Backups that are made at the same time, to save time.
const WRITERS: usize = 4;

/// An S3 server that holds its buckets in memory.
struct Server {
    child: Child,
    address: SocketAddr,
}

impl Server {
    fn start() -> Result<Self> {
        let program = std::env::var("CSI_LOOPBACK_S3").context("needs an S3 server")?;
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let host = address.to_string();
        let child = Command::new(program)
            .args(["-quiet", "-backend", "memory", "-initialbucket", "bucket", "-host", &host])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("starting the S3 server")?;
        let server = Self { child, address };
        let begun = Instant::now();
        while TcpStream::connect(address).is_err() {
            ensure!(begun.elapsed() < PATIENCE, "the S3 server does not answer");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Forwards connections to the server. Answers arrive [`LATENCY`] later. Counts requests.
struct Distance {
    address: SocketAddr,
    requests: Arc<AtomicU64>,
}

impl Distance {
    fn to(server: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let requests = Arc::new(AtomicU64::new(0));
        let distance = Self { address: listener.local_addr()?, requests: requests.clone() };
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // A client sees the end of its connection if this fails.
                let _ = forward(client, server, &requests);
            }
        });
        Ok(distance)
    }
}

fn forward(client: TcpStream, server: SocketAddr, requests: &Arc<AtomicU64>) -> Result<()> {
    let upstream = TcpStream::connect(server)?;
    client.set_nodelay(true)?;
    upstream.set_nodelay(true)?;
    let (mut from, mut to, requests) =
        (client.try_clone()?, upstream.try_clone()?, requests.clone());
    thread::spawn(move || {
        const MARK: &[u8] = b" HTTP/1.1\r\n";
        // The end of the previous part: a mark may be in two parts.
        let mut seen = Vec::new();
        each_part(&mut from, |part| {
            seen.extend_from_slice(part);
            let count = seen.windows(MARK.len()).filter(|window| *window == MARK).count();
            requests.fetch_add(count as u64, Ordering::Relaxed);
            seen.drain(..seen.len().saturating_sub(MARK.len() - 1));
            to.write_all(part).is_ok()
        });
        let _ = to.shutdown(Shutdown::Write);
    });
    let (sender, parts) = channel::<(Instant, Vec<u8>)>();
    let (mut from, mut to) = (upstream, client);
    thread::spawn(move || {
        each_part(&mut from, |part| sender.send((Instant::now() + LATENCY, part.to_vec())).is_ok());
    });
    thread::spawn(move || {
        for (due, part) in parts {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&part).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
    Ok(())
}

/// Calls `each` for what arrives, until the end or until it returns false.
fn each_part(from: &mut TcpStream, mut each: impl FnMut(&[u8]) -> bool) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if !each(&buffer[..length]) {
            break;
        }
    }
}

/// A command on the repository, in the bucket at `server` or in a directory.
fn on(driver: &Driver, place: &Path, server: Option<SocketAddr>, arguments: &[&str]) -> Command {
    let mut command = command(driver, place, arguments);
    if let Some(server) = server {
        command
            .env("AWS_ENDPOINT_URL", format!("http://{server}"))
            .envs([("AWS_ALLOW_HTTP", "true"), ("AWS_REGION", "us-east-1")])
            .envs([("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "key")]);
    }
    command
}

/// Makes full backups of `count` snapshots.
fn fill(
    driver: &Driver,
    volume: &str,
    place: &Path,
    server: Option<SocketAddr>,
    name: &str,
    count: u64,
) -> Result<()> {
    let mut commands = Vec::new();
    for number in 0..count {
        let snapshot = format!("{name}-{number}");
        driver.snapshot(&snapshot, volume)?;
        commands.push(on(driver, place, server, &["backup", "create", &snapshot, "--full"]));
    }
    let run = |mut command: Command| {
        let output = command.output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{command:?}: {error}");
        Ok(())
    };
    // The first one makes the repository.
    run(commands.pop().context("no backups")?)?;
    let commands = Mutex::new(commands);
    let next = || commands.lock().ok()?.pop();
    thread::scope(|scope| {
        let writers = [(); WRITERS].map(|()| {
            scope.spawn(|| {
                while let Some(command) = next() {
                    run(command)?;
                }
                Ok(())
            })
        });
        writers.into_iter().try_for_each(|writer| {
            writer.join().unwrap_or_else(|_| Err(anyhow!("a writer panicked")))
        })
    })
}

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let driver = Driver::start(64 << 30)?;
    let volume = driver.volume("many", 1 << 20)?;
    writer::fill(&driver.pool.volume(&volume), 1 << 20)?;
    match Server::start() {
        Ok(server) => bucket(options, report, &driver, &volume, &server)?,
        Err(error) => {
            report.row(Row::value("repository", "backups in a bucket", format!("{error:#}")))
        }
    }
    directory(options, report, &driver, &volume)
}

fn bucket(
    options: Options,
    report: &mut Report,
    driver: &Driver,
    volume: &str,
    server: &Server,
) -> Result<()> {
    let count = options.pick(500, 10);
    let place = Path::new(BUCKET);
    fill(driver, volume, place, Some(server.address), "bucket", count)?;
    let distance = Distance::to(server.address)?;
    driver.snapshot("last", volume)?;
    let restored = driver.pool.directory().join("restored");
    let keep = (count / 2).to_string();
    let commands: [(&str, &[&str]); 5] = [
        ("incremental backup", &["backup", "create", "last"]),
        ("list", &["backup", "list"]),
        ("restore of a backup of 1 MiB", &["restore", "last", "--to", text(&restored)]),
        (
            "plan of a prune of half of them",
            &["backup", "prune", "--keep-last", &keep, "--dry-run"],
        ),
        ("prune of half of them", &["backup", "prune", "--keep-last", &keep]),
    ];
    for (what, arguments) in commands {
        let before = distance.requests.load(Ordering::Relaxed);
        let spent = spend(&mut on(driver, place, Some(distance.address), arguments))?;
        let requests = distance.requests.load(Ordering::Relaxed) - before;
        let what = format!(
            "{count} backups in a bucket with {} of latency: {what}",
            time(LATENCY.as_secs_f64())
        );
        let row =
            Row::value("repository", what, format!("{}, {requests} requests", spent.describe()));
        report.row(spent.cost(row));
    }
    Ok(())
}

fn directory(options: Options, report: &mut Report, driver: &Driver, volume: &str) -> Result<()> {
    let packs = options.pick(10_000, 20);
    let place = driver.pool.directory().join("repository");
    fill(driver, volume, &place, None, "directory", 1)?;
    multiply(&place.join("backups"), packs)?;
    fill(driver, volume, &place, None, "kept", 1)?;
    let spent = spend(&mut on(driver, &place, None, &["backup", "prune", "--keep-last", "1"]))?;
    let left = place.join("backups").read_dir()?.count();
    ensure!(left == 1, "{left} backups remain");
    let what = format!("prune of {packs} packs, as many backups, in a directory");
    let row = Row::value("repository", what, spent.describe());
    report.row(spent.cost(row));
    Ok(())
}

/// Copies the only backup until there are `count`: so many real ones would take hours. A prune reads
/// manifests, which get their own ids; pages and packs are equal.
fn multiply(backups: &Path, count: u64) -> Result<()> {
    let entry = backups.read_dir()?.next().context("no backup")??;
    let id = entry.file_name().into_string().map_err(|name| anyhow!("{name:?}"))?;
    let (time, _) = id.rsplit_once('-').context("the id of the backup")?;
    let manifest = fs::read_to_string(entry.path().join("manifest"))?;
    let text = manifest.split_once(",\"manifest\":").and_then(|(_, rest)| rest.strip_suffix("}\n"));
    let text = text.context("the manifest of the backup")?;
    for number in 1..count {
        let copy = format!("{time}-{number:016x}");
        let to = backups.join(&copy);
        for directory in ["intent", "pages", "packs"] {
            fs::create_dir_all(to.join(directory))?;
            for file in entry.path().join(directory).read_dir()? {
                let file = file?;
                fs::copy(file.path(), to.join(directory).join(file.file_name()))?;
            }
        }
        fs::write(to.join("complete"), [])?;
        let text = text.replace(&id, &copy);
        let hash: String = Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect();
        fs::write(to.join("manifest"), format!("{{\"hash\":\"{hash}\",\"manifest\":{text}}}\n"))?;
    }
    Ok(())
}
