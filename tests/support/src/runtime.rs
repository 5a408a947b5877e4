//! A node for containers with csi-loopback-runc: loop devices with filesystems, entries as
//! crust_ops writes them, bundles with busybox, and the mounts in each namespace. All files are in
//! a private directory, and dropping the node removes everything.

use std::cell::RefCell;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use csi_loopback::crust::{Directory, Entry, MountInfo, Target};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::driver::binary;
use super::kernel::Watch;
use super::ops::Device;
use super::{MIB, have_root, keep, owned, path, run};

pub const PROGRAM: &str = "csi-loopback-runc";

/// Container names are cgroup names, which must be unique on the machine.
static CONTAINERS: AtomicUsize = AtomicUsize::new(0);

/// Runs a test on a new node, or reports a skip.
pub fn on_node(run: impl FnOnce(&Node)) {
    if !have_root() {
        return;
    }
    for tool in ["runc", "busybox"] {
        if Command::new(tool).arg("--help").output().is_err() {
            super::skip(&format!("needs {tool}"));
            return;
        }
    }
    run(&Node::set_up());
}

pub struct Node {
    pub program: PathBuf,
    config: PathBuf,
    containers: RefCell<Vec<String>>,
    mounted: RefCell<Vec<PathBuf>>,
    // Detached after the mounts are removed.
    devices: RefCell<Vec<Device>>,
    directory: TempDir,
}

impl Node {
    pub fn set_up() -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let at = directory.path();
        let program = at.join(PROGRAM);
        std::os::unix::fs::symlink(binary(), &program).unwrap();
        let node = Self {
            program,
            config: at.join("oci-runtime.yaml"),
            containers: RefCell::default(),
            mounted: RefCell::default(),
            devices: RefCell::default(),
            directory,
        };
        node.configure("runc");
        let bin = node.path("rootfs/bin");
        fs::create_dir_all(&bin).unwrap();
        let busybox = Command::new("sh").args(["-c", "command -v busybox"]).output().unwrap();
        let busybox = String::from_utf8(busybox.stdout).unwrap();
        fs::copy(busybox.trim(), bin.join("busybox")).unwrap();
        for name in ["sh", "sleep", "cat", "ls", "stat", "ln", "rm", "mkdir", "echo", "true", "mv"]
        {
            std::os::unix::fs::symlink("busybox", bin.join(name)).unwrap();
        }
        node
    }

    /// Sets the runtime that csi-loopback-runc calls.
    pub fn configure(&self, runtime: &str) {
        let text = format!(
            "runtime: {runtime}\ncrustDir: {}\nworkDir: {}\nkubeletDir: {}\n",
            path(&self.path("crust")),
            path(&self.path("work")),
            path(&self.path("kubelet")),
        );
        self.configure_as(&text);
    }

    pub fn configure_as(&self, text: &str) {
        fs::write(&self.config, text).unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A loop device with a filesystem.
    pub fn device(&self, name: &str, fs_type: &str, bytes: u64) -> PathBuf {
        let image = self.path(&format!("{name}.img"));
        File::create(&image).unwrap().set_len(bytes).unwrap();
        match fs_type {
            "ext4" => run("mkfs.ext4", &["-q", "-F", path(&image)]),
            "xfs" => run("mkfs.xfs", &["-q", "-f", path(&image)]),
            _ => run("mkfs.btrfs", &["-q", "-f", path(&image)]),
        }
        let device = Device::attach(&image, &[]);
        let path = device.path().into();
        self.devices.borrow_mut().push(device);
        path
    }

    /// Grows a device.
    pub fn grow(&self, name: &str, device: &Path, bytes: u64) {
        let image = self.path(&format!("{name}.img"));
        File::options().write(true).open(image).unwrap().set_len(bytes).unwrap();
        run("losetup", &["-c", path(device)]);
    }

    pub fn target(&self, name: &str) -> Target {
        let target = self.path(&format!("kubelet/pods/{name}/volumes/kubernetes.io~csi/pv/mount"));
        fs::create_dir_all(&target).unwrap();
        Target::new("target", target).unwrap()
    }

    pub fn entry(&self, target: &Target) -> Entry {
        Directory::new(self.path("crust")).entry(target)
    }

    /// Writes the entry of a volume, as crust_ops does.
    pub fn stage(&self, name: &str, info: &MountInfo) -> Target {
        let target = self.target(name);
        self.entry(&target).stage(&target, info).unwrap();
        target
    }

    /// A small volume with an entry.
    pub fn volume(&self, name: &str, options: &[&str]) -> (PathBuf, Target) {
        let device = self.device(name, "ext4", 32 * MIB);
        let target = self.stage(name, &info(&device, "ext4", options));
        (device, target)
    }

    /// A new container, not yet created. By default it sleeps.
    pub fn container(&self, mounts: &[Value]) -> Container<'_> {
        let number = CONTAINERS.fetch_add(1, Ordering::Relaxed);
        let id = format!("csi-loopback-{}-{number}", std::process::id());
        let bundle = self.path(&id);
        fs::create_dir(&bundle).unwrap();
        let namespace = |kind: &str| json!({ "type": kind });
        let mut all = vec![json!({"type": "proc", "source": "proc", "destination": "/proc"})];
        all.extend_from_slice(mounts);
        let spec = json!({
            "ociVersion": "1.0.2",
            "process": {
                "args": ["sleep", "1000"], "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0},
            },
            "root": {"path": path(&self.path("rootfs"))},
            "mounts": all,
            "linux": {"namespaces": [namespace("mount"), namespace("pid"), namespace("ipc"), namespace("uts")]},
        });
        self.containers.borrow_mut().push(id.clone());
        Container { node: self, id, bundle, spec }
    }

    /// A command of csi-loopback-runc, or of runc.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("CSI_LOOPBACK_RUNC_CONFIG", &self.config)
            .args(["--root", path(&self.path("runc"))])
            .args(["--log", path(&self.path("log.json")), "--log-format", "json"])
            .stdin(Stdio::null());
        command
    }

    pub fn call(&self, arguments: &[&str]) -> Output {
        // Files instead of pipes: the container keeps pipes open until it ends.
        let (out, err) = (self.path("stdout"), self.path("stderr"));
        let mut command = self.command(&self.program);
        command.args(arguments);
        command.stdout(File::create(&out).unwrap()).stderr(File::create(&err).unwrap());
        let status = command.status().unwrap();
        Output { status, stdout: fs::read(out).unwrap(), stderr: fs::read(err).unwrap() }
    }

    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.call(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn stats(&self, target: &Target) -> Value {
        serde_json::from_str(&self.crust(&["stats", path(target.as_path())]).unwrap()).unwrap()
    }

    /// The output of a `crust` command, or its exit code and error.
    pub fn crust(&self, words: &[&str]) -> Result<String, (i32, String)> {
        let mut command = Command::new(&self.program);
        let output =
            command.env("CSI_LOOPBACK_RUNC_CONFIG", &self.config).arg("crust").args(words).output();
        let output = output.unwrap();
        match output.status.code().unwrap() {
            0 => Ok(String::from_utf8(output.stdout).unwrap()),
            code => Err((code, String::from_utf8(output.stderr).unwrap())),
        }
    }

    /// The last error in the log file that containerd reads.
    pub fn logged(&self) -> String {
        let log = fs::read_to_string(self.path("log.json")).unwrap();
        let last: Value = serde_json::from_str(log.lines().last().unwrap()).unwrap();
        assert_eq!(last["level"], "error", "{last}");
        last["msg"].as_str().unwrap().to_owned()
    }

    /// Bind-mounts `source` at `at`, as kubelet does for sub-paths.
    pub fn bind(&self, source: &Path, at: &Path) {
        match source.is_dir() {
            true => fs::create_dir_all(at).unwrap(),
            false => {
                fs::create_dir_all(at.parent().unwrap()).unwrap();
                File::create(at).map(drop).unwrap();
            }
        }
        run("mount", &["--bind", path(source), path(at)]);
        self.mounted.borrow_mut().push(at.to_owned());
    }

    /// Mounts a volume that no container uses, calls `inspect` with the path, and unmounts it.
    pub fn with_mount<T>(&self, device: &Path, inspect: impl FnOnce(&Path) -> T) -> T {
        let at = self.path("inspect");
        fs::create_dir_all(&at).unwrap();
        run("mount", &[path(device), path(&at)]);
        let result = inspect(&at);
        super::kernel::unmount(&at);
        result
    }

    /// Asserts that a volume is released: it has no claim and no mount, and its device is not in
    /// use.
    #[track_caller]
    pub fn assert_gone(&self, device: &Path, target: &Target) {
        let entry = self.entry(target);
        let remaining: Vec<String> = fs::read_dir(entry.path())
            .unwrap()
            .map(|found| found.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with("container-") || name == "runtime-cli")
            .collect();
        assert!(remaining.is_empty(), "{remaining:?}");
        assert_eq!(self.shown(device), Vec::<String>::new());
        assert_eq!(fs::read_dir(target.as_path()).unwrap().count(), 0, "the target");
        if let Ok(work) = fs::read_dir(self.path("work")) {
            assert_eq!(work.count(), 0, "the work directory");
        }
        super::kernel::wait_for("release of the filesystem", || !is_live(device));
    }

    /// Lines of the host's mountinfo with the volume or the work directory.
    pub fn shown(&self, device: &Path) -> Vec<String> {
        shown(device, &self.path("work"), Path::new("/proc/self/mountinfo"))
    }

    /// Watches the mounts of the host and of other processes' namespaces for mounts of the volume.
    pub fn watch(&self, device: &Path, others: &[u32]) -> Watch {
        let mut tables = vec![PathBuf::from("/proc/self/mountinfo")];
        tables.extend(others.iter().map(|pid| PathBuf::from(format!("/proc/{pid}/mountinfo"))));
        let (device, work) = (device.to_owned(), self.path("work"));
        Watch::start(Duration::ZERO, move || {
            tables.iter().flat_map(|table| shown(&device, &work, table)).collect()
        })
    }
}

fn shown(device: &Path, work: &Path, table: &Path) -> Vec<String> {
    let text = fs::read_to_string(table).unwrap_or_default();
    let of_volume = |line: &&str| {
        line.split(' ').any(|field| field == path(device)) || line.contains(path(work))
    };
    text.lines().filter(of_volume).map(str::to_owned).collect()
}

/// Whether a mount namespace has mounted the filesystem of a device.
pub fn is_live(device: &Path) -> bool {
    let name = device.file_name().unwrap();
    let below = |directory: &str| Path::new(directory).join(name).exists();
    let btrfs = fs::read_dir("/sys/fs/btrfs").into_iter().flatten();
    let in_btrfs = |found: fs::DirEntry| found.path().join("devices").join(name).exists();
    below("/sys/fs/ext4") || below("/sys/fs/xfs") || btrfs.flatten().any(in_btrfs)
}

impl Drop for Node {
    fn drop(&mut self) {
        if keep() {
            std::mem::forget(self.devices.take());
            return;
        }
        for id in self.containers.borrow().iter() {
            let _ = self.command(Path::new("runc")).args(["delete", "--force", id]).output();
        }
        for at in self.mounted.borrow().iter().rev() {
            super::kernel::unmount(at);
        }
    }
}

pub struct Container<'a> {
    node: &'a Node,
    pub id: String,
    pub bundle: PathBuf,
    pub spec: Value,
}

impl Container<'_> {
    /// A container of a pod, with containerd's annotations.
    pub fn in_pod(mut self, sandbox: &str) -> Self {
        self.spec["annotations"] = json!({
            "io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": sandbox,
        });
        self
    }

    pub fn running(mut self, arguments: &[&str]) -> Self {
        self.spec["process"]["args"] = json!(arguments);
        self
    }

    /// With these Linux capabilities.
    pub fn with_capabilities(mut self, names: &[&str]) -> Self {
        self.spec["process"]["capabilities"] =
            json!({"bounding": names, "effective": names, "permitted": names});
        self
    }

    pub fn write(&self) -> Vec<u8> {
        let text = serde_json::to_vec(&self.spec).unwrap();
        fs::write(self.bundle.join("config.json"), &text).unwrap();
        text
    }

    pub fn creation(&self) -> Vec<String> {
        let pid_file = self.bundle.join("pid");
        ["create", "--bundle", path(&self.bundle), "--pid-file", path(&pid_file), &self.id]
            .map(str::to_owned)
            .to_vec()
    }

    /// Creates it.
    pub fn create(&self) -> Output {
        let text = self.write();
        let words = self.creation();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = self.node.call(&words);
        assert_eq!(
            fs::read(self.bundle.join("config.json")).unwrap(),
            text,
            "config.json has changed"
        );
        output
    }

    /// Creates and starts it.
    #[track_caller]
    pub fn start(&self) -> &Self {
        let output = self.create();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        self.node.ok(&["start", &self.id]);
        self
    }

    /// Asserts that the creation fails with `words` on stderr and in containerd's log file. Returns
    /// the error.
    #[track_caller]
    pub fn refused(&self, words: &str) -> String {
        let output = self.create();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(words), "{words:?}: {error}");
        assert!(error.contains(&self.node.logged()), "{}: {error}", self.node.logged());
        assert!(!self.exists(), "{error}");
        error
    }

    pub fn exists(&self) -> bool {
        let state = self.node.command(Path::new("runc")).args(["state", &self.id]).output();
        state.unwrap().status.success()
    }

    pub fn pid(&self) -> u32 {
        fs::read_to_string(self.bundle.join("pid")).unwrap().trim().parse().unwrap()
    }

    #[track_caller]
    pub fn exec(&self, arguments: &[&str]) -> String {
        let mut words = vec!["exec", &self.id];
        words.extend(arguments);
        self.node.ok(&words).trim_end().to_owned()
    }

    #[track_caller]
    pub fn sh(&self, script: &str) -> String {
        self.exec(&["sh", "-c", script])
    }

    #[track_caller]
    pub fn delete(&self) {
        self.node.ok(&["delete", "--force", &self.id]);
    }
}

pub fn info(device: &Path, fs_type: &str, options: &[&str]) -> MountInfo {
    MountInfo::new(path(device).to_owned(), fs_type.to_owned(), owned(options))
}

/// A bind mount of a container in the form of CRI runtimes.
pub fn bind(source: &Path, destination: &str) -> Value {
    bind_with(source, destination, &["rbind", "rprivate", "rw"])
}

pub fn bind_with(source: &Path, destination: &str, options: &[&str]) -> Value {
    json!({"type": "bind", "source": path(source), "destination": destination, "options": options})
}
