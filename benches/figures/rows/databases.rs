//! Applications on a filesystem in a volume, before and after a snapshot: SQLite (write-ahead log,
//! full synchronization) and files that are rewritten on ext4, PostgreSQL with pgbench on xfs.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use support::random::Random;
use tempfile::TempDir;

use crate::Options;
use crate::harness::{PATIENCE, run, text};
use crate::kernel;
use crate::report::{Report, Row};
use crate::stats::{bytes, digits, time};
use crate::subject::{BLOCK_SIZES, KINDS, Kind};

/// Opens an application with its files in a directory.
type Open = fn(&Path, Options) -> Result<Box<dyn Application>>;

/// The name of a load, its filesystem, and the unit of its operations.
const LOADS: [(&str, &str, &str, Open); 3] = [
    ("sqlite, one row a transaction", "ext4", "transactions/s", Sqlite::open),
    ("PostgreSQL, pgbench with 4 clients", "xfs", "transactions/s", Postgres::open),
    ("files of 8 MiB, rewritten and flushed", "ext4", "files/s", Files::open),
];

trait Application {
    fn run(&mut self, time: Duration) -> Result<Rate>;
}

#[derive(Clone, Copy)]
struct Rate {
    per_second: f64,
    /// The longest operation, in seconds.
    longest: Option<f64>,
}

impl Rate {
    fn text(self, unit: &str) -> String {
        let longest = self.longest.map(|longest| format!(", longest {}", time(longest)));
        format!("{} {unit}{}", digits(self.per_second), longest.unwrap_or_default())
    }

    /// Counts the runs of `operation` within `time`.
    fn of(duration: Duration, mut operation: impl FnMut() -> Result<()>) -> Result<Self> {
        let begun = Instant::now();
        let (mut count, mut longest) = (0, Duration::ZERO);
        while begun.elapsed() < duration {
            let begun = Instant::now();
            operation()?;
            longest = longest.max(begun.elapsed());
            count += 1;
        }
        let per_second = f64::from(count) / begun.elapsed().as_secs_f64();
        Ok(Self { per_second, longest: Some(longest.as_secs_f64()) })
    }
}

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let size = options.pick(2 << 30, 384 << 20);
    for (load, filesystem, unit, open) in LOADS {
        let mut lives = Vec::new();
        for kind in KINDS.into_iter().filter(|kind| !options.quick || *kind == KINDS[0]) {
            match live(options, kind, size, filesystem, open) {
                Ok(Some(life)) => lives.push((kind, life)),
                Ok(None) => {}
                Err(error) if kind == Kind::Pool(BLOCK_SIZES[0]) => {
                    report.note(format!("databases: {load}: not measured ({error:#})"));
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        let Some((_, [before, after])) = lives.first() else { continue };
        let what = format!("{load}, {filesystem} on {}: the minute after a snapshot", bytes(size));
        let peers = lives.iter().map(|(kind, [before, after])| {
            let after = match kind {
                Kind::Pool(size) if *size == BLOCK_SIZES[0] => String::new(),
                Kind::Plain => String::new(),
                _ => format!("; {}", after.text(unit)),
            };
            format!("{}: before {}{after}", kind.name(), before.text(unit))
        });
        let ratio = after.per_second / before.per_second;
        let row = Row::value("databases", what, after.text(unit));
        report.row(
            row.against(peers.collect::<Vec<_>>().join("; "), ratio)
                .must("0.8 of before", ratio >= 0.8),
        );
    }
    Ok(())
}

/// The rates before a snapshot and in the minute after it.
fn live(
    options: Options,
    kind: Kind,
    size: u64,
    filesystem: &str,
    open: Open,
) -> Result<Option<[Rate; 2]>> {
    let Some(subject) = kind.open(size, 4 * size + (1 << 30))? else { return Ok(None) };
    let mounted = Mounted::new(subject.device(), filesystem)?;
    let mut application = open(&mounted.path, options)?;
    let times = options.pick([20, 60], [1, 1]).map(Duration::from_secs);
    let before = application.run(times[0])?;
    println!("    before: {}", before.text("operations/s"));
    if !subject.has_snapshots() {
        return Ok(Some([before; 2]));
    }
    subject.snapshot("after")?;
    let after = application.run(times[1])?;
    println!("    after a snapshot: {}", after.text("operations/s"));
    Ok(Some([before, after]))
}

/// A new filesystem on a device.
struct Mounted {
    path: PathBuf,
    _directory: TempDir,
}

impl Mounted {
    fn new(device: &Path, filesystem: &str) -> Result<Self> {
        run(&format!("mkfs.{filesystem}"), &["-q", text(device)])?;
        let directory = TempDir::with_prefix("figures-")?;
        // PostgreSQL does not run as root.
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o711))?;
        let path = directory.path().join("volume");
        fs::create_dir(&path)?;
        run("mount", &[text(device), text(&path)])?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777))?;
        Ok(Self { path, _directory: directory })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = run("umount", &[text(&self.path)]) {
            eprintln!("{error:#}");
        }
    }
}

/// A table of random rows.
struct Sqlite {
    child: Child,
    statements: ChildStdin,
    results: BufReader<ChildStdout>,
    random: Random,
    rows: u64,
}

impl Sqlite {
    fn open(directory: &Path, options: Options) -> Result<Box<dyn Application>> {
        let mut child = Command::new("stdbuf")
            .args(["--output=L", "sqlite3", "-batch"])
            .arg(directory.join("database"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("running sqlite3")?;
        let statements = child.stdin.take().context("no stdin")?;
        let results = BufReader::new(child.stdout.take().context("no stdout")?);
        let rows = options.pick(2_000_000, 10_000);
        let mut sqlite = Self { child, statements, results, random: Random::new(1), rows };
        sqlite.execute(&format!(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; \
             CREATE TABLE t (id INTEGER PRIMARY KEY, value BLOB); \
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows}) \
             INSERT INTO t SELECT i, randomblob(200) FROM n; PRAGMA wal_checkpoint(TRUNCATE);"
        ))?;
        Ok(Box::new(sqlite))
    }

    fn execute(&mut self, statement: &str) -> Result<()> {
        writeln!(self.statements, "{statement} SELECT 'done';")?;
        let mut line = String::new();
        while line.trim_end() != "done" {
            line.clear();
            ensure!(self.results.read_line(&mut line)? > 0, "sqlite3 ended");
        }
        Ok(())
    }
}

impl Application for Sqlite {
    fn run(&mut self, time: Duration) -> Result<Rate> {
        Rate::of(time, || {
            let id = 1 + self.random.below(self.rows);
            self.execute(&format!("UPDATE t SET value = randomblob(200) WHERE id = {id};"))
        })
    }
}

impl Drop for Sqlite {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server with an abstract socket, run by the user postgres.
struct Postgres {
    server: Child,
    bin: PathBuf,
    host: String,
}

impl Postgres {
    fn open(directory: &Path, options: Options) -> Result<Box<dyn Application>> {
        let versions =
            fs::read_dir("/usr/lib/postgresql").context("PostgreSQL is not installed")?;
        let mut bins = versions.filter_map(|version| Some(version.ok()?.path().join("bin")));
        let bin = bins.find(|bin| bin.join("postgres").exists());
        let bin = bin.context("PostgreSQL is not installed")?;
        let data = directory.join("data");
        let [init, program] = ["initdb", "postgres"].map(|program| bin.join(program));
        let user = ["--reuid=postgres", "--regid=postgres", "--clear-groups"];
        let arguments = [text(&init), "--auth=trust", "--pgdata", text(&data)];
        run("setpriv", &[&user[..], &arguments].concat())?;
        let host = format!("@csi-loopback-bench-{}", std::process::id());
        let server = Command::new("setpriv")
            .args(user)
            .arg(&program)
            .args(["-D", text(&data), "-c", "listen_addresses=", "-c", "max_wal_size=256MB"])
            .args(["-c", &format!("unix_socket_directories={host}")])
            .stderr(File::create(directory.join("log"))?)
            .spawn()
            .context("starting postgres")?;
        let postgres = Self { server, bin, host };
        postgres.wait(&directory.join("log"))?;
        let scale = options.pick("40", "1");
        postgres.pgbench(&["--initialize", "--quiet", "--scale", scale])?;
        Ok(Box::new(postgres))
    }

    fn pgbench(&self, arguments: &[&str]) -> Result<String> {
        let connection = ["--host", &self.host, "--username", "postgres"];
        let arguments = [&connection[..], arguments, &["postgres"]].concat();
        run(text(&self.bin.join("pgbench")), &arguments)
    }

    fn wait(&self, log: &Path) -> Result<()> {
        let begun = Instant::now();
        let connection = ["--host", &self.host, "--quiet"];
        while run(text(&self.bin.join("pg_isready")), &connection).is_err() {
            if begun.elapsed() > PATIENCE {
                bail!("postgres did not start: {}", fs::read_to_string(log).unwrap_or_default());
            }
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}

impl Application for Postgres {
    fn run(&mut self, time: Duration) -> Result<Rate> {
        let seconds = time.as_secs().to_string();
        let options = ["--client=4", "--protocol=prepared", "--no-vacuum", "--time", &seconds];
        let output = self.pgbench(&options)?;
        let rate = output.lines().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next());
        let rate = rate.with_context(|| format!("pgbench printed no rate: {output}"))?;
        Ok(Rate { per_second: rate.parse()?, longest: None })
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // A fast shutdown: the filesystem can be unmounted afterwards.
        let _ = run("kill", &["-INT", &self.server.id().to_string()]);
        let _ = self.server.wait();
    }
}

/// Files that are written in turn.
struct Files {
    directory: PathBuf,
    number: usize,
    data: Vec<u8>,
}

impl Files {
    const COUNT: usize = 100;

    fn open(directory: &Path, options: Options) -> Result<Box<dyn Application>> {
        let pages = kernel::pages(options.pick(2048, 64), &mut Random::new(1));
        let data = pages.iter().flat_map(|page| page.0).collect();
        let mut files = Self { directory: directory.to_owned(), number: 0, data };
        (0..Self::COUNT).try_for_each(|_| files.write())?;
        Ok(Box::new(files))
    }

    fn write(&mut self) -> Result<()> {
        self.number += 1;
        let path = self.directory.join((self.number % Self::COUNT).to_string());
        let mut file = File::options().create(true).truncate(false).write(true).open(path)?;
        file.write_all(&self.data)?;
        Ok(file.sync_all()?)
    }
}

impl Application for Files {
    fn run(&mut self, time: Duration) -> Result<Rate> {
        Rate::of(time, || self.write())
    }
}
