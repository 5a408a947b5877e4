//! The topology of volumes and snapshots (CSI Topology): all of them are on this node.

use grpc::proto::csi::v1 as csi;
use storage::{Error, Result};

/// The topology segment of this node.
#[derive(Debug, Clone)]
pub struct NodeTopology {
    key: String,
    node_id: String,
}

impl NodeTopology {
    pub fn new(driver_name: &str, node_id: &str) -> Self {
        Self { key: format!("topology.{driver_name}/node"), node_id: node_id.to_owned() }
    }

    pub fn node_id(&self) -> &str {
        &self.node_id
    }

    pub fn to_csi(&self) -> csi::Topology {
        csi::Topology { segments: [(self.key.clone(), self.node_id.clone())].into() }
    }

    /// Whether this node matches `topology`. A topology with unknown segments does not match.
    pub fn is_in(&self, topology: &csi::Topology) -> bool {
        topology.segments.iter().all(|(key, value)| *key == self.key && *value == self.node_id)
    }

    /// Fails unless this node meets the requirement: it must match an entry of `requisite` or, if
    /// that is empty, of `preferred`.
    pub fn check_requirement(&self, requirement: Option<&csi::TopologyRequirement>) -> Result<()> {
        let Some(requirement) = requirement else { return Ok(()) };
        let candidates = match requirement.requisite.as_slice() {
            [] => &requirement.preferred,
            requisite => requisite,
        };
        if candidates.is_empty() || candidates.iter().any(|topology| self.is_in(topology)) {
            return Ok(());
        }
        Err(Error::Exhausted(format!(
            "accessibility_requirements: volumes and snapshots of this driver are only on {}={}",
            self.key, self.node_id
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(segments: &[(&str, &str)]) -> csi::Topology {
        let owned = segments.iter().map(|(key, value)| ((*key).into(), (*value).into()));
        csi::Topology { segments: owned.collect() }
    }

    #[test]
    fn only_requirements_with_this_node_are_met() {
        let node = NodeTopology::new("d.example", "n1");
        let here = topology(&[("topology.d.example/node", "n1")]);
        let elsewhere = topology(&[("topology.d.example/node", "n2")]);
        let zone = topology(&[("topology.d.example/node", "n1"), ("zone", "z1")]);
        let check = |requisite: &[&csi::Topology], preferred: &[&csi::Topology]| {
            let owned = |list: &[&csi::Topology]| list.iter().map(|one| (*one).clone()).collect();
            let requirement = csi::TopologyRequirement {
                requisite: owned(requisite),
                preferred: owned(preferred),
            };
            node.check_requirement(Some(&requirement)).is_ok()
        };
        assert_eq!(node.to_csi(), here);
        assert!(node.check_requirement(None).is_ok());
        assert!(check(&[], &[]));
        assert!(check(&[&elsewhere, &here], &[]));
        assert!(check(&[], &[&elsewhere, &here]));
        assert!(check(&[&topology(&[])], &[]));
        assert!(!check(&[&elsewhere], &[&here]));
        assert!(!check(&[], &[&elsewhere]));
        assert!(!check(&[&zone], &[]));
    }
}
