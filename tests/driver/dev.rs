//! `csi-loopback dev`: a test target for backup clients without a cluster.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use support::cluster::programs::{Process, finish, finish_within, stdout_of};
use support::driver::{PATIENCE, binary, loops_named, mounts};
use support::{BLOCK, REPOSITORY, examples, have_root, path, pattern, write_direct};
use tempfile::TempDir;

/// A running command, and the directory of all its files.
struct Dev {
    process: Process,
    // Dropped after the process.
    directory: TempDir,
}

impl Dev {
    fn start(flags: &[&str]) -> Self {
        Self::start_in(TempDir::with_prefix("csi-loopback-").unwrap(), flags)
    }

    fn start_in(directory: TempDir, flags: &[&str]) -> Self {
        let mut command = Command::new(binary());
        let variables = directory.path().join("env");
        command.args(["dev", "--env-file", path(&variables)]).args(flags);
        command.env("TMPDIR", directory.path()).env_remove("CSI_ENDPOINT");
        let mut process = Process::spawn("dev", command, directory.path());
        process.wait_for("the variables", |_| variables.exists().then_some(()));
        Self { process, directory }
    }

    fn scratch(&self) -> &Path {
        self.directory.path()
    }

    fn variable(&self, name: &str) -> String {
        let text = fs::read_to_string(self.scratch().join("env")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("export {name}='")));
        line.unwrap_or_else(|| panic!("{name}: {text}")).trim_end_matches('\'').to_owned()
    }

    /// Runs a client command, which must succeed, and returns its JSON.
    fn cli(&self, line: &str) -> Value {
        let mut command = Command::new(binary());
        command.args(line.split(' ')).args(["--output", "json"]);
        command.env("CSI_ENDPOINT", self.variable("CSI_ENDPOINT"));
        serde_json::from_str(&stdout_of(finish(command))).unwrap()
    }

    /// Publishes the volume `data` as a raw block device.
    fn publish(&self) -> PathBuf {
        let (staging, device) = (self.scratch().join("staging"), self.scratch().join("device"));
        let staged = format!("volume stage data --staging {} --block", path(&staging));
        self.cli(&staged);
        let target = format!("--staging {} --target {} --block", path(&staging), path(&device));
        self.cli(&format!("volume publish data {target}"));
        device
    }

    /// Address, CA file, token file and namespace, as the example clients take them.
    fn sidecar(&self) -> [String; 4] {
        ["ADDRESS", "CA_FILE", "TOKEN_FILE", "NAMESPACE"]
            .map(|name| self.variable(&format!("SNAPSHOT_METADATA_{name}")))
    }

    /// Interrupts the command as timeout(1) does, which sends its signal twice, and checks that
    /// nothing is left.
    fn interrupt(mut self) {
        self.process.signal(Signal::SIGINT);
        std::thread::sleep(Duration::from_millis(5));
        self.process.signal(Signal::SIGINT);
        let status = self.process.wait(PATIENCE).expect("it ends");
        assert!(status.success(), "{status}: {}", self.process.log());
        self.assert_nothing_left();
    }

    fn assert_nothing_left(&self) {
        assert!(!mounts().iter().any(|mount| mount.target.starts_with(self.scratch())));
        let ours = ["dev.log", "staging", "device", "ex"].map(|name| self.scratch().join(name));
        let entries = fs::read_dir(self.scratch()).unwrap();
        let left: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        assert!(left.iter().all(|entry| ours.contains(entry)), "{left:?}");
    }
}

/// Blocks of the tests.
const BLOCKS: [u64; 3] = [0, 7, 9];

fn write(device: &Path, seed: u64) {
    for number in BLOCKS {
        write_direct(device, number * BLOCK, &pattern(seed, BLOCK as usize));
    }
}

fn id(created: &Value) -> String {
    created["id"].as_str().unwrap().to_owned()
}

#[test]
fn dev_serves_clients_and_an_interrupt_leaves_nothing() {
    if !have_root() {
        return;
    }
    let clients = examples::clients();
    let dev = Dev::start(&["--namespace", "default", "--namespace", "shop"]);
    let volume = id(&dev.cli("volume create data --size 64Mi --block"));
    let device = dev.publish();
    write(&device, 1);
    let first = id(&dev.cli("snapshot create first --volume data"));
    write(&device, 2);
    dev.cli("snapshot create second --volume data");
    dev.cli("snapshot create shop.third --volume data");
    let expected: Vec<_> = BLOCKS.iter().map(|number| (number * BLOCK, BLOCK)).collect();
    let [address, ca, token, namespace] = dev.sidecar();
    let run = [&address, &ca, &token, &namespace].map(String::as_str);
    for (language, _, client) in &clients {
        assert_eq!(client.extents(&[&run[..], &["first"]].concat()), expected, "{language}");
        let delta = [&run[..], &["second", &first]].concat();
        assert_eq!(client.extents(&delta), expected, "{language}");
        let shop = [&run[..3], &["shop", "third", &first]].concat();
        assert_eq!(client.extents(&shop), expected, "{language}");
        let refused = client.command(&[&run[..], &["third"]].concat()).output().unwrap();
        let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(errors.contains("VolumeSnapshot default/third does not exist"), "{errors}");
        let named = client.command(&[&run[..], &["second", "first"]].concat()).output().unwrap();
        let errors = String::from_utf8_lossy(&named.stderr).into_owned();
        assert!(errors.contains("status.snapshotHandle"), "{language}: {errors}");
    }
    let printed = dev.process.log();
    for word in ["grpcurl -cacert", "kind: SnapshotMetadataService", &address, &ca] {
        assert!(printed.contains(word), "{word}: {printed}");
    }
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    // The volume is still published.
    dev.interrupt();
    assert_eq!(loops_named(&volume), [""; 0]);
}

/// The commands of the second and third step of docs/guide/dev.md, with another directory.
#[test]
#[ignore = "full tier"]
fn the_guide_runs_as_printed() {
    let (Some(python), Some(_)) = (examples::python(), examples::go()) else { return };
    if !have_root() {
        return;
    }
    let page = fs::read_to_string(Path::new(REPOSITORY).join("docs/guide/dev.md")).unwrap();
    let mut blocks = page.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let start = blocks.next().unwrap();
    assert!(start.contains("csi-loopback dev --env-file /tmp/dev.env\n"), "{start}");
    let dev = Dev::start(&[]);
    let directory = format!("{}/", path(dev.scratch()));
    let commands = blocks.collect::<String>().replace("/tmp/", &directory);
    let commands = commands.replace("dev.env", "env");
    // The command of Python's environment has the path of where it was made.
    let pip = "pip() { python3 -m pip --disable-pip-version-check \"$@\" >&2; }\n";
    let programs = [python.parent().unwrap(), Path::new(binary()).parent().unwrap()].map(path);
    let mut command = Command::new("bash");
    command.args(["-euc", &format!("{pip}{commands}")]).current_dir(REPOSITORY);
    command.env("PATH", format!("{}:{}", programs.join(":"), std::env::var("PATH").unwrap()));
    // Go builds an example, on a new machine with all modules.
    let output = stdout_of(finish_within(5 * PATIENCE, command));
    let extent = |line: &&str| line.split(' ').all(|word| word.parse::<u64>().is_ok());
    let extents: Vec<_> = output.lines().filter(extent).collect();
    let (from_python, from_go) = extents.split_at(extents.len() / 2);
    assert!(!from_go.is_empty() && from_python == from_go, "{output}");
    dev.interrupt();
}

#[test]
fn dev_refuses_tokens_and_injects_faults() {
    if !have_root() {
        return;
    }
    let fault = "stream-abort,code=DATA_LOSS";
    let tokens = ["--token", "own=shop", "--token", "all"];
    let flags = [&["--namespace", "default", "--namespace", "shop", "--fault", fault][..], &tokens];
    let dev = Dev::start(&flags.concat());
    dev.cli("volume create data --size 64Mi --block");
    dev.cli("snapshot create first --volume data");
    let [address, ca, token, _] = dev.sidecar();
    let run = [&address, &ca, &token].map(String::as_str);
    let errors = |arguments: &[&str]| {
        examples::clients().first().map(|(_, _, client)| {
            let output = client.command(arguments).output().unwrap();
            assert!(!output.status.success());
            String::from_utf8_lossy(&output.stderr).into_owned()
        })
    };
    if let Some(text) = errors(&[&run[..], &["default", "first"]].concat()) {
        assert!(text.contains("token-1 may not get volumesnapshots"), "{text}");
    }
    let tokens = dev.scratch().join("device");
    for (token, word) in [("all", "DATA_LOSS"), ("other", "UNAUTHENTICATED")] {
        fs::write(&tokens, token).unwrap();
        let run = [address.as_str(), &ca, path(&tokens), "default", "first"];
        if let Some(text) = errors(&run) {
            let code = word.replace('_', "");
            let text = text.replace(['_', ' '], "").to_uppercase();
            assert!(text.contains(&code), "{text}");
        }
    }
    dev.interrupt();
}

#[test]
fn dev_removes_what_a_killed_one_has_left() {
    if !have_root() {
        return;
    }
    let mut dev = Dev::start(&[]);
    let volume = id(&dev.cli("volume create data --size 64Mi --block"));
    dev.publish();
    dev.process.signal(Signal::SIGKILL);
    dev.process.wait(Duration::from_secs(10)).expect("it is dead");
    // The next one replaces it, so it shows nothing.
    fs::remove_file(dev.scratch().join("env")).unwrap();
    let Dev { process, directory } = dev;
    drop(process);
    assert!(!loops_named(&volume).is_empty(), "the killed one has left a loop device");
    Dev::start_in(directory, &[]).interrupt();
    assert_eq!(loops_named(&volume), [""; 0]);
}
