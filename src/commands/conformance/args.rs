//! The command line. Flags have the names of csi-sanity's, with or without its prefix `csi.`, so
//! that a driver's CI passes the same arguments to both.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, FromArgMatches, ValueEnum};
use serde::Deserialize;

use super::world::SMALLEST;
use common::quantity;
use grpc::Endpoint;
use kubernetes::client::User;
use kubernetes::name;

/// Maximum bytes of a file of secrets or parameters.
const MAX_FILE: u64 = 1 << 20;
const MIB: u64 = 1 << 20;
/// Default time limit of path commands.
const PATH_TIME: Duration = Duration::from_secs(10);
const DRIVER: &str = "Driver";
const KUBERNETES: &str = "Through Kubernetes";
const VOLUMES: &str = "Volumes and snapshots";
const PATHS: &str = "Paths";
const RULES: &str = "Rules and report";

/// The form of the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people
    Text,
    /// One JSON document
    Json,
    /// JUnit XML, for a CI
    Junit,
}

#[derive(Debug, Clone, Args)]
pub struct ConformanceArgs {
    #[command(flatten)]
    pub driver: DriverArgs,
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(flatten)]
    pub volumes: VolumeArgs,
    #[command(flatten)]
    pub paths: PathArgs,
    #[command(flatten)]
    pub rules: RuleArgs,
}

/// Where the driver is.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = DRIVER)]
pub struct DriverArgs {
    /// Socket of the driver
    #[arg(
        long,
        alias = "csi.endpoint",
        env = "CSI_ENDPOINT",
        required_unless_present_any = ["list", "kubernetes"],
        value_name = "unix://PATH|tcp://HOST:PORT"
    )]
    pub endpoint: Option<Endpoint>,
    /// Socket of the Controller service [default: that of the driver]
    #[arg(
        long = "controllerendpoint",
        alias = "csi.controllerendpoint",
        value_name = "unix://PATH|tcp://HOST:PORT"
    )]
    pub controller_endpoint: Option<Endpoint>,
    /// Socket of the SnapshotMetadata service [default: that of the Controller service]
    #[arg(long, value_name = "unix://PATH|tcp://HOST:PORT")]
    pub metadata_endpoint: Option<Endpoint>,
    /// YAML file of csi-sanity with secrets, and SnapshotMetadataSecret for metadata calls
    #[arg(long, alias = "csi.secrets", value_name = "FILE")]
    pub secrets: Option<PathBuf>,
    /// Judge only what needs no data: the Node service is not called
    #[arg(long)]
    pub no_node: bool,
}

/// What identifies the base of a delta.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BaseFrom {
    /// The CSI handle.
    Handle,
    /// This annotation of the VolumeSnapshot.
    Annotation(String),
}

impl FromStr for BaseFrom {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "handle" => Ok(Self::Handle),
            Some(("annotation", key)) if !key.is_empty() => Ok(Self::Annotation(key.to_owned())),
            _ => Err("handle or annotation:KEY is needed".to_owned()),
        }
    }
}

impl fmt::Display for BaseFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Handle => f.write_str("handle"),
            Self::Annotation(key) => write!(f, "annotation:{key}"),
        }
    }
}

/// The driver of a cluster, which is reached as backup applications reach it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = KUBERNETES)]
pub struct ClusterArgs {
    /// Judge the driver of a StorageClass with claims, pods, VolumeSnapshots and its sidecar
    #[arg(
        long,
        requires = "storage_class",
        requires = "snapshot_class",
        conflicts_with_all = ["no_node", "controller_endpoint", "metadata_endpoint", "secrets"]
    )]
    pub kubernetes: bool,
    /// StorageClass of the claims; its reclaimPolicy is Delete
    #[arg(long, requires = "kubernetes", value_parser = name::object, value_name = "NAME")]
    pub storage_class: Option<String>,
    /// VolumeSnapshotClass of the same driver; its deletionPolicy is Delete
    #[arg(long, requires = "kubernetes", value_parser = name::object, value_name = "NAME")]
    pub snapshot_class: Option<String>,
    /// Namespace of the claims, pods and VolumeSnapshots [default: that of the configuration]
    #[arg(long, short, requires = "kubernetes", value_parser = name::object, value_name = "NAME")]
    pub namespace: Option<String>,
    /// Image of the pods, which has this program [default: csi-loopback:VERSION]
    #[arg(long, requires = "kubernetes", value_name = "IMAGE")]
    pub image: Option<String>,
    /// What the driver takes as the base of a delta
    #[arg(
        long,
        requires = "kubernetes",
        default_value = "handle",
        value_name = "handle|annotation:KEY"
    )]
    pub base_from: BaseFrom,
    /// ServiceAccount of the namespace that calls the sidecar [default: the caller]
    #[arg(long, requires = "kubernetes", value_parser = name::object, value_name = "NAME")]
    pub service_account: Option<String>,
    /// Address of the sidecar to connect to, for port-forwarding
    #[arg(long, requires = "kubernetes", value_name = "HOST:PORT")]
    pub address: Option<String>,
    /// Configuration of the client [env: KUBECONFIG] [default: ~/.kube/config, else the pod's]
    #[arg(long, requires = "kubernetes", value_name = "PATH")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the configuration [default: the current one]
    #[arg(long, requires = "kubernetes", value_name = "NAME")]
    pub context: Option<String>,
}

impl ClusterArgs {
    pub fn user(&self) -> User<'_> {
        User { kubeconfig: self.kubeconfig.as_deref(), context: self.context.as_deref() }
    }

    fn again(&self, line: &mut String) {
        let Self { kubernetes: _, storage_class, snapshot_class, namespace, .. } = self;
        let Self { image, base_from, service_account, address, kubeconfig, context, .. } = self;
        *line += " --kubernetes";
        add(line, "storage-class", storage_class.as_ref());
        add(line, "snapshot-class", snapshot_class.as_ref());
        add(line, "namespace", namespace.as_ref());
        add(line, "image", image.as_ref());
        add(line, "base-from", (*base_from != BaseFrom::Handle).then_some(base_from));
        add(line, "service-account", service_account.as_ref());
        add(line, "address", address.as_ref());
        add(line, "kubeconfig", shown(kubeconfig));
        add(line, "context", context.as_ref());
    }
}

/// What volumes and snapshots are made of.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = VOLUMES)]
pub struct VolumeArgs {
    /// Size of volumes
    #[arg(long = "testvolumesize", alias = "csi.testvolumesize", value_parser = quantity::parse, default_value = "64Mi", value_name = "BYTES")]
    pub size: u64,
    /// Size of a volume after its growth [default: that of volumes and 48Mi]
    #[arg(long = "testvolumeexpandsize", alias = "csi.testvolumeexpandsize", value_parser = quantity::parse, value_name = "BYTES")]
    pub expand_size: Option<u64>,
    /// Accepted for csi-sanity; metadata belongs to raw block volumes
    #[arg(long = "testvolumeaccesstype", alias = "csi.testvolumeaccesstype", default_value = "block", value_parser = ["block"], value_name = "TYPE")]
    pub access_type: String,
    /// YAML file of the parameters of volumes
    #[arg(long = "testvolumeparameters", alias = "csi.testvolumeparameters", value_name = "FILE")]
    pub parameters: Option<PathBuf>,
    /// YAML file of the mutable parameters of volumes
    #[arg(
        long = "testvolumemutableparameters",
        alias = "csi.testvolumemutableparameters",
        value_name = "FILE"
    )]
    pub mutable_parameters: Option<PathBuf>,
    /// YAML file of the parameters of snapshots
    #[arg(
        long = "testsnapshotparameters",
        alias = "csi.testsnapshotparameters",
        value_name = "FILE"
    )]
    pub snapshot_parameters: Option<PathBuf>,
}

/// Where volumes are staged and published. A command gets the path as its argument and prints the
/// path that it made.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = PATHS)]
pub struct PathArgs {
    /// Directory below which volumes are published [default: csi-mount in TMPDIR]
    #[arg(long = "mountdir", alias = "csi.mountdir", value_name = "DIR")]
    pub mount_dir: Option<PathBuf>,
    /// Directory below which volumes are staged [default: csi-staging in TMPDIR]
    #[arg(long = "stagingdir", alias = "csi.stagingdir", value_name = "DIR")]
    pub staging_dir: Option<PathBuf>,
    /// Command that makes the directory of a target
    #[arg(long = "createmountpathcmd", alias = "csi.createmountpathcmd", value_name = "COMMAND")]
    pub create_mount: Option<PathBuf>,
    /// Command that makes a staging directory
    #[arg(
        long = "createstagingpathcmd",
        alias = "csi.createstagingpathcmd",
        value_name = "COMMAND"
    )]
    pub create_staging: Option<PathBuf>,
    /// Time limit of the commands that make paths
    #[arg(long = "createpathcmdtimeout", alias = "csi.createpathcmdtimeout", value_parser = quantity::nonzero_duration, default_value = "10s", value_name = "TIME")]
    pub create_timeout: Duration,
    /// Command that removes the directory of a target
    #[arg(long = "removemountpathcmd", alias = "csi.removemountpathcmd", value_name = "COMMAND")]
    pub remove_mount: Option<PathBuf>,
    /// Command that removes a staging directory
    #[arg(
        long = "removestagingpathcmd",
        alias = "csi.removestagingpathcmd",
        value_name = "COMMAND"
    )]
    pub remove_staging: Option<PathBuf>,
    /// Time limit of the commands that remove paths
    #[arg(long = "removepathcmdtimeout", alias = "csi.removepathcmdtimeout", value_parser = quantity::nonzero_duration, default_value = "10s", value_name = "TIME")]
    pub remove_timeout: Duration,
    /// Accepted for csi-sanity; no rule checks a path
    #[arg(long = "checkpathcmd", alias = "csi.checkpathcmd", value_name = "COMMAND")]
    pub check: Option<PathBuf>,
    /// Accepted for csi-sanity
    #[arg(long = "checkpathcmdtimeout", alias = "csi.checkpathcmdtimeout", value_parser = quantity::nonzero_duration, default_value = "10s", value_name = "TIME")]
    pub check_timeout: Duration,
}

/// What is judged, and how it is reported.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = RULES)]
pub struct RuleArgs {
    /// Judge only the rules whose id contains this; repeatable
    #[arg(long, value_name = "TEXT")]
    pub focus: Vec<String>,
    /// Do not judge the rules whose id contains this; repeatable
    #[arg(long, value_name = "TEXT")]
    pub skip: Vec<String>,
    /// List the rules
    #[arg(long)]
    pub list: bool,
    /// Form of the report
    #[arg(long, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
    pub report: Format,
    /// Selects the content of volumes and the offsets of calls [default: random]
    #[arg(long, value_name = "NUMBER")]
    pub seed: Option<u64>,
    /// Time limit of the run; the clean-up has a minute more
    #[arg(long, value_parser = quantity::nonzero_duration, default_value = "10min", value_name = "TIME")]
    pub timeout: Duration,
    /// Time limit of each call, and of a metadata stream that sends no tuples
    #[arg(long, value_parser = quantity::nonzero_duration, default_value = "30s", value_name = "TIME")]
    pub call_timeout: Duration,
}

impl ConformanceArgs {
    /// The arguments of a command line.
    ///
    /// # Errors
    /// It is invalid.
    pub fn of(flags: &[&str]) -> Result<Self> {
        let command = Self::augment_args(clap::Command::new("conformance").no_binary_name(true));
        Ok(Self::from_arg_matches(&command.try_get_matches_from(flags)?)?)
    }

    /// The command line of the same run, without its rules and the form of the report.
    pub fn again(&self, seed: u64) -> String {
        let mut line = String::from("csi-loopback conformance");
        if self.cluster.kubernetes {
            self.cluster.again(&mut line);
        } else {
            self.driver.again(&mut line);
            self.paths.again(&mut line);
        }
        self.volumes.again(&mut line);
        add(&mut line, "seed", Some(seed));
        line
    }
}

/// Adds a flag that was given.
fn add(line: &mut String, flag: &str, value: Option<impl fmt::Display>) {
    if let Some(value) = value {
        let value = value.to_string();
        let is_plain =
            |letter: char| letter.is_ascii_alphanumeric() || "-_./:@=,%+".contains(letter);
        *line += &match value.chars().all(is_plain) {
            true => format!(" --{flag} {value}"),
            false => format!(" --{flag} '{}'", value.replace('\'', "'\\''")),
        };
    }
}

fn shown(path: &Option<PathBuf>) -> Option<std::path::Display<'_>> {
    path.as_deref().map(Path::display)
}

impl DriverArgs {
    fn again(&self, line: &mut String) {
        let Self { endpoint, controller_endpoint, metadata_endpoint, secrets, no_node } = self;
        add(line, "endpoint", endpoint.as_ref());
        add(line, "controllerendpoint", controller_endpoint.as_ref());
        add(line, "metadata-endpoint", metadata_endpoint.as_ref());
        add(line, "secrets", shown(secrets));
        *line += if *no_node { " --no-node" } else { "" };
    }
}

impl PathArgs {
    /// Without the flags that have no effect.
    fn again(&self, line: &mut String) {
        add(line, "mountdir", shown(&self.mount_dir));
        add(line, "stagingdir", shown(&self.staging_dir));
        add(line, "createmountpathcmd", shown(&self.create_mount));
        add(line, "createstagingpathcmd", shown(&self.create_staging));
        add(line, "removemountpathcmd", shown(&self.remove_mount));
        add(line, "removestagingpathcmd", shown(&self.remove_staging));
        let time = |time: Duration| (time != PATH_TIME).then(|| humantime::format_duration(time));
        add(line, "createpathcmdtimeout", time(self.create_timeout));
        add(line, "removepathcmdtimeout", time(self.remove_timeout));
    }
}

impl VolumeArgs {
    fn again(&self, line: &mut String) {
        add(line, "testvolumesize", Some(self.size));
        add(line, "testvolumeexpandsize", self.expand_size);
        add(line, "testvolumeparameters", shown(&self.parameters));
        add(line, "testvolumemutableparameters", shown(&self.mutable_parameters));
        add(line, "testsnapshotparameters", shown(&self.snapshot_parameters));
    }

    /// Size after growth, in bytes.
    ///
    /// # Errors
    /// A size is too small.
    pub fn sizes(&self) -> Result<(u64, u64)> {
        let size = self.size;
        ensure!(size >= SMALLEST, "--testvolumesize: at least 32Mi is needed for all situations");
        ensure!(size.is_multiple_of(4096), "--testvolumesize: not a multiple of 4096 bytes");
        ensure!(
            i64::try_from(size).is_ok_and(|size| size < i64::MAX / 2),
            "--testvolumesize: too large"
        );
        let grown = self.expand_size.unwrap_or(size + 48 * MIB);
        ensure!(
            grown >= size + 3 * MIB && i64::try_from(grown).is_ok(),
            "--testvolumeexpandsize: at least 3Mi more than --testvolumesize is needed"
        );
        Ok((size, grown))
    }
}

pub type Secrets = HashMap<String, String>;

/// The secrets of each call: the keys of csi-sanity's file, and one for metadata calls.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "PascalCase")]
pub struct SecretsFile {
    pub create_volume_secret: Secrets,
    pub delete_volume_secret: Secrets,
    pub controller_publish_volume_secret: Secrets,
    pub controller_unpublish_volume_secret: Secrets,
    #[serde(rename = "ControllerValidateVolumeCapabilitiesSecret")]
    _validate: Secrets,
    pub node_stage_volume_secret: Secrets,
    pub node_publish_volume_secret: Secrets,
    pub create_snapshot_secret: Secrets,
    pub delete_snapshot_secret: Secrets,
    pub controller_expand_volume_secret: Secrets,
    #[serde(rename = "ControllerModifyVolumeSecret")]
    _modify: Secrets,
    #[serde(rename = "ListSnapshotsSecret")]
    _list: Secrets,
    #[serde(rename = "GetSnapshotSecret")]
    _get: Secrets,
    pub snapshot_metadata_secret: Secrets,
}

/// The YAML document of a file; the default without a file.
///
/// # Errors
/// The file cannot be read or has another form. The error does not repeat its content.
pub fn document<T: Default + for<'de> Deserialize<'de>>(
    flag: &str,
    path: Option<&Path>,
) -> Result<T> {
    let Some(path) = path else { return Ok(T::default()) };
    let named = || format!("{flag} {}", path.display());
    let size = fs::metadata(path).with_context(named)?.len();
    ensure!(size <= MAX_FILE, "{}: has more than 1 MiB", named());
    let text = fs::read_to_string(path).with_context(named)?;
    serde_saphyr::from_str(&text).ok().with_context(|| {
        format!("{}: is not a YAML document with the keys of csi-sanity and texts", named())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_csi_sanity_are_accepted_with_its_prefix() {
        let names = "endpoint=unix:///a controllerendpoint=tcp://h:1 mountdir=/m stagingdir=/s \
             createmountpathcmd=c createstagingpathcmd=c createpathcmdtimeout=10s \
             removemountpathcmd=c removestagingpathcmd=c removepathcmdtimeout=10s \
             checkpathcmd=c checkpathcmdtimeout=10s secrets=f testvolumesize=67108864 \
             testvolumeexpandsize=77108864 testvolumeaccesstype=block testvolumeparameters=f \
             testvolumemutableparameters=f testsnapshotparameters=f";
        for prefix in ["", "csi."] {
            let flags: Vec<_> = names.split(' ').map(|name| format!("--{prefix}{name}")).collect();
            let flags: Vec<_> = flags.iter().map(String::as_str).collect();
            let args = ConformanceArgs::of(&flags).unwrap();
            assert_eq!(args.volumes.sizes().unwrap(), (67_108_864, 77_108_864));
        }
    }

    #[test]
    fn the_next_command_repeats_all_flags_with_an_effect() {
        for flags in [
            "--endpoint unix:///a --controllerendpoint tcp://h:1 --metadata-endpoint tcp://h:2 \
             --secrets s --no-node --mountdir /m --stagingdir /s --createmountpathcmd c1 \
             --createstagingpathcmd c2 --removemountpathcmd c3 --removestagingpathcmd c4 \
             --createpathcmdtimeout 20s --removepathcmdtimeout 30s --testvolumesize 67108864 \
             --testvolumeexpandsize 77108864 --testvolumeparameters p \
             --testvolumemutableparameters q --testsnapshotparameters r",
            "--kubernetes --storage-class a --snapshot-class b --namespace n --image i:1 \
             --base-from annotation:x/y --service-account z --address 127.0.0.1:7 --kubeconfig k \
             --context c --testvolumesize 67108864",
        ] {
            let args = ConformanceArgs::of(&flags.split(' ').collect::<Vec<_>>()).unwrap();
            assert_eq!(args.again(9), format!("csi-loopback conformance {flags} --seed 9"));
        }
        let flags = ["--endpoint", "unix:///a", "--mountdir", "/a b'c"];
        let again = ConformanceArgs::of(&flags).unwrap().again(9);
        assert!(again.contains("--mountdir '/a b'\\''c'"), "{again}");
    }

    #[test]
    fn the_secrets_file_of_csi_sanity_has_one_more_key() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secrets.yaml");
        let text = "CreateVolumeSecret:\n  secretKey: a\nListSnapshotsSecret:\n  secretKey: b\n\
                    SnapshotMetadataSecret:\n  secretKey: hunter2\n";
        fs::write(&path, text).unwrap();
        let secrets: SecretsFile = document("--secrets", Some(&path)).unwrap();
        assert_eq!(secrets.snapshot_metadata_secret["secretKey"], "hunter2");
        assert!(secrets.delete_volume_secret.is_empty());
        fs::write(&path, "CreateVolumeSecrets: hunter2\n").unwrap();
        let error = document::<SecretsFile>("--secrets", Some(&path)).err().unwrap();
        let error = format!("{error:#}");
        assert!(error.contains("secrets.yaml") && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn sizes_that_hold_not_all_situations_are_refused() {
        for [flag, size] in [
            ["--testvolumesize", "1Mi"],
            ["--testvolumesize", "67108865"],
            ["--testvolumeexpandsize", "64Mi"],
        ] {
            let args = ConformanceArgs::of(&["--list", flag, size]).unwrap();
            assert!(args.volumes.sizes().unwrap_err().to_string().starts_with(flag));
        }
    }
}
