//! Flags of the driver. Values are validated during parsing, so that an error at startup names the
//! flag.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, ValueEnum};

use super::crust::Crust;
use super::fault::Rule;
use common::quantity;
use grpc::SocketPath;
use grpc::socket::octal_mode;
use storage::{
    BLOCK_SIZE, FreezeGuard, InlineLimits, MAX_POOL_BLOCK_SIZE, PoolChoice, Runtime, Style,
};
use telemetry::role::RoleArgs;

/// Maximum bytes of a driver name (CSI GetPluginInfo).
const MAX_DRIVER_NAME: usize = 63;
/// Maximum bytes of a node id, which is also a topology value (CSI Topology).
const MAX_NODE_ID: usize = 63;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket to serve CSI on: unix:///path, unix:/path or /path
    #[arg(
        long,
        env = "CSI_ENDPOINT",
        default_value = "unix:///run/csi-loopback/csi.sock",
        value_name = "SOCKET"
    )]
    pub endpoint: SocketPath,

    /// Octal access mode of the socket
    #[arg(long, default_value = "0600", value_parser = octal_mode, value_name = "MODE")]
    pub socket_mode: u32,

    /// Group of the socket, by name or number [default: the driver's group]
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,

    /// Second socket that serves only snapshot metadata, for the sidecar
    #[arg(long, value_name = "SOCKET")]
    pub metadata_endpoint: Option<SocketPath>,

    /// Group of the second socket, by name or number [default: the driver's group]
    #[arg(long, requires = "metadata_endpoint", value_name = "GROUP")]
    pub metadata_socket_group: Option<String>,

    /// Directory that staging and target paths must be in, such as /var/lib/kubelet [default: any]
    #[arg(long, value_name = "DIR")]
    pub target_root: Option<PathBuf>,

    /// Name of the driver: the CSIDriver object and the provisioner of storage classes
    #[arg(long, default_value = "loopback.csi.local", value_parser = driver_name, value_name = "NAME")]
    pub driver_name: String,

    /// Name of this node in CSI and topology
    #[arg(long, env = "NODE_ID", default_value_t = NodeId::of_host(), value_name = "ID")]
    pub node_id: NodeId,

    /// Directory of the pool and the catalog
    #[arg(long, default_value = "/var/lib/csi-loopback", value_name = "DIR")]
    pub data_dir: PathBuf,

    /// Kind of pool: reflink (data directory on XFS with reflink), image (XFS in a file), copy
    /// (plain files), or auto (the existing kind, else reflink or image)
    #[arg(long, default_value = "auto", value_name = "KIND", value_parser =
        PossibleValuesParser::new(["auto", "reflink", "image", "copy"]).try_map(|kind| kind.parse::<PoolChoice>()))]
    pub pool: PoolChoice,

    /// Size of an image pool, such as 100Gi; a larger size than the current one grows the pool
    /// [default: half of the free space, at most 10Gi]
    #[arg(long, value_parser = quantity::parse, value_name = "SIZE")]
    pub pool_size: Option<u64>,

    /// Create a sparse image: space is allocated on write, and pods get I/O errors when the
    /// underlying filesystem is full
    #[arg(long)]
    pub pool_sparse: bool,

    /// Block size of a new image pool: a power of two from 4Ki to 64Ki (above 4Ki: Linux 6.12)
    /// [default: 4Ki]
    #[arg(long, value_parser = pool_block_size, value_name = "SIZE")]
    pub pool_block_size: Option<u64>,

    /// Maximum total capacity of all volumes, as a multiple of the pool size
    #[arg(long, default_value = "10", value_parser = overcommit, value_name = "FACTOR")]
    pub overcommit: f64,

    /// Report snapshot metadata as extents of any length or as blocks of one size
    #[arg(long, value_enum, default_value_t = MetadataType::Variable, value_name = "TYPE")]
    pub block_metadata_type: MetadataType,

    /// Maximum block size for --block-metadata-type fixed: a power of two, at least 4Ki
    #[arg(long, default_value = "64Ki", value_parser = block_size, value_name = "SIZE")]
    pub block_size: u64,

    /// How long a deleted snapshot remains a valid base of deltas
    #[arg(long, default_value = "90days", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub change_record_retention: Duration,

    /// Serve ListSnapshotDeltas, a proposed CSI extension (KEP-3314), and advertise it with a
    /// capability outside CSI
    #[arg(long)]
    pub enable_snapshot_deltas: bool,

    /// One driver of many with the same name, each with its own pool and its own controllers:
    /// volumes grow on the node, there are no group snapshots, and a clone of another pool's volume
    /// or snapshot is RESOURCE_EXHAUSTED, so that another node is selected
    #[arg(long)]
    pub node_local: bool,

    /// Socket of a freeze guard (--mode freeze-guard), which thaws filesystems if the driver is
    /// killed [default: start a guard as a child process, which a container kill also kills]
    #[arg(long, value_name = "SOCKET")]
    pub freeze_guard: Option<SocketPath>,

    #[command(flatten)]
    pub inline: InlineArgs,

    #[command(flatten)]
    pub defer: DeferArgs,

    #[command(flatten)]
    pub faults: FaultArgs,

    #[command(flatten)]
    pub role: RoleArgs,
}

/// Fault injection for tests of clients.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Fault injection")]
pub struct FaultArgs {
    /// Allow --fault; do not use with real backups
    #[arg(long)]
    pub enable_faults: bool,

    /// Inject a fault into responses, such as stream-abort,after=1000 (docs/reference/driver.md
    /// lists all kinds); may be repeated
    #[arg(long, value_name = "RULE", requires = "enable_faults")]
    pub fault: Vec<Rule>,
}

/// Inline volumes, which pods declare.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Inline ephemeral volumes")]
pub struct InlineArgs {
    /// Create inline ephemeral volumes; existing ones can always be unpublished
    #[arg(id = "inline", long = "inline", default_value_t = true, action = ArgAction::Set, num_args = 0..=1,
        require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub new: bool,

    /// Maximum size of an inline volume
    #[arg(long = "inline-max-size", default_value = "10Gi", value_parser = quantity::parse, value_name = "SIZE")]
    pub max_size: u64,

    /// Maximum number of inline volumes on this node
    #[arg(long = "inline-max-volumes", default_value_t = 256, value_name = "N")]
    pub max_volumes: u64,

    /// Maximum total size of the inline volumes in the pool [default: a quarter of the pool]
    #[arg(long = "inline-max-total", value_parser = quantity::parse, value_name = "SIZE")]
    pub max_total: Option<u64>,

    /// Maximum total size of the inline volumes in memory, which are those with content, a secret
    /// or medium Memory
    #[arg(long = "inline-max-memory", default_value = "512Mi", value_parser = quantity::parse, value_name = "SIZE")]
    pub max_memory: u64,
}

impl Args {
    /// The guard at `--freeze-guard`, or a child process of this program.
    pub fn freeze_guard(&self) -> FreezeGuard {
        match &self.freeze_guard {
            Some(socket) => FreezeGuard::Socket(socket.as_ref().to_owned()),
            None => FreezeGuard::Child {
                program: "/proc/self/exe".into(),
                arguments: [vec!["freeze-guard".to_owned()], self.role.log.line()]
                    .concat()
                    .into_iter()
                    .map(Into::into)
                    .collect(),
            },
        }
    }
}

impl InlineArgs {
    pub fn limits(&self) -> InlineLimits {
        InlineLimits {
            max_size: self.max_size,
            max_volumes: self.max_volumes,
            max_total: self.max_total,
            max_memory: self.max_memory,
        }
    }
}

/// Deferred volumes, which a container runtime mounts.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Runtime assisted mounting")]
pub struct DeferArgs {
    /// Let container runtimes mount volumes instead of this host if a request says so: a proposed
    /// CSI extension (KEP-2857), advertised with capabilities outside CSI
    #[arg(long)]
    pub enable_defer_fs_ops: bool,

    /// Socket of crust_ops (--mode runtime-ops): unix:///path, unix:/path or /path
    #[arg(long, default_value = "unix:///run/csi-loopback/crust.sock", value_name = "SOCKET")]
    pub crust_endpoint: SocketPath,

    /// Timeout of a crust_ops call: 100ms to 10min
    #[arg(long, default_value = "30s", value_parser = crust_timeout, value_name = "TIME")]
    pub crust_timeout: Duration,
}

impl DeferArgs {
    /// A client of crust_ops if deferred volumes are enabled. Must be called inside a tokio
    /// runtime.
    pub fn runtime(&self) -> Option<Arc<dyn Runtime>> {
        let crust = || Arc::new(Crust::new(&self.crust_endpoint, self.crust_timeout));
        self.enable_defer_fs_ops.then(|| crust() as _)
    }
}

/// `--block-metadata-type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MetadataType {
    /// Extents of any length
    Variable,
    /// Blocks of one size
    Fixed,
}

impl MetadataType {
    pub fn style(self, block_size: u64) -> Style {
        match self {
            Self::Variable => Style::Variable,
            Self::Fixed => Style::Fixed(block_size),
        }
    }
}

/// Name of a node. It is a valid label value, so that it can be a topology segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeId(String);

impl NodeId {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The host name, unchecked: clap validates a default like any other value.
    fn of_host() -> Self {
        let name = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
        Self(name.unwrap_or_default())
    }
}

impl std::fmt::Display for NodeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for NodeId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if is_label(text, MAX_NODE_ID, b"-_.") {
            return Ok(Self(text.to_owned()));
        }
        Err(format!(
            "a node id is 1 to {MAX_NODE_ID} letters, digits, '-', '_' or '.', with a letter or digit at both ends"
        ))
    }
}

fn driver_name(text: &str) -> Result<String, String> {
    if is_label(text, MAX_DRIVER_NAME, b"-.") {
        return Ok(text.to_owned());
    }
    Err(format!(
        "a driver name is 1 to {MAX_DRIVER_NAME} letters, digits, '-' or '.', with a letter or digit at both ends"
    ))
}

/// Whether `text` consists of letters, digits and `inner`, with no `inner` at either end.
fn is_label(text: &str, max: usize, inner: &[u8]) -> bool {
    let bytes = text.as_bytes();
    let ends = [bytes.first(), bytes.last()];
    bytes.len() <= max
        && ends.iter().all(|end| end.is_some_and(u8::is_ascii_alphanumeric))
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || inner.contains(byte))
}

fn overcommit(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if factor.is_finite() && factor > 0.0 => Ok(factor),
        _ => Err(format!("{text:?} is not a number above 0")),
    }
}

/// Bounded, because the call holds the volume's lock.
fn crust_timeout(text: &str) -> Result<Duration, String> {
    let range = Duration::from_millis(100)..=Duration::from_secs(600);
    quantity::duration(text, range, "a time from 100ms to 10min")
}

fn block_size(text: &str) -> Result<u64, String> {
    let bytes = quantity::parse(text)?;
    // The upper bound fits the wire's int64.
    if bytes.is_power_of_two() && (BLOCK_SIZE..=1 << 62).contains(&bytes) {
        return Ok(bytes);
    }
    Err(format!("{text:?} is not a power of two of at least 4Ki"))
}

fn pool_block_size(text: &str) -> Result<u64, String> {
    let bytes = quantity::parse(text)?;
    if bytes.is_power_of_two() && (BLOCK_SIZE..=MAX_POOL_BLOCK_SIZE).contains(&bytes) {
        return Ok(bytes);
    }
    Err(format!("{text:?} is not one of 4Ki, 8Ki, 16Ki, 32Ki and 64Ki"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_names_and_node_ids_are_checked() {
        for good in ["loopback.csi.local", "a", "X-1.y"] {
            assert!(driver_name(good).is_ok() && good.parse::<NodeId>().is_ok(), "{good}");
        }
        let long = "x".repeat(64);
        for bad in ["", "-a", "a.", "a/b", "a b", "é", &long] {
            assert!(driver_name(bad).is_err() && bad.parse::<NodeId>().is_err(), "{bad}");
        }
        assert!("node_1".parse::<NodeId>().is_ok() && driver_name("node_1").is_err());
    }

    #[test]
    fn numeric_flags_are_checked() {
        assert_eq!(overcommit("1.5"), Ok(1.5));
        assert!(["0", "-1", "inf", "nan", "x"].iter().all(|text| overcommit(text).is_err()));
        assert_eq!(crust_timeout("100ms"), Ok(Duration::from_millis(100)));
        assert!(["0s", "99ms", "11min", "1", ""].iter().all(|text| crust_timeout(text).is_err()));
        assert_eq!(block_size("1Mi"), Ok(1 << 20));
        assert!(["0", "2Ki", "5000", "16383Pi"].iter().all(|text| block_size(text).is_err()));
        assert_eq!(["4Ki", "65536"].map(pool_block_size), [Ok(4 << 10), Ok(64 << 10)]);
        for text in ["0", "2Ki", "12Ki", "128Ki", "large"] {
            assert!(pool_block_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn inline_flag_defaults_equal_the_backend_defaults() {
        use clap::{Args as _, Command, FromArgMatches as _};
        let command = InlineArgs::augment_args(Command::new("x"));
        let args = InlineArgs::from_arg_matches(&command.get_matches_from(["x"])).unwrap();
        assert_eq!(args.limits(), InlineLimits::default());
    }
}
