//! The flags of the sidecar: the flags of the released external-snapshot-metadata sidecar, with the
//! same names and defaults, and more. They follow Go's flag package, so that manifests of that
//! sidecar keep their meaning: the last occurrence wins, and an empty value means the default.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::{OsStringValueParser, TypedValueParser};
use tonic::Code;

use super::resolve::BaseReference;
use super::{cbt_http, nodes, publish};
use grpc::Endpoint;
use kubernetes::client::Rate;
use kubernetes::metadata_service::Address;
use kubernetes::tls::{self, authority};
use telemetry::role::{self, RoleArgs};
use telemetry::{http, klog};

#[derive(Debug, clap::Args)]
// `-version` of the released sidecar is `--version` here.
#[command(version, args_override_self = true)]
#[command(mut_arg("http_endpoint", role::http_by_default))]
pub struct Args {
    /// Socket of the CSI driver (unix:///path, /path or tcp://host:port)
    #[arg(long, default_value = "/run/csi/socket", value_name = "SOCKET")]
    pub csi_address: Endpoint,

    /// Timeout of a unary call to the CSI driver
    #[arg(long, default_value = "1m", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub timeout: Duration,

    /// TCP port of the SnapshotMetadata API, on all addresses (0: any free port)
    #[arg(long, default_value_t = 50051, value_name = "PORT")]
    pub port: u16,

    #[command(flatten)]
    pub tls: tls::Args,

    /// Serve the SnapshotMetadata API with session tokens
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false,
        action = clap::ArgAction::Set, value_parser = klog::boolean, value_name = "BOOL")]
    pub session_api: bool,

    /// Serve the released SnapshotMetadata API
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = true,
        action = clap::ArgAction::Set, value_parser = klog::boolean, value_name = "BOOL")]
    pub metadata_api: bool,

    /// Audience that a client's token must have; otherwise the audience of the
    /// SnapshotMetadataService is used
    #[arg(long, value_parser = not_blank, value_name = "AUDIENCE")]
    pub audience: Option<String>,

    /// SnapshotMetadataService that names the audience; otherwise the one with the driver's name is
    /// used
    #[arg(long, value_parser = not_blank, value_name = "NAME")]
    pub service_name: Option<String>,

    /// Accept as base_snapshot_id a CSI handle (id), the name of a VolumeSnapshot (name), or both
    /// (either)
    #[arg(long, value_enum, default_value_t = BaseReference::Id, value_name = "KIND")]
    pub base_reference: BaseReference,

    /// Status code for users who may not get VolumeSnapshots in the namespace
    #[arg(long, value_enum, default_value_t = DeniedAs::PermissionDenied, value_name = "CODE")]
    pub denied_as: DeniedAs,

    /// Maximum duration of a response stream, in minutes (0: the default)
    #[arg(long, default_value_t = DEFAULT_LONGEST, value_parser = clap::value_parser!(u64).range(..=525_600), value_name = "MINUTES")]
    pub max_streaming_duration_min: u64,

    /// Check every response of the driver against the stream's contract, and end a stream that
    /// breaks it
    #[arg(long)]
    pub check_streams: bool,

    /// Maximum number of concurrent response streams; further calls fail with RESOURCE_EXHAUSTED
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=4096), value_name = "N")]
    pub max_streams: u32,

    /// End a response stream that its client does not read for this long (0s: never)
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub stall_timeout: Duration,

    /// Time to cache a granted token or permission review, the maximum delay of a revocation (0s:
    /// do not cache)
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub review_cache_ttl: Duration,

    /// Kubeconfig file; otherwise the pod's ServiceAccount is used
    #[arg(long, value_parser = OsStringValueParser::new().map(PathBuf::from), value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Maximum requests per second to the API server (0: the default, negative: no limit)
    #[arg(long, default_value_t = DEFAULT_QPS, allow_negative_numbers = true, value_name = "N")]
    pub kube_api_qps: f64,

    /// Maximum burst of requests to the API server
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub kube_api_burst: u32,

    /// HTTP path of the metrics
    #[arg(long, default_value = "/metrics", value_parser = absolute, value_name = "PATH")]
    pub metrics_path: String,

    /// Do not serve metrics; /health is still served
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false,
        action = clap::ArgAction::Set, value_parser = klog::boolean, value_name = "BOOL")]
    pub disable_metrics: bool,

    #[command(flatten)]
    pub authority: authority::Args,

    #[command(flatten)]
    pub publish: publish::Args,

    #[command(flatten)]
    pub cbt_http: cbt_http::Args,

    #[command(flatten)]
    pub nodes: nodes::Args,

    #[command(flatten)]
    pub klog: klog::Args,

    #[command(flatten)]
    pub role: RoleArgs,
}

/// Default of the released sidecar.
const DEFAULT_QPS: f64 = 5.0;
/// Default of the released sidecar, in minutes.
const DEFAULT_LONGEST: u64 = 10;
/// A rate that never limits.
const UNLIMITED: Rate = Rate { per_second: 1e6, burst: 1_000_000 };

impl Args {
    /// Replaces empty values by the defaults.
    pub fn settled(mut self) -> Self {
        self.audience = self.audience.filter(|audience| !audience.is_empty());
        self.service_name = self.service_name.filter(|name| !name.is_empty());
        self.kubeconfig = self.kubeconfig.filter(|file| !file.as_os_str().is_empty());
        if self.max_streaming_duration_min == 0 {
            self.max_streaming_duration_min = DEFAULT_LONGEST;
        }
        self
    }

    /// `--max-streaming-duration-min`.
    pub fn max_duration(&self) -> Duration {
        Duration::from_secs(self.max_streaming_duration_min * 60)
    }

    /// # Errors
    /// The flags enable no API, or publish nothing.
    pub fn check(&self) -> anyhow::Result<()> {
        if !self.metadata_api && !self.session_api && !self.cbt_http.enabled {
            anyhow::bail!(
                "--metadata-api=false leaves nothing to serve without --session-api or --cbt-http"
            );
        }
        // The others are of the sidecar that clients call.
        let is_node = self.nodes.serve_node.is_some();
        self.nodes.check(&[
            ("--cbt-http", is_node && self.cbt_http.enabled),
            ("--session-api", is_node && self.session_api),
            ("--manage-service", is_node && self.publish.manage_service),
        ])?;
        let published = self.metadata_api || self.session_api || self.discovery().is_some();
        if self.publish.manage_service && !published {
            anyhow::bail!(
                "--manage-service leaves nothing to publish without --cbt-http-service-address"
            );
        }
        Ok(())
    }

    /// Address of cbt-http to publish in the driver's DriverDiscovery, if cbt-http is enabled.
    pub fn discovery(&self) -> Option<&Address> {
        self.cbt_http.service_address.as_ref().filter(|_| self.cbt_http.enabled)
    }

    pub fn rate(&self) -> Rate {
        let burst = self.kube_api_burst.max(1);
        match self.kube_api_qps {
            qps if qps < 0.0 => UNLIMITED,
            qps if qps > 0.0 && qps.is_finite() => Rate { per_second: qps.clamp(1e-3, 1e6), burst },
            _ => Rate { per_second: DEFAULT_QPS, burst },
        }
    }
}

/// `--denied-as`: the status code for a user without permission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeniedAs {
    /// The code of the released sidecar
    PermissionDenied,
    /// The code in the text of KEP-3314
    Unauthenticated,
}

impl DeniedAs {
    pub fn code(self) -> Code {
        match self {
            Self::PermissionDenied => Code::PermissionDenied,
            Self::Unauthenticated => Code::Unauthenticated,
        }
    }
}

/// Accepts an empty text, which means the default, and rejects blanks, which are a mistake.
fn not_blank(text: &str) -> Result<String, String> {
    if text.trim().is_empty() && !text.is_empty() {
        return Err("is blank; omit the flag to use the default".into());
    }
    Ok(text.to_owned())
}

fn absolute(text: &str) -> Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    if text.len() > 1
        && text.starts_with('/')
        && text.bytes().all(plain)
        && text != cbt_http::LEADER_PATH
        && !http::HEALTH_PATHS.contains(&text)
    {
        return Ok(text.to_owned());
    }
    Err(format!("{text:?} is not an absolute path such as /metrics, or is reserved"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> Args {
        let line = Line::try_parse_from(line.split(' ')).unwrap_or_else(|error| panic!("{error}"));
        line.args.settled()
    }

    #[test]
    fn an_empty_value_means_the_default() {
        let args = parse(
            "x --audience= --service-name= --kubeconfig= --tls-min-version= --max-streaming-duration-min=0",
        );
        assert_eq!((args.audience, args.service_name, args.kubeconfig), (None, None, None));
        assert_eq!(args.tls.tls_min_version, tls::MinVersion::Tls12);
        assert_eq!(args.max_streaming_duration_min, DEFAULT_LONGEST);
        // The value of an unset variable in a pod's manifest.
        assert_eq!(parse("x --audience ").audience, None);
        let blank = Line::try_parse_from(["x", "--audience", " "]).unwrap_err();
        assert!(blank.to_string().contains("is blank"), "{blank}");
    }

    #[test]
    fn the_last_value_of_a_flag_wins() {
        let args = parse(
            "x --audience=a --port 1 --session-api --disable-metrics --kubeconfig=/a --port=2 \
             --session-api=false --audience=b --manage-service --service-address a:1 --manage-service \
             --disable-metrics --kubeconfig=",
        );
        assert_eq!((args.audience.as_deref(), args.port), (Some("b"), 2));
        assert_eq!((args.session_api, args.disable_metrics, args.kubeconfig), (false, true, None));
        assert_eq!(parse("x --audience=a --audience=").audience, None);
    }

    #[test]
    fn flags_that_nodes_do_not_serve_are_refused() {
        let front = "x --node-service n/s --driver-name d --node-ca f --front-account n/a";
        let node = "x --serve-node a --front-account n/a";
        let refused = |line: &str, flag: &str| {
            let error = parse(&format!("{line} {flag}")).check().unwrap_err().to_string();
            assert!(error.starts_with(&flag[..flag.find(' ').unwrap_or(flag.len())]), "{error}");
        };
        let manage = "--manage-service --service-address a:1";
        for flag in ["--cbt-http", "--session-api", manage] {
            refused(node, flag);
        }
        for allowed in [front, node, &format!("{front} --session-api --cbt-http {manage}")] {
            parse(allowed).check().unwrap();
        }
        for incomplete in ["x --node-service n/s", "x --serve-node a", "x --driver-name d"] {
            assert!(Line::try_parse_from(incomplete.split(' ')).is_err(), "{incomplete}");
        }
    }

    #[test]
    fn a_base_is_a_handle_by_default() {
        assert_eq!(parse("x").base_reference, BaseReference::Id);
        assert_eq!(parse("x --base-reference either").base_reference, BaseReference::Either);
    }
}
