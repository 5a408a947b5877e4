//! Drivers on many nodes behind one address. The sidecar that clients call has no driver: it finds
//! the node that holds a snapshot ([`route`]), and calls the sidecar there, which serves CSI's own
//! SnapshotMetadata service in front of its driver ([`serve`]) and calls no other sidecar.
//!
//! The first authenticates at the second with a token of its own ServiceAccount that is valid for
//! one driver on one node. Tokens of users never reach a node, and the token that a node receives
//! is of no use elsewhere.

mod pages;
mod route;
mod serve;
mod signer;

use std::path::PathBuf;

use anyhow::bail;

pub use pages::{FromNode, Remote};
pub use route::{Nodes, of_node};
pub use serve::NodeApi;

use kubernetes::cache::Key;
use kubernetes::name;

/// The flags of both.
#[derive(Debug, Clone, clap::Args)]
// The default name, `Args`, would collide with the group of the struct that flattens this one.
#[group(skip)]
pub struct Args {
    /// Call the sidecars of nodes (--serve-node) instead of a driver: their Service
    #[arg(long, value_parser = name::namespaced, value_name = "NAMESPACE/NAME",
        requires_all = ["driver_name", "node_trust", "front_account"])]
    pub node_service: Option<Key>,

    /// With --node-service: name of the CSI driver on the nodes
    #[arg(long, requires = "node_service", value_name = "NAME")]
    pub driver_name: Option<String>,

    /// With --node-service: CA certificates of the nodes' sidecars (PEM)
    #[arg(long, requires = "node_service", group = "node_trust", value_name = "FILE")]
    pub node_ca: Option<PathBuf>,

    /// With --node-service: sign the certificates of the nodes' sidecars, as this signer of
    /// PodCertificateRequests, such as example.com/node (Kubernetes 1.37)
    #[arg(long, value_parser = signer_name, value_name = "NAME", group = "node_trust",
        requires_all = ["node_service", "node_account"])]
    pub node_signer: Option<String>,

    /// With --node-signer: ServiceAccount of the nodes' sidecars
    #[arg(long, value_parser = name::namespaced, value_name = "NAMESPACE/NAME", requires = "node_signer")]
    pub node_account: Option<Key>,

    /// With --node-signer: Secret that holds the authority, created if missing
    #[arg(long, value_parser = name::object, value_name = "NAME", default_value = "csi-loopback-nodes-ca")]
    pub node_signer_secret: String,

    /// Serve the driver of the node with this name, to --front-account only
    #[arg(long, value_parser = name::object, value_name = "NODE", requires = "front_account",
        conflicts_with = "node_service")]
    pub serve_node: Option<String>,

    /// ServiceAccount of the sidecars with --node-service
    #[arg(long, value_parser = name::namespaced, value_name = "NAMESPACE/NAME")]
    pub front_account: Option<Key>,
}

impl Args {
    /// # Errors
    /// `others` are flags of what is not served in this way.
    pub fn check(&self, others: &[(&str, bool)]) -> anyhow::Result<()> {
        let own = match (&self.node_service, &self.serve_node) {
            (Some(_), _) => "--node-service",
            (_, Some(_)) => "--serve-node",
            (None, None) => return Ok(()),
        };
        if let Some((flag, _)) = others.iter().find(|(_, is_set)| *is_set) {
            bail!("{flag} cannot be used with {own}");
        }
        Ok(())
    }
}

/// A name of a signer: a domain, a slash, and a path (CertificateSigningRequest).
fn signer_name(text: &str) -> Result<String, String> {
    match text.split_once('/') {
        Some((domain, path))
            if domain.contains('.') && [domain, path].into_iter().all(name::is_object) =>
        {
            Ok(text.to_owned())
        }
        _ => Err("is not the name of a signer, such as example.com/node".into()),
    }
}

/// The audience of tokens for the sidecar of this driver on this node.
pub fn audience(driver: &str, node: &str) -> String {
    format!("{driver}/{node}")
}
